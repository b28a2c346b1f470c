"""The Python stacks of this process, as text in faulthandler's form.

``ncclops.stacks.parsing`` reads it.
Both kinds of stacks.txt look alike: those that a process writes itself have the threads' names and
qualified function names, those of its C-level dump have neither (but for the main thread's name).
"""

from __future__ import annotations

import re
import sys
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType

from ncclops.restart.raised import described
from ncclops.stacks.parsing import MAIN_THREAD

# Deeper stacks are recursions; more threads than that are a pool's.
_MOST_FRAMES = 100
_MOST_THREADS = 200
_SUMMARY_CHARS = 300

# What our own code, on the way out of the script, calls: formatting, mostly.
_PLUMBING = re.compile(r"/lib/python3[.\d]*/(?!site-|dist-)|^<frozen ")
# But for what stands around torch's calls within the script.
_OURS = re.compile(r"/ncclops/(worker|restart)/(?!waits\.py)\w+\.py$")


@dataclass(frozen=True)
class OwnStacks:
    """The stacks as ``text``; ``left_by`` (type and text) if the main thread's is a traceback's."""

    text: str
    left_by: str | None = None


def render_own(
    frames: Mapping[int, FrameType] | None = None, left_by: BaseException | None = None
) -> OwnStacks:
    """The stacks of all threads of this process but the caller's own, the main thread's first.

    ``left_by`` is an exception by which the main thread has left the script: shown is where it
    was raised, and not where the thread waits since. That may be a collective which a peer's
    abort has ended before our own snapshot was taken.
    """
    current = dict(sys._current_frames() if frames is None else frames)
    current.pop(threading.get_ident(), None)
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    order = sorted(current, key=lambda ident: ident != main)[:_MOST_THREADS]
    rendered = [_render(ident, names.get(ident), current[ident]) for ident in order]
    if left_by is None and main in current:
        left_by = _leaving_by(current[main])
    if left_by is not None and left_by.__traceback__ is not None and main in order:
        said = " ".join("".join(described(left_by).format_exception_only()).split())
        said = said[:_SUMMARY_CHARS]
        rendered[0] = _render_traceback(main or 0, left_by, said)
        return OwnStacks("\n".join(rendered), said)
    return OwnStacks("\n".join(rendered))


def _leaving_by(frame: FrameType | None) -> BaseException | None:
    """The exception that the main thread handles in our own code, on its way out of the script."""
    while frame is not None and _PLUMBING.search(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None or not _OURS.search(frame.f_code.co_filename):
        return None
    handled = sys._current_exceptions().get(threading.main_thread().ident or 0)
    error = handled[1] if isinstance(handled, tuple) else handled  # 3.11: sys.exc_info()
    if not isinstance(error, BaseException) or _is_ours(error):
        return None
    return error


def _is_ours(error: BaseException) -> bool:
    """Whether no other code than our own has seen ``error``: a wait of it that is over."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    return all(_OURS.search(file) or _PLUMBING.search(file) for file in files)


def _render_traceback(main: int, error: BaseException, said: str) -> str:
    lines = [f"# the main thread has left the script by {said}; it was raised at"]
    lines.append(f"Thread 0x{main:016x} [{MAIN_THREAD}] (most recent call first):")
    if isinstance(error, SyntaxError) and error.filename and error.lineno:  # it has run nowhere
        lines.append(f'  File "{error.filename}", line {error.lineno}')
    places = list(traceback.walk_tb(error.__traceback__))[::-1][:_MOST_FRAMES]
    lines += [_line(frame, number) for frame, number in places]
    return "\n".join(lines) + "\n"


def _line(frame: FrameType, number: int) -> str:
    code = frame.f_code
    return f'  File "{code.co_filename}", line {number} in {code.co_qualname}'


def _render(ident: int, name: str | None, frame: FrameType | None) -> str:
    label = f" [{name}]" if name else ""
    lines = [f"Thread 0x{ident:016x}{label} (most recent call first):"]
    while frame is not None and len(lines) <= _MOST_FRAMES:
        lines.append(_line(frame, frame.f_lineno))
        frame = frame.f_back
    return "\n".join(lines) + "\n"
