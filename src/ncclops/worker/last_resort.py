"""Aborts all process groups of a worker that is about to be ended by a signal."""

from __future__ import annotations

import sys

from ncclops.record import worker_record
from ncclops.record.events import GroupsAbortedEvent
from ncclops.record.worker_commands import AbortCommand


def abort_groups(_command: AbortCommand) -> None:
    """Abort the collectives under way, from any thread, and report that to the agent.

    A process that ends in the middle of one takes the communicator of its peers with it, and the
    next attempt may not come up.
    """
    if "torch.distributed" in sys.modules:
        from ncclops.restart.abort import AbortTorchDistributed
        from ncclops.restart.state import State

        AbortTorchDistributed()(State(rank=0, world_size=1).freeze())  # of use to a trace alone
    worker_record.report(GroupsAbortedEvent())
