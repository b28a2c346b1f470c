"""Text from outside (logs, dumps, records, names), made fit to be shown to a person.

The places where ncclops shows text call this: `cli._output` and the agent's terminal, the log of
the agent, and the HTML of a report. What workers print goes through the launcher as it is.
"""

from __future__ import annotations

import re

# Colours and styles (CSI ... m), the only sequences that logs are full of for a good reason.
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
# What a terminal acts on (C0 but tab and newline, C1), what turns the order of the letters around
# it (Unicode TR 9, the controls of bidirectional text), separators that end a line somewhere, and
# halves of surrogate pairs: bytes of a name that are no UTF-8, which no stream of text takes.
_ACTING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def plain(text: str) -> str:
    """``text`` without colours, and with ``\\x1b`` or such for each character that acts.

    Newlines and tabs stay.
    """
    if text.isascii() and text.isprintable():
        return text
    return _ACTING.sub(_spelled, _COLOUR.sub("", text))


def plain_line(text: str, most_chars: int) -> str:
    """``text`` as one line of at most ``most_chars`` characters, with ``…`` where it is cut.

    White space of any kind becomes one space.
    """
    # Cut before as well: what is shown of 100 MB must not cost the reading of 100 MB.
    line = plain(" ".join(text[: 8 * most_chars].split()))
    is_cut = len(line) > most_chars or (len(text) > 8 * most_chars)
    return line[: most_chars - 1] + "…" if is_cut else line


def _spelled(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")
