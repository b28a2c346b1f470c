"""A stack as its user reads it: the lines of the user's code, all others counted by package."""

from __future__ import annotations

import linecache
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby

import msgspec

from ncclops.record.regular_file import can_be_quoted
from ncclops.record.story_record import CodeLine
from ncclops.stacks.frame import Frame
from ncclops.stacks.ownership import package_of, user_frame
from ncclops.stacks.parsing import last_traceback

# Deeper ones are recursions; the innermost lines say what happened.
_MOST_LINES = 6
_MOST_CHARS = 200
# As torch writes it before each line of a traceback.
_RANK_PREFIX = re.compile(r"^\[rank\d+\]:\s?", re.MULTILINE)


def of_traceback(text: str) -> list[CodeLine]:
    """The user's lines of the last traceback in ``text``, the innermost last; none without one."""
    return _folded(last_traceback(without_rank(text)))


def without_rank(text: str) -> str:
    """Lines of a log without the rank that torch writes before them."""
    return _RANK_PREFIX.sub("", text)


def of_stack(frames: Sequence[Frame]) -> list[CodeLine]:
    """The same for the ``frames`` of a running thread, which come innermost first."""
    return _folded([(frame, _line_of(frame)) for frame in frames[::-1]])


def _line_of(frame: Frame) -> str:
    return linecache.getline(frame.file, frame.line) if can_be_quoted(frame.file) else ""


def lines_of(frames: Sequence[Frame]) -> list[str]:
    """``frames``, which come innermost first, as lines: the user's one by one, those that they
    have called counted, and nothing of what has called them."""
    mine = user_frame(frames)
    lines: list[str] = []
    own = 0

    def is_own(frame: Frame) -> bool:
        return mine is not None and package_of(frame.file) == package_of(mine.file)

    for own_code, each in groupby(frames, is_own):
        group = list(each)
        if own_code:
            lines += [str(frame) for frame, _ in groupby(group)]  # each once: a recursion
            own = len(lines)
        else:
            lines.append(f"... {_counted(group)}, the innermost {group[0].short}")
    return lines[:own] if own else lines


def _folded(executed: Sequence[tuple[Frame, str]]) -> list[CodeLine]:
    """Where none is the user's, the innermost of a package that is not the framework stands in."""
    mine = user_frame(frame for frame, _ in reversed(executed))
    if mine is None:
        return []
    package = package_of(mine.file)
    lines: list[CodeLine] = []
    last, inner = None, list[Frame]()
    for frame, text in executed:
        if package_of(frame.file) != package:
            inner.append(frame)
            continue
        if lines and inner:
            lines[-1] = _calling(lines[-1], inner)
        elif frame == last:
            continue  # a recursion
        last, inner = frame, []
        lines.append(
            CodeLine(
                file=frame.file,
                line=frame.line,
                function=frame.function,
                text=text.strip()[:_MOST_CHARS],
            )
        )
    if inner:
        lines[-1] = _calling(lines[-1], inner)
    return lines[-_MOST_LINES:]


def _calling(line: CodeLine, inner: Iterable[Frame]) -> CodeLine:
    return msgspec.structs.replace(line, calls=_counted(inner))


def _counted(frames: Iterable[Frame]) -> str:
    packages = Counter(package_of(frame.file) or "the script" for frame in frames)
    count = packages.total()
    names = " and ".join(name for name, _ in packages.most_common(2))
    return f"{count} frame{'s' * (count != 1)} in {names}"
