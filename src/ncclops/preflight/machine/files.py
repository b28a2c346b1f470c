"""Files below a root as ``{path: text}``: regular ones, each bounded, none waited for.

``/proc`` and ``/sys`` show regular files whose size says nothing. What is none (a pipe, a device)
is there without a text, because opening it to read might wait for ever.
"""

from __future__ import annotations

import errno
import fnmatch
import glob
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ncclops.record.regular_file import open_regular

# The largest that is wanted are lists of mounts and modules of large nodes.
MOST_BYTES = 1 << 18
# A tree may have links in circles, or a directory of millions of files.
MOST_FILES = 20_000
_MOST_LINKS = 40  # in one path, as in the kernel


def read(root: Path, patterns: Iterable[str]) -> dict[str, str | None]:
    """The files that match shell-style ``patterns``, by their paths relative to ``root``.

    None for one that is there and cannot be read, is a directory or no regular file; a link's text
    that is asked for with ``@`` before the pattern is the name of what it leads to.
    """
    found: dict[str, str | None] = {}
    for pattern in patterns:
        links = pattern.startswith("@")
        for number, name in enumerate(_names(root, pattern.removeprefix("@"))):
            if number >= MOST_FILES:
                break
            found[name] = _target(root, name) if links else read_text(root, name)
    return found


def below(root: Path, name: str) -> Path:
    """``name`` as a process finds it for which ``root`` is ``/``.

    Symbolic links are resolved inside of ``root``: a tree copied from a machine has those of that
    machine. Raises ``OSError`` where they lead in a circle.
    """
    if root == Path("/"):
        return root / name
    pending, done, links = name.split("/")[::-1], list[str](), 0
    while pending:
        part = pending.pop()
        if part in ("", "."):
            continue
        if part == "..":
            done = done[:-1]
            continue
        try:
            target = os.readlink(root.joinpath(*done, part))  # noqa: PTH115 - text, with its slash
        except OSError:  # no link, or nothing there
            done.append(part)
            continue
        links += 1
        if links > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), name)
        done = [] if target.startswith("/") else done
        pending += target.split("/")[::-1]
    return root.joinpath(*done)


def names(root: Path, directory: str) -> list[str]:
    """What lies in a directory below ``root``; nothing where there is none."""
    try:
        return sorted(os.listdir(below(root, directory)))  # noqa: PTH208 - names
    except OSError:
        return []


def _names(root: Path, pattern: str) -> Iterator[str]:
    if root == Path("/"):
        return glob.iglob(pattern, root_dir=root)  # noqa: PTH207 - relative names
    return _matching(root, "", pattern.split("/"))


def _matching(root: Path, top: str, parts: Sequence[str]) -> Iterator[str]:
    part, *rest = parts
    entries: Sequence[str] = [part]
    if glob.has_magic(part):
        listed = (each for each in names(root, top) if each[0] != "." or part[0] == ".")
        entries = fnmatch.filter(listed, part)
    for entry in entries:
        name = f"{top}/{entry}" if top else entry
        if rest:
            yield from _matching(root, name, rest)
        elif _is_there(root, top, entry):
            yield name


def _is_there(root: Path, directory: str, entry: str) -> bool:
    try:
        return os.path.lexists(below(root, directory) / entry)
    except OSError:
        return False


def read_text(root: Path, name: str, most_bytes: int = MOST_BYTES) -> str | None:
    """The beginning of a regular file, stripped; None where there is none to be read."""
    try:
        with open_regular(below(root, name)) as file:
            parts, left = [], most_bytes
            while left > 0 and (part := file.read(left)):
                parts.append(part)
                left -= len(part)
    except OSError:  # not there, not ours to see, or the driver refuses (an empty GID's type)
        return None
    return b"".join(parts).decode(errors="replace").strip("\n \0")


def tail_text(root: Path, name: str, most_bytes: int) -> str | None:
    """The end of a regular file that may be large, from the first whole line on."""
    try:
        with open_regular(below(root, name)) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - most_bytes))
            text = (file.read(most_bytes) or b"").decode(errors="replace")
    except OSError:
        return None
    return text.partition("\n")[2] if size > most_bytes else text


def _target(root: Path, name: str) -> str | None:
    try:
        return Path(os.path.realpath(below(root, name))).as_posix()
    except OSError:
        return None
