"""The agents of several nodes, acting as one: they meet, start together, and decide once.

Everything that all have to agree on goes through the shared log (``ncclops.cluster.shared_log``):
who takes part, a failure that ends the attempt, the end of each node's part, the decision. So each
agent knows the same, and any of them can take over from the one that decides.
"""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from ncclops.agent import store
from ncclops.agent.coordinator import AgentSide
from ncclops.agent.job import Job
from ncclops.agent.layout import Layout, Nodes
from ncclops.agent.rendezvous_result import Place
from ncclops.agent.stop_agreement import StopTogether
from ncclops.agent.workers import Worker
from ncclops.classify.policy import Attempt
from ncclops.cluster import decision_records, reach, round_start, stop_vote
from ncclops.cluster.heartbeat import Silence
from ncclops.cluster.node_info import NodeInfo
from ncclops.cluster.peers import Message, Peers
from ncclops.cluster.rendezvous_process import Config
from ncclops.cluster.round_state import RoundState
from ncclops.cluster.shared_log import Record
from ncclops.cluster.stop_agreement import SharedStop
from ncclops.decision.deciding import AttemptDecision, decide
from ncclops.decision.node_end import NodeEnd
from ncclops.decision.outcome import StopRequest
from ncclops.durations import format_duration
from ncclops.errors import NcclopsError, NotNeeded, PreflightRefused
from ncclops.host import interfaces
from ncclops.record.events import FaultEvent, NodesEvent
from ncclops.record.tail import last_lines

# What of a worker's output every terminal gets: a traceback's last frames and its exception.
_TOLD_LINES = 12
_LAST_FAILURE = "cannot recover from another failure"
# The others need the store to read the decision; it takes them one message.
_OTHERS_LEAVE_WITHIN = timedelta(seconds=10)


class MultiNode:
    """The other agents of ``job``, from the first rendezvous to the end of the run."""

    def __init__(
        self,
        node_info: NodeInfo,
        job: Job,
        agent: AgentSide,
    ) -> None:
        self._job, self._node_info, self._rendezvous = job, node_info, node_info.rendezvous
        self._condition, self._stop, self._say = agent.condition, agent.stop, agent.say
        self._rules, self._take_limits = agent.rules, agent.take_limits
        self._round_state = RoundState(node_info.rendezvous.most)
        self._server: store.StoreServer | None = None
        self._peers: Peers | None = None
        self._rank: int | None = None
        self._address = node_info.rendezvous.local_addr or ""
        self._number = 0
        self._gathered: list[Record] | None = None
        self._no_round: str | None = None  # why there is none
        self._not_needed = False  # the job has ended without us
        self._store_lost: str | None = None
        self._silence: Silence | None = None  # of the store, in this round
        self._connected = False  # our member, with the job's store
        self._others_have_begun = False  # in a round without us
        self._end: NodeEnd | None = None
        self._deciding = False
        self._told = 0  # failures of this node in this attempt
        self._stop_said: tuple[str, int] | None = None  # the last we said about where to stop

    # --- the agent's questions ----------------------------------------------------------------

    async def assemble(self, number: int) -> Place:
        if self._peers is None:
            await self._join()
        assert self._peers is not None
        self._begin(number)
        self._peers.meet(number, self._facts())
        limit = (
            self._rendezvous.pace.join
            + self._rendezvous.pace.last_call
            + self._rendezvous.pace.lost_after
        )
        while not await self._condition.until(self._is_assembled, limit):
            if not self._others_have_begun:  # else we wait to be needed, however long they train
                break
        if self._gathered is not None and self._round_state.start is None:
            self._give_the_start(self._gathered)
            await self._condition.until(self._is_started, limit)
        return self._place()

    def over_for_all(self) -> str | None:
        round_state = self._round_state
        if round_state.stop is not None:
            return f"stopped on {round_state.name(round_state.stop['node'])}"
        if round_state.failed is not None and round_state.failed["node"] != self._rank:
            return f"rank {round_state.failed['rank']} failed on {self._failed_name()}"
        if self._job.restarts_in_process:
            return None  # the workers see to it themselves
        lost = [rank for rank in round_state.lost if rank not in round_state.idle]
        return f"{round_state.name(lost[0])} was lost" if lost else None

    def tell_failure(self, worker: Worker, *, fatal: bool) -> None:
        if self._peers is None or worker.exit is None:
            return
        self._told += 1
        run = self._job.run
        lines = last_lines(run.stderr_log(worker.rank), _TOLD_LINES) or last_lines(
            run.stdout_log(worker.rank), _TOLD_LINES
        )
        self._peers.post(
            "failed" if fatal else "fault",
            node=self._rank,
            rank=worker.rank,
            how=worker.exit.describe(),
            # The first one tells what happened; a node that goes down has many that tell the same.
            lines=lines if fatal or self._told == 1 else [],
        )

    def tell_stop(self, request: StopRequest) -> None:
        if self._peers is not None and self._rank is not None:
            self._peers.post(
                "stop",
                node=self._rank,
                signal=request.signum,
                reason=request.reason,
                grace_s=request.grace.total_seconds(),
            )

    def tell_limits(self, record: Mapping[str, Any]) -> bool:
        if self._peers is not None:
            self._peers.post("limits", node=self._rank, **record)
        return True

    def stop_together(self) -> StopTogether | None:
        def post(kind: str, **fields: Any) -> None:
            if self._peers is not None:
                self._peers.post(kind, node=self._rank, **fields)

        return SharedStop(self._round_state, post, lambda: self._store_lost is not None)

    async def settle(self, end: NodeEnd) -> AttemptDecision:
        if self._peers is None or self._round_state.start is None:
            return self._decide([end])
        self._end = end
        self._peers.post("ended", node=self._rank, **decision_records.end_fields(end))
        await self._condition.until(
            lambda: (
                self._round_state.decision is not None
                or self._store_lost is not None
                or self._stop.asked
            )
        )
        decision = self._round_state.decision
        if decision is not None and end.stop is None:
            return decision_records.decision_in(decision)
        if self._store_lost is not None:
            self._say(f"{self._store_lost}: deciding locally")
        return self._decide([replace(end, cut_off=self._store_lost, stopping=self._stop.asked)])

    def _decide(self, nodes: Sequence[NodeEnd]) -> AttemptDecision:
        replaceable = self._rendezvous.backend == "c10d"
        rules = replace(self._rules(), replaceable=replaceable)
        return decide(nodes, rules, random=random.random)

    async def leave(self) -> None:
        if self._peers is not None:
            if self._rank is not None:
                self._peers.post("bye", node=self._rank)
            if self._server is not None and self._round_state.start is not None:
                await self._condition.until(self._nobody_needs_us, limit=_OTHERS_LEAVE_WITHIN)
            await self._peers.leave(over=True)
        if self._server is not None:
            self._server.close()

    def pids(self) -> set[int]:
        processes = [self._peers and self._peers.process, self._server and self._server.process]
        return {process.pid for process in processes if process}

    # --- rendezvous ------------------------------------------------------------------------------

    async def _join(self) -> None:
        """Host the job's store if it is ours to host, wait until it is there, start the member."""
        rendezvous, node_info = self._rendezvous, self._node_info
        if node_info.listener is not None:
            self._server = store.serve(node_info.listener, rendezvous.host, self._job.run.store_log)
        await reach.wait_for_store(rendezvous, pause=self._pause, say=self._say)
        self._address = rendezvous.local_addr or interfaces.address_towards(rendezvous.host)
        pace = rendezvous.pace
        config = Config(
            backend=rendezvous.backend,
            # What hosts the store is reached over the loopback, whatever its name leads to.
            host="127.0.0.1" if self._server is not None else rendezvous.host,
            port=rendezvous.port,
            job_id=rendezvous.job_id,
            active=rendezvous.active,
            most=rendezvous.most,
            rank=rendezvous.rank,
            name=node_info.name,
            run_dir=str(self._job.run.path),
            join_s=pace.join.total_seconds(),
            last_call_s=pace.last_call.total_seconds(),
            beat_s=pace.beat.total_seconds(),
            missed_beats=pace.missed_beats,
        )
        self._peers = Peers(config, self._job.run.path / "nodes.log", self._on_message)

    async def _pause(self, limit: timedelta) -> bool:
        return await self._condition.until(lambda: self._stop.asked, limit)

    def _begin(self, number: int) -> None:
        self._number, self._rank, self._others_have_begun = number, None, False
        self._round_state = RoundState(self._rendezvous.most)
        self._gathered, self._no_round, self._not_needed = None, None, False
        self._end, self._deciding, self._told = None, False, 0
        self._stop_said = None

    def _facts(self) -> Record:
        return {
            "name": self._node_info.name,
            "address": self._address,
            "attempt": self._number,
            "hosts": self._server is not None,
            "history": [attempt.as_json() for attempt in self._job.history.attempts],
            "print": self._node_info.print.to_json(),
        }

    def _is_assembled(self) -> bool:
        return self._gathered is not None or self._is_started()

    def _is_started(self) -> bool:
        round_state = self._round_state
        return bool(
            round_state.start
            or round_state.refused
            or round_state.lost
            or round_state.stop
            or self._no_round
            or self._not_needed
            or self._store_lost
            or self._stop.asked
        )

    def _give_the_start(self, gathered: list[Record]) -> None:
        """On node 0, with everybody's facts: compare them, and start or refuse for all."""
        assert self._peers is not None
        found = round_start.compare_hosts(gathered, self._node_info)
        if refused := found.of_weight("refused"):
            lines = [line for difference in refused for line in difference.lines()]
            names = [difference.name for difference in refused]
            self._peers.post("refused", node=self._rank, names=names, lines=lines)
            return
        hosted = any(facts["hosts"] for facts in gathered)
        self._listener, address = self._workers_store(hosted)
        start = round_start.start_record(
            gathered, self._rendezvous.job_id, address, external=self._listener is None
        )
        remarks = [line for each in found.of_weight("remark") for line in each.lines()]
        self._peers.post("start", **start, remarks=remarks)

    _listener: socket.socket | None = None

    def _workers_store(self, hosted: bool) -> tuple[socket.socket | None, store.StoreAddress]:
        """The store of this attempt's workers: one of their own, on node 0.

        Where no node hosts the job's store and workers restart in place, it is that one: then any
        node may be lost.
        """
        rendezvous = self._rendezvous
        if self._job.restarts_in_process and not hosted:
            return None, store.StoreAddress(rendezvous.host, rendezvous.port)
        listener = store.listen(host=self._address, port=0)
        return listener, store.StoreAddress(self._address, listener.getsockname()[1])

    def _place(self) -> Place:
        """What came of the rendezvous. Raises ``NcclopsError`` if that was nothing."""
        round_state, rendezvous = self._round_state, self._rendezvous
        if round_state.refused is not None:
            for line in round_state.refused["lines"]:
                self._say(line)
            names = ", ".join(round_state.refused["names"])
            raise PreflightRefused(
                f"the nodes differ in {names} (the table is above): make them alike, or let one"
                " differ with --allow-difference NAME"
            )
        if self._not_needed:
            raise NotNeeded("the job has ended, and this node in reserve was not needed")
        if round_state.start is None or self._rank is None:
            raise NcclopsError(self._why_no_start())
        start, rank = round_state.start, self._rank
        self._job.history.adopt([Attempt.from_json(each) for each in start["history"]])
        round_state.names = start["names"]
        in_process, nproc = self._job.restarts_in_process, self._job.layout.nproc
        if not in_process:
            round_state.idle = frozenset(range(rendezvous.active, round_state.size))
        self._introduce(start, rank)
        count = round_state.size if in_process else min(round_state.size, rendezvous.active)
        return Place(
            number=start["attempt"],
            layout=Layout(nodes=Nodes(count=count, rank=rank), nproc=nproc),
            store=store.StoreAddress(*start["store"]),
            listener=self._listener if rank == 0 else None,
            environ=round_start.workers_environ(
                start, rendezvous, in_process=in_process, nproc=nproc
            ),
            idle=rank in round_state.idle,
            spare=rank >= rendezvous.active,
        )

    def _introduce(self, start: Record, rank: int) -> None:
        active = self._rendezvous.active
        nodes = round_start.nodes_of(start, active)
        self._job.run.add(NodesEvent(attempt=start["attempt"], nodes=nodes))
        self._say(round_start.introduction(start, rank, active))
        for line in start["remarks"]:
            self._say(line)

    def _why_no_start(self) -> str:
        round_state, rendezvous = self._round_state, self._rendezvous
        if self._no_round:
            return self._no_round
        if self._store_lost:
            return f"{self._store_lost}: look at the output of the host that serves it"
        if self._stop.asked or round_state.stop is not None:
            return "stopped during rendezvous"
        if round_state.lost:
            rank, record = next(iter(round_state.lost.items()))
            return f"{round_state.name(rank)} was lost before the start: {record['why']}"
        if not self._connected:
            return (
                f"what listens at {rendezvous.address} does not answer as a store: is that port"
                " another program's?"
            )
        return (
            f"node 0 of job {rendezvous.job_id} did not give the start within"
            f" {format_duration(rendezvous.pace.join)} (--rdzv-conf join_timeout):"
            " look at its output"
        )

    # --- messages -----------------------------------------------------------------------------

    def _on_message(self, message: Message) -> None:
        if self._silence is not None:
            self._silence.heard(time.monotonic())
        match message["is"]:
            case "tick":
                return
            case "met":
                self._rank = message["rank"]
                self._round_state = RoundState(message["size"])
                self._watch_the_store()
            case "gathered":
                self._gathered = message["facts"]
            case "connected":
                self._connected = True
            case "waiting":
                self._others_have_begun = message["begun"]
                self._say(
                    round_start.roll_call(self._rendezvous, message["here"], message["begun"])
                )
                return
            case "record":
                self._on_record(message["record"])
            case "store-lost":
                self._lose_store(message["why"])
            case "failed":
                self._no_round = message["why"]
            case "not-needed":
                self._not_needed = True
            case "ended":
                log = self._job.run.shown(self._job.run.path / "nodes.log")
                self._no_round = f"the process that meets the other nodes ended: {log}"
                self._lose_store(self._no_round)
        self._condition.tell()

    def _on_record(self, record: Record) -> None:
        round_state, kind, node = self._round_state, record["kind"], int(record.get("node", -1))
        if not round_state.take(record):
            return
        match kind:
            case "waiting" if self._rank not in record["missing"]:  # else it is of before our time
                self._say(
                    round_start.ranked_roll_call(
                        self._rendezvous, record["here"], record["missing"]
                    )
                )
            case "failed" | "fault":
                if node != self._rank:
                    self._say_failure(record)
                    self._job.run.add(
                        FaultEvent(
                            rank=record["rank"],
                            cause=record["how"],
                            on=round_state.name(node),
                            how=record["how"],
                            lines=record["lines"],
                        )
                    )
            case "limits":
                self._take_limits(record)
            case "lost":
                self._on_lost(node, record)
            case "stop":
                if node != self._rank:
                    self._say(f"asked to stop on {round_state.name(record['node'])}")
                    self._stop.expect(timedelta(seconds=record["grace_s"]))
        self._decide_if_it_is_us()

    def _on_lost(self, node: int, record: Record) -> None:
        round_state = self._round_state
        self._job.run.add(
            FaultEvent(cause="node-lost", on=round_state.name(node), why=record["why"])
        )
        if node != self._rank:
            self._say(f"{round_state.name(node)} is lost: {record['why']}")
        elif self._job.restarts_in_process and self._end is None and self._peers is not None:
            # We were late, and our workers know nothing of it: no reason to end them.
            self._peers.post("back", node=node)

    def _decide_if_it_is_us(self) -> None:
        round_state = self._round_state
        ours = round_state.decider() == self._rank and self._rank is not None
        if ours and self._peers is not None and (record := stop_vote.next_record(round_state)):
            said = (record["kind"], record["round"])
            if said != self._stop_said:  # else it is on its way to us
                self._stop_said = said
                self._peers.post(node=self._rank, **record)
        if not ours or self._deciding or round_state.decision or not round_state.all_ended():
            return
        if round_state.start is None or self._peers is None:
            return
        self._deciding = True
        decision = self._decide(decision_records.nodes_in(round_state))
        self._peers.post("decision", node=self._rank, **decision_records.decision_fields(decision))

    def _watch_the_store(self) -> None:
        """Our member tells of each beat; without one for too long, the store is out of reach."""
        lost_after, round_state = (
            self._rendezvous.pace.lost_after.total_seconds(),
            self._round_state,
        )
        pause, loop = lost_after / 3, asyncio.get_running_loop()
        silence = self._silence = Silence(pause, time.monotonic())

        def look() -> None:
            # There are no beats between two rounds, and each round has a watch of its own.
            if round_state is not self._round_state or self._store_lost is not None:
                return
            quiet = silence.look(time.monotonic())
            if quiet > lost_after:
                self._lose_store(f"nothing was heard of it for {quiet:.0f}s")
                self._condition.tell()
                return
            loop.call_later(pause, look)

        loop.call_later(pause, look)

    def _lose_store(self, why: str) -> None:
        if self._store_lost is None:
            self._store_lost = f"the job's store at {self._rendezvous.address} is lost ({why})"
            self._job.run.add(FaultEvent(cause="store-lost", why=why))
            if self._round_state.start is not None and self._round_state.decision is None:
                # Workers of another store may well go on without this one; a restart cannot.
                shared = self._round_state.start["external"]
                follows = "the workers meet there too, and end" if shared else _LAST_FAILURE
                self._say(f"{self._store_lost}: {follows}")

    def _nobody_needs_us(self) -> bool:
        return self._round_state.all_left() or self._store_lost is not None

    # --- words --------------------------------------------------------------------------------

    def _say_failure(self, record: Record) -> None:
        name = self._round_state.name(record["node"])
        self._say(f"{name}: rank {record['rank']} {record['how']}")
        for line in record["lines"]:
            self._say(f"    {line}")

    def _failed_name(self) -> str:
        assert self._round_state.failed is not None
        return self._round_state.name(self._round_state.failed["node"])
