"""Files below a root as ``{path: text}``: regular ones, each bounded, none waited for.

``/proc`` and ``/sys`` show regular files whose size says nothing. What is none (a pipe, a device)
is there without a text, because opening it to read might wait for ever.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable
from pathlib import Path

from ncclops.record.regular_file import open_regular

# The largest that is wanted are lists of mounts and modules of large nodes.
MOST_BYTES = 1 << 18
# A tree may have links in circles, or a directory of millions of files.
MOST_FILES = 20_000


def read(root: Path, patterns: Iterable[str]) -> dict[str, str | None]:
    """The files that match shell-style ``patterns``, by their paths relative to ``root``.

    None for one that is there and cannot be read, is a directory or no regular file; a link's text
    that is asked for with ``@`` before the pattern is the name of what it leads to.
    """
    found: dict[str, str | None] = {}
    for pattern in patterns:
        links = pattern.startswith("@")
        for number, name in enumerate(
            glob.iglob(pattern.removeprefix("@"), root_dir=root)  # noqa: PTH207 - relative names
        ):
            if number >= MOST_FILES:
                break
            found[name] = _target(root / name) if links else read_text(root / name)
    return found


def read_text(path: Path, most_bytes: int = MOST_BYTES) -> str | None:
    """The beginning of a regular file, stripped; None where there is none to be read."""
    try:
        with open_regular(path) as file:
            parts, left = [], most_bytes
            while left > 0 and (part := file.read(left)):
                parts.append(part)
                left -= len(part)
    except OSError:  # not there, not ours to see, or the driver refuses (an empty GID's type)
        return None
    return b"".join(parts).decode(errors="replace").strip("\n \0")


def tail_text(path: Path, most_bytes: int) -> str | None:
    """The end of a regular file that may be large, from the first whole line on."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - most_bytes))
            text = (file.read(most_bytes) or b"").decode(errors="replace")
    except OSError:
        return None
    return text.partition("\n")[2] if size > most_bytes else text


def _target(path: Path) -> str | None:
    try:
        return Path(os.path.realpath(path)).as_posix()
    except OSError:
        return None
