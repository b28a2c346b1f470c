"""Aborts all process groups of a worker that is about to be ended by a signal."""

from __future__ import annotations

import sys
import threading

from ncclops.record import worker_record
from ncclops.record.events import GroupsAbortedEvent
from ncclops.record.worker_commands import AbortCommand


class GroupsAbortedError(RuntimeError):
    """The agent has had the process groups aborted: what they have not delivered is of no use."""


def abort_groups(command: AbortCommand) -> None:
    """Abort the collectives under way, from any thread, and report that to the agent.

    A process that ends in the middle of one takes the communicator of its peers with it, and the
    next attempt may not come up.
    """
    if "torch.distributed" in sys.modules:
        from ncclops.restart._groups import kept_beside
        from ncclops.restart._groups.aborting import before_silent_ends
        from ncclops.restart.abort import AbortTorchDistributed
        from ncclops.restart.state import State

        if command.if_waiting and not _waits_on_host_alone():
            return
        before_silent_ends.set(_end_script)
        kept_beside.drop()
        AbortTorchDistributed()(State(rank=0, world_size=1).freeze())  # of use to a trace alone
    worker_record.report(GroupsAbortedEvent())


def _waits_on_host_alone() -> bool:
    from ncclops.restart._groups.backends import all_backends, has_watchdog
    from ncclops.restart._groups.recorder import may_have_pending_operation_of_nccl
    from ncclops.restart.waiting import main_thread_is_in_collective

    uses_nccl = any(map(has_watchdog, all_backends()))
    return main_thread_is_in_collective() and not (
        uses_nccl and may_have_pending_operation_of_nccl()
    )


def _end_script() -> None:
    """Have the script's threads leave it where they wait, or may wait, for NCCL.

    The abort ends that wait without an error, and the script would go on with what the operation
    has not summed, into a checkpoint, too.
    """
    from ncclops.restart._groups.recorder import may_have_pending_operation
    from ncclops.restart._interrupt.other_threads import end_threads_at_work
    from ncclops.restart._interrupt.threads import set_async_exc

    main = threading.main_thread().ident
    if main is not None and may_have_pending_operation():
        set_async_exc(main, GroupsAbortedError)
        end_threads_at_work(GroupsAbortedError)
