"""Aborts all process groups of a worker that is about to be ended by a signal."""

from __future__ import annotations

import ctypes
import sys
import threading

from ncclops.record import worker_record
from ncclops.record.events import GroupsAbortedEvent
from ncclops.record.worker_commands import AbortCommand


class GroupsAbortedError(RuntimeError):
    """The agent has had the process groups aborted: what they have not delivered is of no use."""


# A prototype of our own: ``argtypes`` set on ``ctypes.pythonapi`` would hold for all its users.
_set_async_exc = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_ulong, ctypes.py_object)(
    ("PyThreadState_SetAsyncExc", ctypes.pythonapi)
)


def abort_groups(_command: AbortCommand) -> None:
    """Abort the collectives under way, from any thread, and report that to the agent.

    A process that ends in the middle of one takes the communicator of its peers with it, and the
    next attempt may not come up.
    """
    if "torch.distributed" in sys.modules:
        from ncclops.restart._groups import before_silent_ends
        from ncclops.restart.abort import AbortTorchDistributed
        from ncclops.restart.state import State

        before_silent_ends.set(_end_main_thread)
        AbortTorchDistributed()(State(rank=0, world_size=1).freeze())  # of use to a trace alone
    worker_record.report(GroupsAbortedEvent())


def _end_main_thread() -> None:
    """Have the main thread leave the script where it waits, or may wait, for NCCL.

    The abort ends that wait without an error, and the script would go on with what the operation
    has not summed, into a checkpoint, too.
    """
    from ncclops.restart._groups import has_pending_operation, recorder_is_silent

    main = threading.main_thread().ident
    if main is not None and (has_pending_operation() or recorder_is_silent()):
        _set_async_exc(main, GroupsAbortedError)
