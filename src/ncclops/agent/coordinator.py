"""What an agent agrees on with the agents of the other nodes, and the case of a single node.

Three questions are the same in both cases: where does the next attempt run, does a failure on
another node end it, and what follows it. ``Alone`` answers for a single node; the coordinator of
``cluster.multi_node`` gives the agents of several nodes the same answers.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ncclops.agent import fitness, hosted_store
from ncclops.agent.condition import Condition
from ncclops.agent.job import Job
from ncclops.agent.rendezvous_result import Place
from ncclops.agent.stop_agreement import StopAgreement
from ncclops.agent.stop_requests import StopRequests
from ncclops.agent.workers import Worker
from ncclops.decision.deciding import AttemptDecision, decide
from ncclops.decision.node_end import JobRules, NodeEnd
from ncclops.decision.outcome import StopRequest
from ncclops.health.liveness import Elsewhere, NodeView
from ncclops.health.paces import RankPace
from ncclops.timeouts.model import Window


@dataclass(frozen=True)
class LimitsChange:
    """Shorter timeouts for the workers of all nodes, and who has requested them."""

    window: Window
    reason: str
    by: str


class Coordinator(Protocol):
    """The other agents, as far as there are any."""

    async def assemble(self, number: int) -> Place:
        """Where attempt ``number`` runs. Raises ``NcclopsError`` when it cannot."""

    def over_for_all(self, *, entered: bool) -> str | None:
        """Why the attempt has to end here, where nothing failed; None as a rule.

        ``entered``: the restart core looks after a rank of this node, as after all others then.
        """

    def share_failure(self, worker: Worker, *, fatal: bool) -> None:
        """A worker of this node has failed; ``fatal``: the attempt ends with it."""

    def share_hang(self, rank: int, reason: str) -> None:
        """The attempt fails because ``rank`` of this node hangs."""

    def share_refusal(self, rank: int, reason: str) -> None:
        """The job is refused because of what ``rank`` of this node has shown."""

    def share_at_work(self, at_work: bool) -> None:
        """Whether a rank of this node works, or all that are left are to return."""

    def others_work(self) -> bool:
        """Whether a rank of another node works, as far as is known."""

    def is_cut_off(self) -> bool:
        """Whether nothing is heard of the other nodes any more."""

    def share_view(self, view: NodeView) -> None:
        """What is thought of this node's ranks, if that bears on those of other nodes."""

    def elsewhere(self) -> Elsewhere:
        """The ranks of the other nodes."""

    def share_pace(self, pace: RankPace) -> None:
        """How much a rank of this node waits for others."""

    def paces_elsewhere(self) -> Sequence[RankPace]:
        """The same of the ranks of other nodes."""

    def share_stop(self, request: StopRequest) -> None:
        """This agent was asked to stop the job."""

    def stop_elsewhere(self) -> StopRequest | None:
        """The request to stop that another agent was the first to get, if one was."""

    def share_limits(self, change: LimitsChange) -> bool:
        """Send shorter timeouts to all agents, this one too; False where there are no others."""

    def stop_agreement(self) -> StopAgreement | None:
        """How a stop is agreed with the other agents; None where there are none."""

    async def settle(self, end: NodeEnd) -> AttemptDecision:
        """What the attempt comes to, once it has ended on all nodes; here, it has as ``end``."""

    async def leave(self) -> None:
        """The run is over."""

    def pids(self) -> set[int]:
        """Processes that belong to this object, and to no attempt."""


@dataclass(frozen=True, kw_only=True)
class AgentSide:
    """What a coordinator may use of the agent it works for: all in the agent's event loop."""

    condition: Condition
    stop: StopRequests
    say: Callable[[str], None]  # a line on the user's terminal
    note: Callable[[str], None]  # the same for what goes as it should: not with -q
    rules: Callable[[], JobRules]  # of the decision on an attempt, as they are at the moment
    take_limits: Callable[[LimitsChange], object]  # shorter timeouts, from another node


# Makes the coordinator of a job of several nodes (``ncclops.cluster``).
Coordinate = Callable[[Job, AgentSide], "Coordinator"]


class Alone:
    """A single node, without others to agree with. ``listener`` is the first attempt's store, bound
    early so that a taken port shows before anything starts."""

    def __init__(self, job: Job, listener: socket.socket, agent: AgentSide) -> None:
        self._job, self._agent = job, agent
        self._listener: socket.socket | None = listener
        self._port = job.master_port
        self._is_suspect = False

    async def assemble(self, number: int) -> Place:
        if self._is_suspect and (check := self._job.check_node) is not None:
            await fitness.require(check, say=self._agent.say, note=self._agent.note)
        listener, self._listener = self._listener, None
        # A store for each attempt: torch's keys carry no attempt, and those of the last one
        # would be taken for answers.
        listener = listener or hosted_store.listen(host=None, port=self._port)
        address = hosted_store.StoreAddress(hosted_store.LOOPBACK, listener.getsockname()[1])
        return Place(number=number, layout=self._job.layout, store=address, listener=listener)

    def over_for_all(self, *, entered: bool) -> str | None:  # noqa: ARG002
        return None

    def share_failure(self, worker: Worker, *, fatal: bool) -> None:  # noqa: ARG002
        return

    def share_hang(self, rank: int, reason: str) -> None:  # noqa: ARG002
        return

    def share_refusal(self, rank: int, reason: str) -> None:  # noqa: ARG002
        return

    def share_at_work(self, at_work: bool) -> None:  # noqa: ARG002
        return

    def others_work(self) -> bool:
        return False

    def is_cut_off(self) -> bool:
        return False

    def share_view(self, view: NodeView) -> None:  # noqa: ARG002
        return

    def elsewhere(self) -> Elsewhere:
        return Elsewhere()

    def share_pace(self, pace: RankPace) -> None:  # noqa: ARG002
        return

    def paces_elsewhere(self) -> Sequence[RankPace]:
        return ()

    def share_stop(self, request: StopRequest) -> None:  # noqa: ARG002
        return

    def stop_elsewhere(self) -> StopRequest | None:
        return None

    def share_limits(self, change: LimitsChange) -> bool:  # noqa: ARG002
        return False

    def stop_agreement(self) -> StopAgreement | None:
        return None

    async def settle(self, end: NodeEnd) -> AttemptDecision:
        self._is_suspect = end.is_suspect
        return decide([end], self._agent.rules(), random=random.random)

    async def leave(self) -> None:
        return

    def pids(self) -> set[int]:
        return set()
