"""A progress bar's text, cut to the columns that a terminal has. Pure."""

from __future__ import annotations

import re

from rich.cells import cell_len, set_cell_size

# CSI sequences. Colours stay (SGR, `m`); what moves the cursor, as bars below each other do, would
# move it off the one line that a bar has here.
_SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[@-Z\\-_]?")
# Loads the table of widths now: once the job runs, there may be no descriptor left to open it.
cell_len("█漢")
_RESET = "\x1b[m"


def fitted(bar: bytes, columns: int) -> bytes:
    """``bar`` in ``columns`` at most: by what its characters take, and none of them cut in two."""
    # A bar begins as a worker's buffer ends: it may lack the end of a character.
    text, shown = bar.decode(errors="ignore"), list[str]()
    room, coloured, at = columns, False, 0
    for found in _SEQUENCE.finditer(text):
        room = _take(text[at : found.start()], room, shown)
        at = found.end()
        if found[0].endswith("m") and room > 0:
            shown.append(found[0])
            coloured = True
    _take(text[at:], room, shown)
    return ("".join(shown) + _RESET * coloured).encode()


def _take(text: str, room: int, shown: list[str]) -> int:
    """Add what fits of ``text``; how many columns are left, none where it did not fit whole."""
    needed = cell_len(text)
    if needed <= room:
        shown.append(text)
        return room - needed
    shown.append(set_cell_size(text, room))
    return 0
