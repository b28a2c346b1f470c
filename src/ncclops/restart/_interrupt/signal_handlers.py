"""What a program's signal handlers raise, kept out of the wrapper's own code.

Python runs a handler in the main thread, wherever that is. One that raises is a fault of the
function while that runs. Between two iterations it would end the rank: such are the handler by
which torch reports that a worker of a data loader has died, and that of a timeout by
``signal.alarm`` which the function has left behind.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

from ncclops.restart.exception import RankShouldRestart
from ncclops.restart.raised import summarise

# Not as a script, or what runs it, may replace them: the handler is contained as it was set.
_set_handler, _handler_of = signal.signal, signal.getsignal

log = logging.getLogger("ncclops.restart")


def contain_handlers() -> None:
    """From now on an ``Exception`` of a handler is logged and goes no further. Main thread.

    What means to end the process does, such as ``SystemExit`` and ``KeyboardInterrupt``.
    """
    while True:
        try:
            _contain_handlers()
            return
        except Exception as error:  # noqa: BLE001 - of one that was not contained yet
            _log_ignored("a signal handler", error)


def _contain_handlers() -> None:
    for number in signal.valid_signals():
        handler = _handler_of(number)
        if callable(handler) and not isinstance(handler, _Contained):
            _set_handler(number, _Contained(handler))


def release_handlers() -> None:
    """Undo ``contain_handlers``, but for handlers that were set since."""
    for number in signal.valid_signals():
        handler = _handler_of(number)
        if isinstance(handler, _Contained):
            _set_handler(number, handler.handler)


class _Contained:
    """In the place of ``handler``."""

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self.handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        try:
            self.handler(number, frame)
        except (Exception, RankShouldRestart) as error:  # noqa: BLE001 - the program's handler
            name = signal.strsignal(number)
            _log_ignored(f"the handler of signal {number} ({name})", error)


def _log_ignored(handler: str, error: BaseException) -> None:
    log.warning(
        "%s has raised this while the function was not running, which was ignored: %s",
        handler,
        summarise(error),
    )
