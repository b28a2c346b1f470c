"""Places of the main thread in which an interruption would be lost, or would lose something.

- ``__del__``: Python prints what is raised in a finalizer, and ignores it.
- A process, a pool of them or a manager that is just being started: it would run, and no code would
  hold a reference to it.
- A module that is just being imported: Python forgets it, but not what it has registered elsewhere
  (an operator of torch, say), so that it could not be imported again.
- A batch that a data loader's iterator has just received: an iterator that outlives the iteration
  would wait for it for ever. While it waits for the worker it may be interrupted. Likewise what
  persistent workers answer when a new pass over the data begins.
- A function that holds a lock which other threads need, ours or logging's: when the exception
  arrives between the taking and the body, it is never released. From Python 3.14 on that is so of
  ``with lock:`` as well (cpython#148874).
- The end of a group of NCCL's operations, which may fail, and has to be put right for torch then.
- ``__enter__`` and ``__exit__``: a lock would stay locked, a mode of torch stay in force.
- What torch's C++ asks of tensors that are written in Python, as all are while torch compiles: some
  of that code takes no exception (``noexcept``), which would end the process. A call of C is such a
  place as well there, as the exception would arrive in the first Python function that it calls.

None of them lasts long as a rule; in the last two a function may wait as well.
"""

from __future__ import annotations

import dis
import enum
import logging
import multiprocessing.connection
import multiprocessing.managers
import multiprocessing.pool
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
    multiprocessing.managers.BaseManager.start.__code__,
    multiprocessing.pool.Pool.__init__.__code__,
    subprocess.Popen.__init__.__code__,
}
_MARKED: set[CodeType] = set()
# Most of its functions take a lock, those around a fork included; the monitor thread logs, too.
_LOGGING = logging.Logger.isEnabledFor.__code__.co_filename
# Below an iterator's ``next``: where it waits for a worker, or for the thread that pins memory.
_WAITS = (
    {multiprocessing.queues.Queue.get.__code__, multiprocessing.connection.wait.__code__},
    {queue.Queue.get.__code__, threading.Condition.wait.__code__},
)
# Python's own part of an import.
_IMPORTS = ("<frozen importlib._bootstrap>", "_find_and_load")

# Of torch, on the stack of the main thread for as long as a compile takes.
_COMPILES = ("/torch/_dynamo/convert_frame.py", "/torch/_inductor/compile_fx.py")
# What C++ calls of these tensors, and of numbers that are not known yet.
_CALLED_BY_TORCH = {"__torch_dispatch__", "find_torch_dispatch_rule"}
_NUMBERS = "/torch/fx/experimental/sym_node.py"
# Where Python itself takes up an exception and no C is under way.
_BETWEEN_CALLS = {"RESUME", "JUMP_BACKWARD"}

_Function = TypeVar("_Function", bound=Callable[..., Any])


def is_delicate(function: _Function) -> _Function:
    """Mark ``function``, one of this package's that the main thread is to leave first."""
    _MARKED.add(function.__code__)
    return function


class Delicate(enum.Enum):
    """What speaks against interrupting a thread now."""

    NO = enum.auto()
    BRIEFLY = enum.auto()  # it may be waiting as well: not for longer than such places take
    YES = enum.auto()


def how_delicate(stack: Iterable[CodeType], instruction: int = -1) -> Delicate:
    """How delicate it is to interrupt a thread with these functions on its stack.

    The innermost comes first, and is at ``instruction`` (``f_lasti`` of its frame).
    """
    ordered = list(stack)
    codes = set(ordered)
    names = {code.co_name for code in codes}
    never = _STARTS_A_PROCESS | _MARKED | {_FINALIZES}
    if codes & never or "__del__" in names:
        return Delicate.YES
    if any((code.co_filename, code.co_name) == _IMPORTS for code in codes):
        return Delicate.YES
    if any(code.co_filename == _LOGGING for code in codes):
        return Delicate.YES
    if codes & _iterator_methods("_reset"):
        return Delicate.YES
    if codes & _iterator_methods("_next_data") and not any(waits <= codes for waits in _WAITS):
        return Delicate.YES
    if names & {"__enter__", "__exit__"}:
        return Delicate.BRIEFLY
    if any(code.co_filename.endswith(_COMPILES) for code in codes):
        by_torch = names & _CALLED_BY_TORCH
        by_torch |= {code.co_name for code in codes if code.co_filename.endswith(_NUMBERS)}
        if by_torch or _opname(ordered[0], instruction) not in _BETWEEN_CALLS:
            return Delicate.BRIEFLY
    return Delicate.NO


def _opname(code: CodeType, instruction: int) -> str:
    return dis.opname[code.co_code[instruction]] if instruction >= 0 else ""


def _iterator_methods(name: str) -> set[CodeType]:
    module = sys.modules.get("torch.utils.data.dataloader")
    iterator: Any = getattr(module, "_MultiProcessingDataLoaderIter", None)
    code: CodeType | None = getattr(getattr(iterator, name, None), "__code__", None)
    return set() if code is None else {code}
