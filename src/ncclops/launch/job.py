"""What the agent is told: a run, checked and settled before the agent starts."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from ncclops.launch.history import JobHistory
from ncclops.launch.options import Shown
from ncclops.launch.retrying import RetryPlan
from ncclops.launch.rundir import RunDirectory
from ncclops.launch.workers import Layout
from ncclops.receipts import gpu
from ncclops.receipts.forms import Form
from ncclops.receipts.hang import Windows
from ncclops.receipts.live import WatchRules
from ncclops.worker.limits import Limits


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything the agent needs.

    ``environs`` is the environment under the plan, one per local rank; what identifies a worker
    is added at each attempt. ``listener`` is the store's socket where this node hosts the store.
    """

    run: RunDirectory
    argv: list[str]
    environs: list[Mapping[str, str]]
    layout: Layout
    job_id: str
    retry: RetryPlan
    history: JobHistory  # attempts of this job, under earlier agents too
    stop_grace: timedelta
    limits: Limits  # the timeouts that workers were started with
    watch: WatchRules
    hang: Windows
    trainers: Sequence[Form]  # forms of printed lines that the profile adds
    shown: Shown
    restarts_in_process: bool  # a worker that ends does not end the others
    listener: socket.socket | None
    control_listener: socket.socket | None = None  # where the control plane is reached over TCP
    require_receipt: bool = False  # a run without a healthy receipt is not a success
    stdout_is_data: bool = False  # with --json: workers' output goes to stderr instead

    @property
    def ranks(self) -> list[int]:
        """The ranks of this node, by local rank."""
        return [self.layout.rank(local) for local in range(self.layout.nproc)]

    def device_of(self, rank: int) -> int | str | None:
        """The GPU of ``rank`` by the numbering of CUDA, as :mod:`ncclops.receipts.gpu` takes it."""
        local = self.ranks.index(rank)
        return gpu.visible_device(local, self.environs[local])
