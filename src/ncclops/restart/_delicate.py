"""Places of the main thread in which an interruption would be lost, or would lose something.

- ``__del__``: Python prints what is raised in a finalizer, and ignores it.
- A process that is just being started: it would run, and no code would hold a reference to it.
- A batch that a data loader's iterator has just received: an iterator that outlives the iteration
  would wait for it for ever. While it waits for the worker it may be interrupted.
- A function that holds a lock which other threads need, ours or logging's: when the exception
  arrives between the taking and the body, it is never released. From Python 3.14 on that is so of
  ``with lock:`` as well (cpython#148874).

None of them lasts long as a rule.
"""

from __future__ import annotations

import logging
import multiprocessing.connection
import multiprocessing.process
import multiprocessing.queues
import multiprocessing.util
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any, TypeVar

_FINALIZES = multiprocessing.util.Finalize.__call__.__code__
_STARTS_A_PROCESS = {
    multiprocessing.process.BaseProcess.start.__code__,
    subprocess.Popen.__init__.__code__,
}
# The monitor thread logs, too.
_HOLDS_A_LOCK = {logging.Handler.handle.__code__, logging.Logger.isEnabledFor.__code__}
# Below an iterator's ``next``: where it waits for a worker, or for the thread that pins memory.
_WAITS = (
    {multiprocessing.queues.Queue.get.__code__, multiprocessing.connection.wait.__code__},
    {queue.Queue.get.__code__, threading.Condition.wait.__code__},
)


_Function = TypeVar("_Function", bound=Callable[..., Any])


def holds_a_lock(function: _Function) -> _Function:
    """Mark ``function``, which takes a lock, for a moment, in the main thread too."""
    _HOLDS_A_LOCK.add(function.__code__)
    return function


def is_delicate(stack: Iterable[CodeType]) -> bool:
    """Whether a thread with these functions on its stack should not be interrupted now."""
    codes = set(stack)
    never = _STARTS_A_PROCESS | _HOLDS_A_LOCK | {_FINALIZES}
    if codes & never or any(code.co_name == "__del__" for code in codes):
        return True
    return bool(codes & _takes_a_batch()) and not any(waits <= codes for waits in _WAITS)


def _takes_a_batch() -> set[CodeType]:
    module = sys.modules.get("torch.utils.data.dataloader")
    iterator: Any = getattr(module, "_MultiProcessingDataLoaderIter", None)
    methods: list[Callable[..., Any] | None] = [
        getattr(iterator, name, None) for name in ("_next_data", "_reset")
    ]
    return {code for method in methods if (code := getattr(method, "__code__", None)) is not None}
