"""Ends what threads of the script are doing when process groups are aborted.

An abort of NCCL's groups ends each wait for the device without an error. Not only the main thread
may be in one: a thread that saves checkpoints reads what the training has queued on the device. It
would go on with what a collective has not summed, and save that.

Threads that are at work are ended by an exception, raised before the abort. It arrives when the
call that waits returns, see ``_interrupt.main_thread``. Others are left alone, since an imported
module may keep them over restarts: a pool's workers, monitors, what uploads metrics.
"""

from __future__ import annotations

import logging
import platform
import site
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from ncclops.restart._interrupt.delicate import Delicate, how_delicate
from ncclops.restart._interrupt.threads import is_running, kernel_wait, set_async_exc, system_call

log = logging.getLogger("ncclops.restart")

OUR_THREADS = "ncclops-"  # how the names of our own begin

_DELICATE_FOR_S = 0.2
_LOOK_AGAIN_S = 0.002
# Who waits for Python's lock, to run, wakes up each 5 ms (sys.getswitchinterval).
_STILL_FOR_S = 0.03

_PACKAGES = ("site-packages", "dist-packages")
_STANDARD = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")})
_INSTALLED = (
    *{sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), site.getusersitepackages()},
    str(Path(__file__).parents[2]),
)
# Who writes checkpoints from a thread of a library, without a frame of the script's.
_SAVES = ("torch.serialization", "torch.distributed.checkpoint")

# Calls of the kernel in which a thread waits for something else than the device: to read, to
# receive, for a connection, for a child, for events, for a time. CUDA runs, or it waits in poll,
# ioctl, sched_yield or futex.
_WAITS = {
    "x86_64": {0, 23, 34, 35, 43, 45, 47, 61, 128, 230, 232, 247, 270, 281, 288, 441},
    "aarch64": {22, 63, 72, 95, 101, 115, 137, 202, 207, 212, 242, 260, 441},
}.get(platform.machine(), set())


def end_threads_at_work(error: type[BaseException]) -> None:
    """Raise ``error`` in each thread but the main one that is at work for the script.

    At work is who has code of the script on its stack, or saves a checkpoint, and does not just
    wait for something else than the device. In the middle of torch or where it has made a process
    group, it is at work also while it waits. Where an interruption is delicate for longer than
    0.2 s (see ``_interrupt.delicate``) it is left out.
    """
    _be_quiet_about(error)
    left = [_Looked(each) for each in _that_may_be_ended()]
    deadline = time.monotonic() + _DELICATE_FOR_S
    while left and time.monotonic() < deadline:
        frames = sys._current_frames()
        left = [each for each in left if not _settled(each, frames, error)]
        if left:
            time.sleep(_LOOK_AGAIN_S)


def are_there_others() -> bool:
    """Whether there are threads that ``end_threads_at_work`` would look at."""
    return bool(_that_may_be_ended())


def _that_may_be_ended() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if _may_be_ended(each)]


def _settled(looked: _Looked, frames: dict[int, FrameType], error: type[BaseException]) -> bool:
    """Whether the thread is not at work, or has been ended."""
    frame = frames.get(looked.thread.ident or 0)
    at_work = False if frame is None else looked.is_at_work(frame)
    if frame is None or at_work is False:
        return True
    if at_work is None or how_delicate(each.f_code for each in _walk(frame)) is not Delicate.NO:
        return False
    set_async_exc(looked.thread.ident or 0, error)
    log.warning("%s", _told(looked.thread, frame))
    return True


# The threads that have made process groups, by their numbers; see ``_groups.ending``.
makers_of_groups: set[int] = set()


def _may_be_ended(thread: threading.Thread) -> bool:
    # What Python has not started is torch's: autograd's, for which the main thread waits.
    foreign = isinstance(thread, threading._DummyThread)
    main = thread is threading.main_thread()
    return not (main or foreign or thread.name.startswith(OUR_THREADS))


class _Looked:
    """What was seen of one thread."""

    def __init__(self, thread: threading.Thread) -> None:
        self.thread = thread
        self._first: tuple[object, float] | None = None

    def is_at_work(self, frame: FrameType) -> bool | None:
        """None: not known yet."""
        modules = [str(each.f_globals.get("__name__", "")) for each in _walk(frame)]
        if self.thread.ident in makers_of_groups or any(m.startswith(_SAVES) for m in modules):
            return True
        if not any(_is_of_the_script(each) for each in _walk(frame)):
            return False
        if any(name == "torch" or name.startswith("torch.") for name in modules):
            return True
        if system_call(self.thread.native_id) in _WAITS:
            return False
        if not _is_standard(frame.f_code.co_filename) or is_running(self.thread.native_id):
            return True
        # In a queue, say: it waits there, or just passes through.
        place = id(frame), frame.f_lasti, kernel_wait(self.thread.native_id)
        now = time.monotonic()
        if self._first is None:
            self._first = place, now
        if place != self._first[0]:
            return True
        return False if now - self._first[1] > _STILL_FOR_S else None


def _walk(frame: FrameType) -> list[FrameType]:
    return [each for each, _ in traceback.walk_stack(frame)]


def _is_of_the_script(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    installed = file.startswith(_INSTALLED) or any(name in file for name in _PACKAGES)
    return not (installed or _is_standard(file))


def _is_standard(file: str) -> bool:
    inside = file.startswith(_STANDARD) and not any(name in file for name in _PACKAGES)
    return inside or file.startswith("<frozen ")


def _told(thread: threading.Thread, frame: FrameType) -> str:
    innermost = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}"
    return (
        f"thread {thread.name!r} is ended (now at {innermost}): what it works with may depend on"
        " collectives that are being aborted"
    )


def _be_quiet_about(error: type[BaseException]) -> None:
    """Have no traceback printed for the threads that ``error`` ends."""
    before: Callable[[Any], object] = threading.excepthook
    if getattr(before, "quiet_about", None) is error:
        return

    def hook(ended: threading.ExceptHookArgs) -> None:
        if not issubclass(ended.exc_type, error):
            before(ended)

    hook.quiet_about = error  # type: ignore[attr-defined]
    threading.excepthook = hook
