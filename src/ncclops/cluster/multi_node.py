"""The ``Coordinator`` of a job on several nodes: its agents meet, start together and decide once.

Everything that all have to agree on goes through the shared log (``ncclops.cluster.shared_log``):
which nodes take part, a failure that ends the attempt, the end of each node's part, the decision.
So all agents know the same, and any of them can take over from the one that decides.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

from msgspec import structs

from ncclops.agent.coordinator import AgentSide, LimitsChange
from ncclops.agent.job import Job
from ncclops.agent.rendezvous_result import Place
from ncclops.agent.stop_agreement import StopAgreement
from ncclops.agent.workers import Worker
from ncclops.cluster import messages, round_start, stop_vote
from ncclops.cluster.heartbeat import SILENT_AFTER
from ncclops.cluster.job_store import JobStore
from ncclops.cluster.messages import Message
from ncclops.cluster.node_info import NodeInfo
from ncclops.cluster.peers import Peers
from ncclops.cluster.records import (
    NO_NODE,
    AtWorkRecord,
    BackRecord,
    ByeRecord,
    DecisionRecord,
    EndedRecord,
    FailedRecord,
    FaultRecord,
    LimitsRecord,
    LostRecord,
    PacesRecord,
    Record,
    SilentRecord,
    StopRecord,
    ViewRecord,
    WaitingRecord,
    name_of,
)
from ncclops.cluster.rendezvous import Rendezvous
from ncclops.cluster.round import Round
from ncclops.cluster.shared_stop import SharedStop
from ncclops.decision.deciding import AttemptDecision, decide
from ncclops.decision.node_end import CannotStart, NodeEnd
from ncclops.decision.outcome import StopRequest
from ncclops.durations import format_duration
from ncclops.errors import NcclopsError, PreflightRefused
from ncclops.health.liveness import Elsewhere, NodeView
from ncclops.health.paces import RankPace
from ncclops.record.events import NODE_LOST, STORE_LOST, FaultEvent
from ncclops.record.tail import last_lines

# How much of a failed worker's output the terminals of all nodes show: the last frames of a
# traceback and its exception.
_SHOWN_LINES = 12
# How often a node tells at most how much its ranks wait.
_PACES_EVERY_S, _PACES_EVERY_S_A_NODE = 1.0, 0.25
_LAST_FAILURE = "cannot recover from another failure"
# After a stop the last of them is a message later than this node.
_OTHERS_END_WITHIN = timedelta(seconds=3)
# After that it is said that they are waited for.
_OTHERS_END_SOON = timedelta(seconds=10)
# The others need the store to read the decision; it takes them one message.
_OTHERS_LEAVE_WITHIN = timedelta(seconds=10)

log = logging.getLogger(__name__)


class MultiNode:
    """The other agents of ``job``, from the first rendezvous to the end of the run."""

    def __init__(self, node_info: NodeInfo, job: Job, agent: AgentSide) -> None:
        self._job, self._config = job, node_info.rendezvous
        self._condition, self._stop = agent.condition, agent.stop
        self._say, self._note = agent.say, agent.note
        self._rules, self._take_limits = agent.rules, agent.take_limits
        self._job_store = JobStore(node_info.rendezvous.address, self._on_store_lost)
        self._rendezvous = Rendezvous(node_info, job, agent, self._job_store)
        self._lost_after_s = node_info.rendezvous.pace.lost_after.total_seconds()
        self._round = Round(0, node_info.rendezvous.most)
        self._is_replaced = False  # by another node, and the job goes on
        self._view: NodeView | None = None  # of our ranks, as the others know it
        self._told: dict[int, RankPace] = {}  # of our ranks, as the others know them
        self._untold: dict[int, RankPace] = {}  # what has changed since
        self._told_at = 0.0
        self._peers: Peers | None = None  # from the first rendezvous on

    # --- the agent's questions ----------------------------------------------------------------

    async def assemble(self, number: int) -> Place:
        if self._peers is None:
            self._peers = await self._rendezvous.join(self.deliver)
        self._job_store.pause()
        self._view = None
        self._told, self._untold = {}, {}
        while True:
            current = self._round = Round(number, self._config.most)
            try:
                await self._rendezvous.checks.require_fit()
                place = await self._rendezvous.meet(self._peers, current)
            except PreflightRefused:
                self._is_replaced = current.state.refused is None
                raise
            if place is not None:
                return place
            self._job_store.pause()

    def over_for_all(self, *, entered: bool) -> str | None:
        state = self._round.state
        if state.stop is not None:
            return f"stopped on {state.name(state.stop.node)}"
        if state.failed is not None and state.failed.node != self._round.rank:
            return f"rank {state.failed.rank} failed on {state.name(state.failed.node)}"
        if self._is_in_reserve:
            if state.decision is not None:
                return "the attempt has ended on the other nodes"
            if self._job_store.lost is not None:
                return self._job_store.lost
        if self._job.restarts_in_process and entered:
            return None  # the workers see to it themselves
        # Until all have come, they wait for each other, and do not know of nodes. A node whose
        # heartbeat was only late has as long again to say so.
        patience_s = self._lost_after_s if self._job.restarts_in_process else 0.0
        lost = self._round.lost_for(patience_s, time.monotonic())
        return f"{state.name(lost[0])} was lost" if lost else None

    @property
    def _is_in_reserve(self) -> bool:
        """Whether this node has no workers in this attempt, and waits for the others' end."""
        return self._round.rank in self._round.state.idle

    def share_failure(self, worker: Worker, *, fatal: bool) -> None:
        if self._peers is None or worker.exit is None:
            return
        # The first failure shows what happened; on a node that goes down many show the same.
        is_first = self._round.is_first_failure()
        own = self._job.run.paths.rank(worker.rank)
        lines = last_lines(own.stderr_log, _SHOWN_LINES) or last_lines(own.stdout_log, _SHOWN_LINES)
        kind = FailedRecord if fatal else FaultRecord
        shown = lines if fatal or is_first else []
        self._post(kind(rank=worker.rank, how=worker.exit.describe(), lines=shown))

    def share_hang(self, rank: int, reason: str) -> None:
        self._post(FailedRecord(rank=rank, how=f"hangs: {reason}"))

    def share_refusal(self, rank: int, reason: str) -> None:
        self._post(FailedRecord(rank=rank, how=f"is refused: {reason}"))

    def share_at_work(self, at_work: bool) -> None:
        self._post(AtWorkRecord(at_work=at_work))

    def others_work(self) -> bool:
        current = self._round
        return any(
            node != current.rank and current.state.works(node) for node in range(current.state.size)
        )

    def is_cut_off(self) -> bool:
        return self._job_store.lost is not None

    def share_view(self, view: NodeView) -> None:
        others = [*self._views_elsewhere().values()]
        if view.is_news(self._view, others):
            self._view = view
            self._post(ViewRecord(view=view))

    def elsewhere(self) -> Elsewhere:
        state, views = self._round.state, self._views_elsewhere()
        silent = [
            node
            for node in range(min(state.size, self._config.active))
            if node not in state.lost and node != self._round.rank and node not in views
        ]
        return Elsewhere.of([*views.values()], silent=len(silent) * self._job.layout.nproc)

    def share_pace(self, pace: RankPace) -> None:
        if pace.differs(self._told.get(pace.rank)):
            self._untold[pace.rank] = pace
        now = time.monotonic()
        # All agents read it.
        pause = max(_PACES_EVERY_S, _PACES_EVERY_S_A_NODE * self._round.state.size)
        if self._untold and now - self._told_at >= pause:
            self._told_at = now
            self._told |= self._untold
            self._post(PacesRecord(paces=list(self._untold.values())))
            self._untold = {}

    def paces_elsewhere(self) -> Sequence[RankPace]:
        state = self._round.state
        return [
            pace
            for node, paces in state.paces.items()
            if node != self._round.rank and node not in state.lost
            for pace in paces.values()
        ]

    def _views_elsewhere(self) -> dict[int, NodeView]:
        state = self._round.state
        return {
            node: view
            for node, view in state.views.items()
            if node != self._round.rank and node not in state.lost
        }

    def share_stop(self, request: StopRequest) -> None:
        if self._round.rank is not None:
            self._post(StopRecord.of(request))

    def stop_elsewhere(self) -> StopRequest | None:
        stop = self._round.state.stop
        return None if stop is None or stop.node == self._round.rank else stop.request

    def share_limits(self, change: LimitsChange) -> bool:
        self._post(LimitsRecord(window=change.window, reason=change.reason, by=change.by))
        return True

    def stop_agreement(self) -> StopAgreement | None:
        return SharedStop(self._round.state, self._post, self.is_cut_off)

    async def settle(self, end: NodeEnd) -> AttemptDecision:
        current, job_store = self._round, self._job_store
        self._rendezvous.checks.is_suspect = end.is_suspect
        if self._peers is None or current.state.start is None:
            if current.is_stopped_before_start:
                end = replace(end, stop=end.stop or self.stop_elsewhere())
            return self._decide([end])
        end = current.end = replace(end, hosts_store=job_store.is_ours)
        self._post(EndedRecord(end=end))
        if end.stop is not None:
            return await self._settle_stop(end)

        def is_settled() -> bool:
            is_decided = current.state.decision is not None
            return is_decided or job_store.lost is not None or self._stop.asked

        if not await self._condition.until(is_settled, _OTHERS_END_SOON):
            names = [current.state.name(rank) for rank in sorted(current.state.not_ended())]
            self._note(f"waiting for the workers of {' '.join(names)} to end")
            await self._condition.until(is_settled)
        decision = current.state.decision
        if decision is not None:
            self._is_replaced = current.rank in decision.replaced
            return replace(decision, following=None) if self._is_replaced else decision
        if not end.failed:
            # Asked elsewhere, or here after our workers had ended: that these have ended well does
            # not complete the job.
            end = replace(end, stop=self._stop.first or self.stop_elsewhere())
        if job_store.lost is None and end.stop is not None:
            return await self._settle_stop(end)
        if job_store.lost is not None and self._is_in_reserve:
            # Whether the others have finished the job it cannot know.
            refusal = CannotStart.of(NcclopsError(job_store.loss), self._rules().exit_codes)
            return self._decide([replace(end, cannot_start=refusal)])
        if job_store.lost is not None:
            self._say(f"{job_store.lost}: deciding locally")
        return self._decide([replace(end, cut_off=job_store.lost, stopping=self._stop.asked)])

    async def _settle_stop(self, end: NodeEnd) -> AttemptDecision:
        """What a stop that this node was asked for has come to, with the other nodes' part in it.

        They end at the same point; on one that does not, nobody waits.
        """
        current, job_store = self._round, self._job_store
        await self._condition.until(
            lambda: current.state.all_ended() or job_store.lost is not None or self._stop.hurry,
            limit=_OTHERS_END_WITHIN,
        )
        if not current.state.all_ended():
            return self._decide([replace(end, cut_off=job_store.lost)])
        others = current.state.node_ends()
        ours = others.pop(current.rank or 0)
        return self._decide([ours, *others])  # ours first: it says how the stop was asked for

    async def leave(self) -> None:
        if self._peers is not None:
            if self._round.rank is not None:
                self._post(ByeRecord())
            if self._job_store.is_ours and self._round.state.start is not None:
                await self._condition.until(self._all_have_left, limit=_OTHERS_LEAVE_WITHIN)
            await self._peers.leave(over=not self._is_replaced)
        self._job_store.close()

    def pids(self) -> set[int]:
        member = set() if self._peers is None else {self._peers.process.pid}
        return member | self._job_store.pids | self._rendezvous.checks.pids

    # --- messages -----------------------------------------------------------------------------

    def _post(self, record: Record) -> None:
        """Put a record of this node into the round's log."""
        if self._peers is not None:
            rank = self._round.rank
            self._peers.post(structs.replace(record, node=NO_NODE if rank is None else rank))

    def deliver(self, message: Message) -> None:
        """A message of the rendezvous process; in the agent's event loop."""
        self._job_store.answered()
        current = self._round
        match message:
            case messages.Tick():
                return
            case messages.Connected():
                self._job_store.is_connected = True
            case messages.Waiting(here, begun, first):
                current.others_have_begun = begun
                self._note(round_start.describe_missing(self._config, here, begun, first))
                return
            case messages.Met(rank, size):
                current.meet(rank, size)
                self._job_store.watch(self._lost_after_s)
            case messages.Gathered(facts):
                current.gathered = facts
            case messages.Logged(record):
                self._on_record(record)
            case messages.NoRound(why):
                current.no_round = why
            case messages.Unneeded():
                current.not_needed = True
            case messages.StoreLost(why):
                self._job_store.lose(why)
            case messages.ProcessEnded():
                where = self._job.run.shown(self._job.run.paths.nodes_log)
                current.no_round = f"the process that meets the other nodes ended: {where}"
                self._job_store.lose(current.no_round)
        self._condition.notify()

    def _on_record(self, record: Record) -> None:
        current, state, node = self._round, self._round.state, record.node
        if not state.take(record):
            return
        log.info("node %d: %s", node, name_of(record))
        match record:
            # One that lists this node is of the time before it came.
            case WaitingRecord(here=here, missing=missing) if current.rank not in missing:
                self._note(round_start.describe_missing_ranks(self._config, here, missing))
            case FailedRecord() | FaultRecord() if node != current.rank:
                self._on_failure_elsewhere(record)
            case LimitsRecord(window=window, reason=reason, by=by):
                self._take_limits(LimitsChange(window, reason=reason, by=by))
            case LostRecord(why=why):
                self._on_lost(node, why)
            case SilentRecord(silent=silent) if node != current.rank:
                self._on_silent(state.name(node), silent)
            case StopRecord(grace_s=grace_s) if node != current.rank:
                self._note(f"asked to stop on {state.name(node)}")
                self._stop.expect(timedelta(seconds=grace_s))
        if current.is_ours_to_decide:
            self._decide_for_all(current)

    def _on_failure_elsewhere(self, failure: FailedRecord | FaultRecord) -> None:
        name, rank, how = self._round.state.name(failure.node), failure.rank, failure.how
        if isinstance(failure, FailedRecord):  # what others get over is told by their restart
            self._say(f"{name}: rank {rank} {how}")
        self._job.run.add(FaultEvent(rank=rank, cause=how, on=name, how=how, lines=failure.lines))

    def _on_lost(self, node: int, why: str) -> None:
        name = self._round.state.name(node)
        self._round.lose(node, time.monotonic())
        # Whether the attempt has to end with it is asked once more.
        asyncio.get_running_loop().call_later(self._lost_after_s, self._condition.notify)
        self._job.run.add(FaultEvent(cause=NODE_LOST, kind=NODE_LOST, on=name, why=why))
        if node != self._round.rank:
            self._say(f"{name} is lost: {why}")
        elif self._job.restarts_in_process and self._round.end is None:
            # Our heartbeat was late, which does not affect our workers: they need not end.
            self._post(BackRecord())

    def _on_silent(self, name: str, silent: bool) -> None:
        if silent:
            limit = format_duration(SILENT_AFTER * self._config.pace.lost_after)
            self._say(f"{name}: its agent has not answered for {limit}; its workers run on")
        else:
            self._note(f"{name}: its agent answers again")

    def _on_store_lost(self, why: str) -> None:
        state = self._round.state
        self._job.run.add(FaultEvent(cause=STORE_LOST, kind=STORE_LOST, why=why))
        if state.start is not None and state.decision is None:
            # Workers that use another store may go on without this one; a restart cannot.
            shared = state.start.external
            follows = "the workers meet there too, and end" if shared else _LAST_FAILURE
            self._say(f"{self._job_store.lost}: {follows}")
        self._condition.notify()

    # --- decisions ----------------------------------------------------------------------------

    def _decide_for_all(self, current: Round) -> None:
        """What comes next, put into the log: where to stop, and what the attempt comes to."""
        state = current.state
        if (record := stop_vote.next_record(state)) and current.is_new_stop(record):
            self._post(record)
        if current.is_deciding or state.decision or state.start is None or not state.all_ended():
            return
        current.is_deciding = True
        decision = self._decide(state.node_ends())
        self._post(DecisionRecord(decision=decision))

    def _decide(self, nodes: Sequence[NodeEnd]) -> AttemptDecision:
        config = self._config
        replaceable = config.backend == "c10d"
        rules = replace(self._rules(), replaceable=replaceable, nodes_needed=config.active)
        return decide(nodes, rules, random=random.random)

    def _all_have_left(self) -> bool:
        return self._round.state.all_left() or self._job_store.lost is not None
