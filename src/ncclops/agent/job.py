"""The agent's input: a run, checked and settled before the agent starts."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from ncclops.agent.history import JobHistory
from ncclops.agent.layout import Layout, Shown
from ncclops.decision.retrying import RetryPlan
from ncclops.exit_codes import DEFAULT, ExitCodes
from ncclops.health.hang import HangLimits
from ncclops.health.live import WatchRules
from ncclops.host import gpu_readings
from ncclops.receipts.log_formats import Form
from ncclops.record.run_directory import RunDirectory
from ncclops.timeouts.model import Timeouts

if TYPE_CHECKING:  # asyncio, which a dry run has no use for
    from ncclops.agent.fitness import CheckNode
    from ncclops.notify.targets import NotifyPlan


@dataclass(frozen=True)
class NetworkWanted:
    """Networks of which NCCL is to use one (``health.network``); ``required``: or the job ends."""

    expected: tuple[str, ...] = ()
    required: bool = False


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything the agent needs.

    ``environ_of`` gives a rank's environment under the plan; what identifies a worker is added at
    each attempt. A single node has a ``listener``, the first attempt's store, on ``master_port``
    (0: any).
    """

    run: RunDirectory
    argv: list[str]
    environ_of: Callable[[int], Mapping[str, str]]
    layout: Layout
    job_id: str
    retry: RetryPlan
    history: JobHistory  # attempts of this job, under earlier agents too
    stop_grace: timedelta
    timeouts: Timeouts  # those that workers were started with
    watch: WatchRules
    hang: HangLimits
    trainers: Sequence[Form]  # forms of printed lines that the profile adds
    shown: Shown
    restarts_in_process: bool  # a worker that ends does not end the others
    grows: bool = False  # and a new one takes its place
    listener: socket.socket | None = None
    master_port: int = 0
    control_listeners: Sequence[socket.socket] = ()  # where the control plane is reached
    control_token_for_reads: bool = False  # in the network; the owner's socket asks for none
    exit_codes: ExitCodes = DEFAULT
    require_receipt: bool = False  # a run without a healthy receipt is not a success
    network: NetworkWanted = NetworkWanted()
    check_node: CheckNode | None = None  # of a node that has failed, before its next attempt
    warm_imports: tuple[str, ...] | None = None  # of the fork server; None: there is none
    notify: NotifyPlan | None = None  # whom it tells what; None: nobody
    attached: int | None = None  # the rank that gets standard input
    stdout_is_data: bool = False  # with --json: workers' output goes to stderr instead
    quiet: bool = False  # with -q: of our own lines, warnings, errors and the verdict's path alone

    def device_of(self, rank: int) -> int | str | None:
        """CUDA's GPU of ``rank``, as :mod:`ncclops.host.gpu_readings` takes it."""
        local = rank % self.layout.nproc  # all nodes run the same number
        return gpu_readings.visible_device(local, self.environ_of(rank))
