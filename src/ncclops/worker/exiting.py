"""Reports that a script has ended well, and that only the end of its process is left.

From then on the agent takes nothing that becomes of the process for a failure, and ends it if it
stays.

Before that the script's own threads and callbacks at exit are waited for, such as an upload. If it
takes long, it is said what they are; a process in which nothing happens any more is ended.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable

from ncclops.record import worker_record
from ncclops.record.events import ExitingEvent, SlowExitEvent

# What a process does at its end takes seconds.
_SAID_AFTER_S = 30.0
# Uploads wait for minutes where a network is down.
_ENDED_AFTER_S = 1800.0
_LOOKS = 30  # in that time
# Threads that only look whether there is something to do take less of a core.
_IDLE_SHARE = 0.01


class _Script:
    has_ended_well = False


_script = _Script()


def watch() -> None:
    """Call before anything else registers a callback at exit: they run in the reverse order."""
    atexit.register(_report)


def _report() -> None:
    # Python has waited for the script's threads, and what the script registered at exit has run.
    if _script.has_ended_well:
        worker_record.report(ExitingEvent())


def note_good_end() -> None:
    """The script has ended well, and the process will."""
    if not _script.has_ended_well:
        _script.has_ended_well = True
        threading.Thread(target=watch_end, name="ncclops-exit", daemon=True).start()


def watch_end(said_after_s: float = _SAID_AFTER_S, ended_after_s: float = _ENDED_AFTER_S) -> None:
    """Say what the process waits for at its end, and end it with 0 if nothing happens for
    ``ended_after_s``: the main thread does not move, and next to no CPU time is used.

    Does not return.
    """
    time.sleep(said_after_s)
    _report_wait(said_after_s)
    pause_s = ended_after_s / _LOOKS
    place, idle_s = _place(), 0.0
    while idle_s < ended_after_s:
        used_s = time.process_time()
        time.sleep(pause_s)
        is_idle = time.process_time() - used_s < _IDLE_SHARE * pause_s and _place() == place
        place, idle_s = _place(), idle_s + pause_s if is_idle else 0.0
    _report_wait(ended_after_s, ended=True)
    _report()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or none
            stream.flush()
    os._exit(0)


def _report_wait(after_s: float, *, ended: bool = False) -> None:
    worker_record.report(SlowExitEvent(after_s=after_s, waits_for=_waits_for(), ended=ended))


def _place() -> str | None:
    """Where the main thread is. ``None``: in a callback that is no function of Python."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return None
    return f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}"


def _waits_for() -> str:
    place = _place()
    if place is not None and place.endswith("in _shutdown"):
        threads = [t.name for t in threading.enumerate() if not t.daemon]
        others = [name for name in threads if name != threading.main_thread().name]
        return f"waits for its threads ({', '.join(others)})"
    return f"is in a callback at exit{'' if place is None else f' ({place})'}"


def observed(run: Callable[[], None]) -> None:
    """``run()``, the script with what is around it, and note whether it ends well."""
    try:
        run()
    except SystemExit as end:
        if end.code in (None, 0):
            note_good_end()
        raise
    note_good_end()
