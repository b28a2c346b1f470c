"""How this node comes to take part in a round: the job's store, the meeting, the start."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable
from datetime import timedelta

from msgspec import structs

from ncclops.agent import hosted_store
from ncclops.agent.coordinator import AgentSide
from ncclops.agent.job import Job
from ncclops.agent.layout import Layout, Nodes
from ncclops.agent.rendezvous_result import Place
from ncclops.cluster import reach, round_start
from ncclops.cluster.job_store import JobStore
from ncclops.cluster.messages import Message
from ncclops.cluster.node_checks import NodeChecks
from ncclops.cluster.node_info import NodeInfo
from ncclops.cluster.peers import Peers
from ncclops.cluster.records import CheckRecord, LeftOutRecord, RefusedRecord, StartRecord
from ncclops.cluster.rendezvous_link import Config
from ncclops.cluster.round import Round
from ncclops.cluster.store_values import NodeFacts
from ncclops.durations import format_duration
from ncclops.errors import NcclopsError, NodeUnfit, NotNeeded, PreflightRefused
from ncclops.host import interfaces
from ncclops.preflight.edges.meeting import ask_for_small_packets
from ncclops.record.events import NodesEvent

# The process that connects to it imports torch first.
_STORE_ANSWERS_WITHIN = timedelta(seconds=20)


class Rendezvous:
    """Brings a node into the rounds of ``job``, one after the other."""

    def __init__(
        self, node_info: NodeInfo, job: Job, agent: AgentSide, job_store: JobStore
    ) -> None:
        self._job, self._node_info, self._config = job, node_info, node_info.rendezvous
        self._condition, self._stop = agent.condition, agent.stop
        self._say, self._note = agent.say, agent.note
        self._job_store = job_store
        self._address = node_info.rendezvous.local_addr or ""
        self.checks = NodeChecks(node_info, job, agent)

    async def join(self, deliver: Callable[[Message], None]) -> Peers:
        """Serve the job's store if this node hosts it, wait until it can be reached, and start the
        rendezvous process.

        Raises ``NcclopsError`` when the store cannot be reached in time.
        """
        config, node_info = self._config, self._node_info
        if node_info.listener is not None:
            if self.checks.with_edges:
                ask_for_small_packets(node_info.listener)
            self._job_store.serve(node_info.listener, config.host, self._job.run.paths.store_log)
        await reach.wait_for_store(config, pause=self._pause, note=self._note)
        self._address = config.local_addr or interfaces.address_towards(config.host)
        return Peers(self._member_config(), self._job.run.paths.nodes_log, deliver)

    def _member_config(self) -> Config:
        config, pace = self._config, self._config.pace
        return Config(
            backend=config.backend,
            # What hosts the store is reached over the loopback, whatever its name leads to.
            host="127.0.0.1" if self._job_store.is_ours else config.host,
            port=config.port,
            job_id=config.job_id,
            active=config.active,
            most=config.most,
            rank=config.rank,
            name=self._node_info.name,
            launcher=os.getppid(),
            script="" if "script" in self._node_info.allowed else self._node_info.script,
            run_dir=str(self._job.run.path),
            join_s=pace.join.total_seconds(),
            last_call_s=pace.last_call.total_seconds(),
            beat_s=pace.beat.total_seconds(),
            missed_beats=pace.missed_beats,
        )

    async def _pause(self, limit: timedelta) -> bool:
        return await self._condition.until(lambda: self._stop.asked, limit)

    async def meet(self, peers: Peers, current: Round) -> Place | None:
        """Take part in ``current``: where its attempt runs. Raises ``NcclopsError`` if nowhere.

        None where other nodes were left out after the check of all: the rest meet again.
        """
        peers.meet(current.number, self._facts(current))
        pace = self._config.pace
        limit = pace.join + pace.last_call + pace.lost_after

        def is_started() -> bool:
            over = current.is_over_before_start or self._job_store.lost or self._stop.asked
            return bool(current.state.start or over)

        def is_told() -> bool:
            return current.state.check is not None or is_started()

        def store_answers() -> bool:
            return self._job_store.is_connected or is_told()

        if not await self._condition.until(store_answers, _STORE_ANSWERS_WITHIN):
            wait = format_duration(limit)
            self._note(
                f"the store at {self._config.address} has accepted a connection, and answers no"
                f" more: waiting for it, for up to {wait}"
            )
        while not await self._condition.until(
            lambda: current.gathered is not None or is_told(), limit
        ):
            if not current.others_have_begun:  # else we wait to be needed, however long they train
                break
        if current.gathered is not None and not is_started():
            self._compare(peers, current, current.gathered)
            await self._condition.until(is_told, limit)
        if current.state.check is not None and not is_started():
            await self._check(peers, current, current.state.check.meeting)
            await self._condition.until(is_started, limit)
        return None if self._meets_again(current) else self._place(current)

    async def _check(self, peers: Peers, current: Round, meeting: str) -> None:
        """Take part in the check of all nodes; on node 0, say what follows from it."""
        host = self._member_config().host
        verdict = await self.checks.take_part(current, host, meeting)
        if current.gathered is None or self._stop.asked:
            return
        found, node = self.checks.conclude(verdict, current), current.rank or 0
        if found.refused is not None:
            peers.post(RefusedRecord(node=node, names=[], lines=[], why=found.refused))
        elif found.left_out:
            peers.post(LeftOutRecord(node=node, nodes=dict(found.left_out)))
        else:
            self._give_the_start(peers, current, current.gathered)

    def _meets_again(self, current: Round) -> bool:
        """Whether the round is over because others are left out; says who. Raises
        ``NodeUnfit`` where it is this node."""
        if current.state.left_out is None or current.state.start is not None:
            return False
        left_out = current.state.left_out.nodes
        if (why := left_out.get(current.rank or 0)) is not None:
            raise NodeUnfit(f"preflight: this node is left out of the job: {why}")
        out = ", ".join(map(current.state.name, left_out))
        self._say(f"preflight: {out} left out of the job; the others meet again")
        return True

    def _facts(self, current: Round) -> NodeFacts:
        return NodeFacts(
            name=self._node_info.name,
            address=self._address,
            attempt=current.number,
            hosts=self._job_store.is_ours,
            history=list(self._job.history.attempts),
            print=self._node_info.print,
        )

    def _compare(self, peers: Peers, current: Round, gathered: list[NodeFacts]) -> None:
        """On node 0, with the facts of all nodes: compare them; refuse, have them checked, or
        start."""
        found, node = round_start.compare_hosts(gathered, self._node_info), current.rank or 0
        if refused := found.of_weight("refused"):
            lines = [line for difference in refused for line in difference.lines()]
            names = [difference.name for difference in refused]
            peers.post(RefusedRecord(node=node, names=names, lines=lines))
        elif self.checks.with_edges and len(gathered) > 1:
            meeting = f"{self._config.job_id}/{secrets.token_hex(8)}"
            names = [facts.name for facts in gathered]
            peers.post(CheckRecord(node=node, meeting=meeting, names=names))
        else:
            self._give_the_start(peers, current, gathered)

    def _give_the_start(self, peers: Peers, current: Round, gathered: list[NodeFacts]) -> None:
        """On node 0: have all nodes start, with a word on what differs between them."""
        found, node = round_start.compare_hosts(gathered, self._node_info), current.rank or 0
        hosted = any(facts.hosts for facts in gathered)
        current.listener, address = self._workers_store(hosted)
        remarks = [line for each in found.of_weight("remark") for line in each.lines()]
        external = current.listener is None
        start = round_start.start_record(
            gathered, self._config.job_id, address, external=external, remarks=remarks
        )
        peers.post(structs.replace(start, node=node))

    def _workers_store(
        self, hosted: bool
    ) -> tuple[socket.socket | None, hosted_store.StoreAddress]:
        """The store of this attempt's workers: one of their own, on node 0.

        Where no node hosts the job's store and workers restart in place, it is that one: then any
        node may be lost.
        """
        if self._job.restarts_in_process and not hosted:
            return None, hosted_store.StoreAddress(self._config.host, self._config.port)
        listener = hosted_store.listen(host=self._address, port=0)
        return listener, hosted_store.StoreAddress(self._address, listener.getsockname()[1])

    def _place(self, current: Round) -> Place:
        """The result of the rendezvous. Raises ``NcclopsError`` if it failed."""
        state, config = current.state, self._config
        if state.refused is not None and state.refused.why:
            raise PreflightRefused(f"preflight: the job cannot start: {state.refused.why}")
        if state.refused is not None:
            for line in state.refused.lines:
                self._say(line)
            names = ", ".join(state.refused.names)
            raise PreflightRefused(
                f"the nodes differ in {names} (the table is above): make them alike, or let one"
                " differ with --allow-difference NAME"
            )
        if current.not_needed:
            raise NotNeeded("the job has ended, and this node in reserve was not needed")
        if state.start is None or current.rank is None:
            raise NcclopsError(self._why_no_start(current))
        start, rank = state.start, current.rank
        self._job.history.adopt(start.history)
        state.names = start.names
        in_process, nproc = self._job.restarts_in_process, self._job.layout.nproc
        if not in_process:
            state.idle = frozenset(range(config.active, state.size))
        self._introduce(start, rank)
        count = state.size if in_process else min(state.size, config.active)
        return Place(
            number=start.attempt,
            layout=Layout(nodes=Nodes(count=count, rank=rank), nproc=nproc),
            store=hosted_store.StoreAddress(*start.store),
            listener=current.listener if rank == 0 else None,
            environ=round_start.workers_environ(start, config, in_process=in_process, nproc=nproc),
            idle=rank in state.idle,
            spare=rank >= config.active,
        )

    def _introduce(self, start: StartRecord, rank: int) -> None:
        active = self._config.active
        nodes = round_start.nodes_of(start, active)
        self._job.run.add(NodesEvent(attempt=start.attempt, nodes=nodes))
        self._note(round_start.describe_round(start, rank, active))
        for line in start.remarks:
            self._say(line)

    def _why_no_start(self, current: Round) -> str:
        state, config, job_store = current.state, self._config, self._job_store
        if current.no_round:
            return current.no_round
        if job_store.lost:
            return job_store.loss
        if self._stop.asked or state.stop is not None:
            return "stopped during rendezvous"
        if state.lost:
            rank, record = next(iter(state.lost.items()))
            return f"{state.name(rank)} was lost before the start: {record.why}"
        if not job_store.is_connected:
            return (
                f"what listens at {config.address} does not answer as a store: is that port"
                " another program's?"
            )
        return (
            f"node 0 of job {config.job_id} did not give the start within"
            f" {format_duration(config.pace.join)} (--rdzv-conf join_timeout): look at its output"
        )
