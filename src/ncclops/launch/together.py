"""The agents of several nodes, acting as one: they meet, start together, and decide once.

Everything that all have to agree on goes through the shared log (``ncclops.nodes.log``): who
takes part, a failure that ends the attempt, the end of each node's part, the decision. So each
agent knows the same, and any of them can take over from the one that decides.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from ncclops.classify.policy import Attempt
from ncclops.durations import format_duration
from ncclops.errors import NcclopsError, NotNeeded, PreflightRefused
from ncclops.launch import deciding, starting, store
from ncclops.launch.changes import Changes
from ncclops.launch.company import Choose, LocalEnd, Settled
from ncclops.launch.job import Job
from ncclops.launch.options import Nodes
from ncclops.launch.party import Party
from ncclops.launch.place import Place
from ncclops.launch.stop_together import StopTogether
from ncclops.launch.stopping import StopRequest, StopRequests
from ncclops.launch.tail import last_lines
from ncclops.launch.workers import Layout, Worker
from ncclops.nodes import interfaces, reach, stop_vote
from ncclops.nodes.log import Record
from ncclops.nodes.member import Config
from ncclops.nodes.peers import Message, Peers
from ncclops.nodes.pulse import Silence
from ncclops.nodes.standing import Standing

# What of a worker's output every terminal gets: a traceback's last frames and its exception.
_TOLD_LINES = 12
_LAST_FAILURE = "the next failure will be the last"
# The others need the store to read the decision; it takes them one message.
_OTHERS_LEAVE_WITHIN = timedelta(seconds=10)


class Together:
    """The other agents of ``job``, from the first meeting to the end of the run."""

    def __init__(
        self,
        job: Job,
        party: Party,
        *,
        changes: Changes,
        stop: StopRequests,
        say: Callable[[str], None],
        choose: Choose,
        take_limits: Callable[[Record], object],
    ) -> None:
        self._job, self._party, self._meeting = job, party, party.meeting
        self._changes, self._stop, self._say = changes, stop, say
        self._choose, self._take_limits = choose, take_limits
        self._standing = Standing(party.meeting.most)
        self._server: store.StoreServer | None = None
        self._peers: Peers | None = None
        self._rank: int | None = None
        self._address = party.meeting.local_addr or ""
        self._number = 0
        self._gathered: list[Record] | None = None
        self._no_round: str | None = None  # why there is none
        self._not_needed = False  # the job has ended without us
        self._store_lost: str | None = None
        self._silence: Silence | None = None  # of the store, in this round
        self._connected = False  # our member, with the job's store
        self._others_have_begun = False  # in a round without us
        self._end: LocalEnd | None = None
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
            self._meeting.pace.join + self._meeting.pace.last_call + self._meeting.pace.lost_after
        )
        while not await self._changes.until(self._is_assembled, limit):
            if not self._others_have_begun:  # else we wait to be needed, however long they train
                break
        if self._gathered is not None and self._standing.start is None:
            self._give_the_start(self._gathered)
            await self._changes.until(self._is_started, limit)
        return self._place()

    def over_for_all(self) -> str | None:
        standing = self._standing
        if standing.stop is not None:
            return f"stopped on {standing.name(standing.stop['node'])}"
        if standing.failed is not None and standing.failed["node"] != self._rank:
            return f"rank {standing.failed['rank']} failed on {self._failed_name()}"
        if self._job.restarts_in_process:
            return None  # the workers see to it themselves
        lost = [rank for rank in standing.lost if rank not in standing.idle]
        return f"{standing.name(lost[0])} was lost" if lost else None

    def tell_failure(self, worker: Worker, *, fatal: bool) -> None:
        if self._peers is None or worker.exit is None:
            return
        self._told += 1
        run = self._job.run
        lines = last_lines(run.stderr_log(worker.rank), _TOLD_LINES) or last_lines(
            run.stdout_log(worker.rank), _TOLD_LINES
        )
        how = f"exited with code {worker.exit.code}"
        if worker.exit.signal is not None:
            how = f"was killed by {worker.exit.signal}"
        self._peers.post(
            "failed" if fatal else "fault",
            node=self._rank,
            rank=worker.rank,
            how=how,
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

        return StopTogether(self._standing, post, lambda: self._store_lost is not None)

    async def settle(self, end: LocalEnd) -> Settled:
        if self._peers is None or self._standing.start is None:
            return Settled()
        self._end = end
        described = asdict(end) | {"failure": deciding.failure_json(end.failure)}
        self._peers.post("ended", node=self._rank, **described)
        await self._changes.until(
            lambda: (
                self._standing.decision is not None
                or self._store_lost is not None
                or self._stop.asked
            )
        )
        decision = self._standing.decision
        if decision is None:
            if self._store_lost is not None:
                self._say(f"{self._store_lost}: this node ends by its own account")
            return Settled(alone=self._store_lost)
        return deciding.settled(decision)

    async def leave(self) -> None:
        if self._peers is not None:
            if self._rank is not None:
                self._peers.post("bye", node=self._rank)
            if self._server is not None and self._standing.start is not None:
                await self._changes.until(self._nobody_needs_us, limit=_OTHERS_LEAVE_WITHIN)
            await self._peers.leave(over=True)
        if self._server is not None:
            self._server.close()

    def pids(self) -> set[int]:
        processes = [self._peers and self._peers.process, self._server and self._server.process]
        return {process.pid for process in processes if process}

    # --- meeting ------------------------------------------------------------------------------

    async def _join(self) -> None:
        """Host the job's store if it is ours to host, wait until it is there, start the member."""
        meeting, party = self._meeting, self._party
        if party.listener is not None:
            self._server = store.serve(party.listener, meeting.host, self._job.run.store_log)
        await reach.wait_for_store(meeting, pause=self._pause, say=self._say)
        self._address = meeting.local_addr or interfaces.address_towards(meeting.host)
        pace = meeting.pace
        config = Config(
            backend=meeting.backend,
            # What hosts the store is reached over the loopback, whatever its name leads to.
            host="127.0.0.1" if self._server is not None else meeting.host,
            port=meeting.port,
            job_id=meeting.job_id,
            active=meeting.active,
            most=meeting.most,
            rank=meeting.rank,
            name=party.name,
            run_dir=str(self._job.run.path),
            join_s=pace.join.total_seconds(),
            last_call_s=pace.last_call.total_seconds(),
            beat_s=pace.beat.total_seconds(),
            missed_beats=pace.missed_beats,
        )
        self._peers = Peers(config, self._job.run.path / "nodes.log", self._on_message)

    async def _pause(self, limit: timedelta) -> bool:
        return await self._changes.until(lambda: self._stop.asked, limit)

    def _begin(self, number: int) -> None:
        self._number, self._rank, self._others_have_begun = number, None, False
        self._standing = Standing(self._meeting.most)
        self._gathered, self._no_round, self._not_needed = None, None, False
        self._end, self._deciding, self._told = None, False, 0
        self._stop_said = None

    def _facts(self) -> Record:
        return {
            "name": self._party.name,
            "address": self._address,
            "attempt": self._number,
            "hosts": self._server is not None,
            "history": [attempt.as_json() for attempt in self._job.history.attempts],
            "print": self._party.print.to_json(),
        }

    def _is_assembled(self) -> bool:
        return self._gathered is not None or self._is_started()

    def _is_started(self) -> bool:
        standing = self._standing
        return bool(
            standing.start
            or standing.refused
            or standing.lost
            or standing.stop
            or self._no_round
            or self._not_needed
            or self._store_lost
            or self._stop.asked
        )

    def _give_the_start(self, gathered: list[Record]) -> None:
        """On node 0, with everybody's facts: compare them, and start or refuse for all."""
        assert self._peers is not None
        found = starting.compare_hosts(gathered, self._party)
        if refused := found.of_weight("refused"):
            lines = [line for difference in refused for line in difference.lines()]
            names = [difference.name for difference in refused]
            self._peers.post("refused", node=self._rank, names=names, lines=lines)
            return
        hosted = any(facts["hosts"] for facts in gathered)
        self._listener, address = self._workers_store(hosted)
        start = starting.start_record(
            gathered, self._meeting.job_id, address, external=self._listener is None
        )
        remarks = [line for each in found.of_weight("remark") for line in each.lines()]
        self._peers.post("start", **start, remarks=remarks)

    _listener: socket.socket | None = None

    def _workers_store(self, hosted: bool) -> tuple[socket.socket | None, store.StoreAddress]:
        """The store of this attempt's workers: one of their own, on node 0.

        Where no node hosts the job's store and workers restart in place, it is that one: then any
        node may be lost.
        """
        meeting = self._meeting
        if self._job.restarts_in_process and not hosted:
            return None, store.StoreAddress(meeting.host, meeting.port)
        listener = store.listen(host=self._address, port=0)
        return listener, store.StoreAddress(self._address, listener.getsockname()[1])

    def _place(self) -> Place:
        """What came of the meeting. Raises ``NcclopsError`` if that was nothing."""
        standing, meeting = self._standing, self._meeting
        if standing.refused is not None:
            for line in standing.refused["lines"]:
                self._say(line)
            names = ", ".join(standing.refused["names"])
            raise PreflightRefused(
                f"the nodes differ in {names} (the table is above): make them alike, or let one"
                " differ with --allow-difference NAME"
            )
        if self._not_needed:
            raise NotNeeded("the job has ended, and this node in reserve was not needed")
        if standing.start is None or self._rank is None:
            raise NcclopsError(self._why_no_start())
        start, rank = standing.start, self._rank
        self._job.history.adopt([Attempt.from_json(each) for each in start["history"]])
        standing.names = start["names"]
        in_process, nproc = self._job.restarts_in_process, self._job.layout.nproc
        if not in_process:
            standing.idle = frozenset(range(meeting.active, standing.size))
        self._introduce(start, rank)
        count = standing.size if in_process else min(standing.size, meeting.active)
        return Place(
            number=start["attempt"],
            layout=Layout(nodes=Nodes(count=count, rank=rank), nproc=nproc),
            store=store.StoreAddress(*start["store"]),
            listener=self._listener if rank == 0 else None,
            environ=starting.workers_environ(start, meeting, in_process=in_process, nproc=nproc),
            idle=rank in standing.idle,
            spare=rank >= meeting.active,
        )

    def _introduce(self, start: Record, rank: int) -> None:
        active = self._meeting.active
        nodes = starting.nodes_of(start, active)
        self._job.run.event("nodes", attempt=start["attempt"], nodes=nodes)
        self._say(starting.introduction(start, rank, active))
        for line in start["remarks"]:
            self._say(line)

    def _why_no_start(self) -> str:
        standing, meeting = self._standing, self._meeting
        if self._no_round:
            return self._no_round
        if self._store_lost:
            return f"{self._store_lost}: look at the output of the host that serves it"
        if self._stop.asked or standing.stop is not None:
            return "stopped before the nodes had met"
        if standing.lost:
            rank, record = next(iter(standing.lost.items()))
            return f"{standing.name(rank)} was lost before the start: {record['why']}"
        if not self._connected:
            return (
                f"what listens at {meeting.address} does not answer as a store: is that port"
                " another program's?"
            )
        return (
            f"node 0 of job {meeting.job_id} did not give the start within"
            f" {format_duration(meeting.pace.join)} (--rdzv-conf join_timeout): look at its output"
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
                self._standing = Standing(message["size"])
                self._watch_the_store()
            case "gathered":
                self._gathered = message["facts"]
            case "connected":
                self._connected = True
            case "waiting":
                self._others_have_begun = message["begun"]
                self._say(starting.roll_call(self._meeting, message["here"], message["begun"]))
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
        self._changes.tell()

    def _on_record(self, record: Record) -> None:
        standing, kind, node = self._standing, record["kind"], int(record.get("node", -1))
        if not standing.take(record):
            return
        match kind:
            case "waiting" if self._rank not in record["missing"]:  # else it is of before our time
                self._say(
                    starting.ranked_roll_call(self._meeting, record["here"], record["missing"])
                )
            case "failed" | "fault":
                if node != self._rank:
                    self._say_failure(record)
                    fields = {k: record[k] for k in ("rank", "how", "lines")}
                    self._job.run.event(
                        "fault", cause=record["how"], on=standing.name(node), **fields
                    )
            case "limits":
                self._take_limits(record)
            case "lost":
                self._on_lost(node, record)
            case "stop":
                if node != self._rank:
                    self._say(f"asked to stop on {standing.name(record['node'])}")
                    self._stop.expect(timedelta(seconds=record["grace_s"]))
        self._decide_if_it_is_us()

    def _on_lost(self, node: int, record: Record) -> None:
        standing = self._standing
        self._job.run.event("fault", cause="node-lost", on=standing.name(node), why=record["why"])
        if node != self._rank:
            self._say(f"{standing.name(node)} is lost: {record['why']}")
        elif self._job.restarts_in_process and self._end is None and self._peers is not None:
            # We were late, and our workers know nothing of it: no reason to end them.
            self._peers.post("back", node=node)

    def _decide_if_it_is_us(self) -> None:
        standing = self._standing
        ours = standing.decider() == self._rank and self._rank is not None
        if ours and self._peers is not None and (record := stop_vote.next_record(standing)):
            said = (record["kind"], record["round"])
            if said != self._stop_said:  # else it is on its way to us
                self._stop_said = said
                self._peers.post(node=self._rank, **record)
        if not ours or self._deciding or standing.decision or not standing.all_ended():
            return
        if standing.start is None or self._peers is None:
            return
        self._deciding = True
        decision = deciding.decide(
            standing,
            in_process=self._job.restarts_in_process,
            require_receipt=self._job.require_receipt,
            replaceable=self._meeting.backend == "c10d",
            choose=self._choose,
        )
        self._peers.post("decision", node=self._rank, **decision)

    def _watch_the_store(self) -> None:
        """Our member tells of each beat; without one for too long, the store is out of reach."""
        lost_after, standing = self._meeting.pace.lost_after.total_seconds(), self._standing
        pause, loop = lost_after / 3, asyncio.get_running_loop()
        silence = self._silence = Silence(pause, time.monotonic())

        def look() -> None:
            # There are no beats between two rounds, and each round has a watch of its own.
            if standing is not self._standing or self._store_lost is not None:
                return
            quiet = silence.look(time.monotonic())
            if quiet > lost_after:
                self._lose_store(f"nothing was heard of it for {quiet:.0f}s")
                self._changes.tell()
                return
            loop.call_later(pause, look)

        loop.call_later(pause, look)

    def _lose_store(self, why: str) -> None:
        if self._store_lost is None:
            self._store_lost = f"the job's store at {self._meeting.address} is lost ({why})"
            self._job.run.event("fault", cause="store-lost", why=why)
            if self._standing.start is not None and self._standing.decision is None:
                # Workers of another store may well go on without this one; a restart cannot.
                shared = self._standing.start["external"]
                follows = "the workers meet there too, and end" if shared else _LAST_FAILURE
                self._say(f"{self._store_lost}: {follows}")

    def _nobody_needs_us(self) -> bool:
        return self._standing.all_left() or self._store_lost is not None

    # --- words --------------------------------------------------------------------------------

    def _say_failure(self, record: Record) -> None:
        name = self._standing.name(record["node"])
        self._say(f"{name}: rank {record['rank']} {record['how']}")
        for line in record["lines"]:
            self._say(f"    {line}")

    def _failed_name(self) -> str:
        assert self._standing.failed is not None
        return self._standing.name(self._standing.failed["node"])
