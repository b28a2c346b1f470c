"""How an attempt ended on one node: what the decision is made from. Values only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ncclops.classify.policy import PastAttempt
from ncclops.decision.outcome import StopRequest
from ncclops.decision.retrying import Escalated, RetryPlan
from ncclops.errors import NcclopsError, NotNeeded
from ncclops.exit_codes import DEFAULT, ExitCodes, NextAction, action_after
from ncclops.record.event_values import GpuFault, NetworkUse, SlowRank
from ncclops.record.story_record import Story
from ncclops.record.verdict_record import FirstFailure, WorkerEnding


@dataclass(frozen=True, kw_only=True)
class CannotStart:
    """Why no worker could be started. ``needed`` False: a spare node that the job did not need.

    ``exit_code`` is the job's, by its :class:`ExitCodes`; ``next_action`` what may mend it.
    """

    reason: str
    exit_code: int
    needed: bool = True
    next_action: NextAction = "unknown"

    @classmethod
    def of(cls, error: NcclopsError, codes: ExitCodes = DEFAULT) -> CannotStart:
        return cls(
            reason=str(error),
            exit_code=codes.of_error(error),
            needed=not isinstance(error, NotNeeded),
            next_action=action_after(error),
        )


@dataclass(frozen=True, kw_only=True)
class NodeEnd:
    """How one attempt ended on the node ``name``.

    ``endings`` are its workers in the order in which they ended. ``failed``: the attempt has failed
    here; ``fatal``: in a way that ends it on all nodes, restarts in place or not; ``failed_first``:
    before any other node. ``hang`` is the reason where a hang was it.

    ``stop`` is the request to stop that has ended the attempt; ``stopping``: there was one, maybe
    only after the attempt had failed. ``stopped_elsewhere``: one that another node got has ended
    workers of this one. ``launcher_lost``: the process that the user started was killed, and the
    agent has stopped the workers.

    ``classification`` is the classifier's verdict as JSON with its evidence, ``story`` what this
    node can tell of the failure; ``progressed``:
    training steps were seen. ``healthy``: whether there is a healthy receipt, None where that
    could not be judged. ``escalated`` is what workers asked for when restarts in place could not
    help. ``gpu_faults`` are the GPUs that made ranks fail, ``slow_ranks``
    those that the others waited for, ``network`` what NCCL said it uses.

    ``hosts_store``: the job's store goes with it. ``store_ended``: how the server of the workers'
    store ended, where it did before they had. ``why_ended``: of ranks that the restart core has
    ended, on this node or others, and of those whose death the agent can explain.
    ``without``: ranks of the job that the workers of this node went on without, to the end.
    ``by_force``: ranks were made to leave what they were in, or not given the time to.

    ``lost``: why the node did not report its end; then all else is unknown. ``idle``:
    it had no workers in this attempt. ``cut_off``: why it could not decide with the other nodes.
    """

    name: str
    endings: Sequence[WorkerEnding] = ()
    failed: bool = False
    fatal: bool = False
    failed_first: bool = False
    hang: str | None = None
    cannot_start: CannotStart | None = None
    stop: StopRequest | None = None
    stopping: bool = False
    stopped_elsewhere: bool = False
    launcher_lost: bool = False
    failure: FirstFailure | None = None
    classification: dict[str, Any] | None = None
    story: Story | None = None
    progressed: bool = False
    healthy: bool | None = False
    escalated: Escalated | None = None
    gpu_faults: tuple[GpuFault, ...] = ()
    slow_ranks: tuple[SlowRank, ...] = ()
    network: NetworkUse | None = None
    hosts_store: bool = False
    store_ended: str | None = None
    why_ended: Mapping[int, str] = field(default_factory=dict)
    without: tuple[int, ...] = ()
    by_force: bool = False
    lost: str | None = None
    idle: bool = False
    cut_off: str | None = None

    @property
    def well(self) -> int:
        """Workers that exited 0 by themselves; one that we stopped has not finished the job."""
        return sum(ending.ok and not ending.asked_to_stop for ending in self.endings)

    @property
    def is_suspect(self) -> bool:
        """Whether something here, and not on another node alone, has ended the attempt."""
        unasked = any(not ending.asked_to_stop for ending in self.bad)
        return bool(unasked or self.hang or self.gpu_faults or self.store_ended)

    @property
    def forced(self) -> list[WorkerEnding]:
        """Workers that a stop has not ended cleanly. A script that was still importing, or handles
        SIGTERM, gets that alone, and may well end by it."""
        return [
            each
            for each in self.bad
            if self.by_force or not (each.asked_to_stop and each.signal == "SIGTERM")
        ]

    @property
    def bad(self) -> list[WorkerEnding]:
        """Workers that did not exit 0."""
        return [ending for ending in self.endings if not ending.ok]


@dataclass(frozen=True, kw_only=True)
class JobRules:
    """The rules of the job, which do not depend on what happened.

    ``losses_allowed``: workers restart in place, and those that are left finish the job.
    ``replaceable``: a node that is lost may be replaced by another one in the next attempt, which
    needs ``nodes_needed``.
    ``history`` are the failed attempts before this one, ``granted_used`` how many of them this
    agent has made (``--max-restarts`` is an order to one agent).
    """

    retry: RetryPlan
    history: Sequence[PastAttempt] = ()
    granted_used: int = 0
    losses_allowed: bool = False
    require_receipt: bool = False
    replaceable: bool = False
    nodes_needed: int = 1
    exit_codes: ExitCodes = DEFAULT
