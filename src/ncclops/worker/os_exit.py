"""``os._exit`` in a script that may start again in place.

Scripts call it as their last line, since the end of a process may hang in a library. The others
would take that for a death and train without this rank, also where one of them still saves what
all have trained. So ``os._exit(0)`` ends the script as ``sys.exit(0)`` does, and the process once
all ranks have ended. What an interrupted script calls on its way out does not end its process.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from ncclops.receipts import recorder
from ncclops.record import worker_record
from ncclops.record.events import ExitingEvent
from ncclops.restart.exception import RankShouldRestart
from ncclops.restart.raised import chain_of


class _Exit(SystemExit):
    """The script has called ``os._exit(0)``: code of 0."""


class _Script:
    runs_in: int | None = None  # this process, as opposed to those that it forks
    has_called = False


_script = _Script()


@contextmanager
def ends_script() -> Iterator[None]:
    """While the script runs, ``os._exit`` in the main thread of this process ends it alone."""
    leave = os._exit
    os._exit = _instead_of(leave)  # type: ignore[assignment]
    _script.runs_in, _script.has_called = os.getpid(), False
    try:
        yield
    finally:
        _script.runs_in = None
        os._exit = leave


def end_process_if_called() -> None:
    """End the process as the script has asked for: without callbacks at exit, or waiting for
    threads.

    All ranks have ended well.
    """
    if _script.has_called:
        recorder.current().close()
        worker_record.report(ExitingEvent())
        os._exit(0)


def _instead_of(leave: Callable[[int], NoReturn]) -> Callable[[int], NoReturn]:
    # Also called later, where a module of the script has kept it.
    def _exit(status: int) -> NoReturn:
        is_main = threading.current_thread() is threading.main_thread()
        if _script.runs_in != os.getpid() or not is_main:
            leave(status)
        if (way_out := _way_out()) is not None:
            raise way_out
        if status != 0:
            leave(status)
        _script.has_called = True
        raise _Exit(0)

    return _exit


def _way_out() -> BaseException | None:
    """What ends the script already, or has it start again, where this is called on its way out."""
    links = chain_of(sys.exception())
    return next((link for link in links if isinstance(link, RankShouldRestart | _Exit)), None)
