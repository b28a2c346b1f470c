"""Reads stacks from text.

Three forms are known: faulthandler's (our own snapshots have it, too) and py-spy's, which have the
innermost frame first, and tracebacks, which have it last. All else in a text is passed over.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from ncclops.stacks.frame import Frame
from ncclops.whole_numbers import whole_number

# Python's name of the main thread. Our own stacks carry the threads' names.
MAIN_THREAD = "MainThread"

# Each takes time that grows with a line and not with its square: what a script writes may be one
# line of megabytes.
_FAULTHANDLER_THREAD = re.compile(
    r"(?:Current thread|Thread) 0x(?P<id>[0-9a-f]+)(?: \[(?P<name>[^\]]*+)\])?.*\(most recent call"
)
_SPY_THREAD = re.compile(
    r"Thread (?:0x)?(?P<id>[0-9a-fA-F]+) \((?P<state>[^)]*)\)(?:: \"?(?P<name>[^\"]*)\"?)?"
)
_TRACEBACK = "Traceback (most recent call last)"
_FILE = re.compile(
    r'\s*+File "(?P<file>.+)", line (?P<line>\d+|\?\?\?)(?:,? in (?P<function>.*\S))?\s*$'
)
_TRACEBACK_FILE = re.compile(
    r'^ *File "(?P<file>.+)", line (?P<line>\d+)(?:, in (?P<function>.*\S))?\s*?$', re.MULTILINE
)
_TRACEBACK_BEGIN = ("Traceback (most recent call last)", "Traceback of the earlier iteration")
_EXECUTED = re.compile(
    r'^ *File "(?P<file>.+)", line (?P<line>\d+)(?:, in (?P<function>.*\S))?\s*$'
)
_SPY_FRAME = re.compile(
    r" {2,}+(?=.*:\d+\)\s*$)(?P<function>\S.*?) \((?P<file>.+):(?P<line>\d+)\)\s*$"
)
# Deeper stacks are recursions.
_MOST_FRAMES = 200
# Nobody reads on, and the system takes no longer path.
_MOST_FUNCTION, _MOST_PATH = 400, 4096


@dataclass(frozen=True)
class ThreadStack:
    """A thread's frames, the innermost first. A traceback has no ``ident``."""

    ident: int | None
    name: str | None
    frames: tuple[Frame, ...]


@dataclass
class _Begun:
    ident: int | None = None
    name: str | None = None
    innermost_last: bool = False
    frames: list[Frame] = field(default_factory=list)


def parse(text: str) -> list[ThreadStack]:
    """The threads and tracebacks in ``text``, in its order, each thread once."""
    begun: list[_Begun] = []
    for line in text.splitlines():
        if (header := _header(line)) is not None:
            begun.append(header)
        elif (frame := _frame(line)) is not None:
            if not begun and frame.function:
                begun.append(_Begun())
            if begun:
                begun[-1].frames.append(frame)
    found: list[ThreadStack] = []
    idents = set()
    for each in begun:
        # A dump that was asked for twice at once has each thread twice.
        if each.ident in idents or (each.ident is None and not each.frames):
            continue
        if each.ident is not None:
            idents.add(each.ident)
        frames = each.frames[::-1] if each.innermost_last else each.frames
        found.append(ThreadStack(each.ident, each.name, tuple(frames[:_MOST_FRAMES])))
    return found


def main_thread(threads: Sequence[ThreadStack]) -> ThreadStack | None:
    """The main thread; where none has its name the last, as faulthandler begins with the newest."""
    named = (each for each in threads if each.name is not None and _is_main(each.name))
    return next(named, threads[-1] if threads else None)


def traceback_frames(text: str) -> tuple[Frame, ...]:
    """The frames of a traceback and of those it follows from, the innermost first."""
    found = [_as_frame(match) for match in _TRACEBACK_FILE.finditer(text)]
    return tuple(found[::-1])


def last_traceback(text: str) -> tuple[tuple[Frame, str], ...]:
    """The frames of the last traceback in ``text``, the outermost first, each with its code.

    Of an exception with a cause that is the one which was raised in the end. A file that does not
    compile has no function.
    """
    found: list[tuple[Frame, str]] = []
    expects_code = False
    for line in text.splitlines():
        if line.lstrip().startswith(_TRACEBACK_BEGIN):
            found, expects_code = [], False
        elif (at := _EXECUTED.match(line)) is not None:
            found.append((_as_frame(at), ""))
            expects_code = True
        elif expects_code:
            expects_code = False
            if line.startswith("    "):
                found[-1] = (found[-1][0], line.strip())
    return tuple(found)


def is_frame(line: str) -> bool:
    """Whether ``line`` is one of a traceback that names a file."""
    return _EXECUTED.match(line) is not None


def _is_main(name: str) -> bool:
    return name == MAIN_THREAD or "main thread" in name.lower()


def _header(line: str) -> _Begun | None:
    if found := _FAULTHANDLER_THREAD.match(line):
        return _Begun(int(found["id"], 16), found["name"])
    if line.lstrip().startswith(_TRACEBACK):
        return _Begun(innermost_last=True)
    if found := _SPY_THREAD.match(line):
        return _Begun(int(found["id"], 16), found["name"] or found["state"])
    return None


def _frame(line: str) -> Frame | None:
    found = _FILE.match(line) or _SPY_FRAME.match(line)
    return _as_frame(found) if found else None


def _as_frame(found: re.Match[str]) -> Frame:
    function = (found["function"] or "")[:_MOST_FUNCTION]
    return Frame(found["file"][:_MOST_PATH], whole_number(found["line"]) or 0, function)
