"""``--preflight`` over several nodes: this node's part in the check of all of them."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from functools import partial

from msgspec import structs

from ncclops.agent import fitness
from ncclops.agent.coordinator import AgentSide
from ncclops.agent.in_thread import in_thread
from ncclops.agent.job import Job
from ncclops.cluster.left_out import Conclusion, conclude
from ncclops.cluster.node_info import NodeInfo
from ncclops.cluster.round import Round
from ncclops.preflight import hand_over, part
from ncclops.preflight.edges import shown
from ncclops.preflight.edges.model import Verdict
from ncclops.preflight.model import NodeReport
from ncclops.record import documents
from ncclops.record.events import PreflightEvent
from ncclops.record.regular_file import append_regular

# A node in reserve may wait for days: what was read of it before that says little.
_FRESH_S = 600.0
_WRITE_LIMIT_S = 10.0


class NodeChecks:
    """What this node has been found to be, over the rounds of ``job``. In the agent's event loop.

    ``is_suspect``: something of it has failed since it was checked.
    """

    def __init__(self, node_info: NodeInfo, job: Job, agent: AgentSide) -> None:
        self._info, self._job, self._agent = node_info, job, agent
        self._report = None if node_info.check is None else node_info.check.report
        self._running: part.Running | None = None
        self.is_suspect = False

    @property
    def with_edges(self) -> bool:
        """Whether this node asks for the check of the edges."""
        return self._info.check is not None and self._info.check.edges

    @property
    def pids(self) -> set[int]:
        return set() if self._running is None else {self._running.process.pid}

    async def require_fit(self) -> None:
        """Check this node if it is suspect, where the check of all nodes does not do so.

        Raises ``NodeUnfit`` if it is not fit.
        """
        if self.is_suspect and not self.with_edges and self._job.check_node is not None:
            agent = self._agent
            await fitness.require(self._job.check_node, say=agent.say, note=agent.note)

    async def take_part(self, current: Round, host: str, meeting: str) -> Verdict | None:
        """Check this node and its edges, with all nodes of the round; the verdict on all.

        They meet as ``meeting`` in the job's store, which this node reaches at ``host``.
        None where this node could not take part, or the run is to end meanwhile.
        """
        agent, state = self._agent, current.state
        work = self._part(host, meeting, current.rank or 0, state.size)
        again = ", this one itself too" if work.again else ""
        agent.note(f"preflight: {state.size} nodes and the edges between them are checked{again}")
        with append_regular(self._job.run.paths.nodes_log) as log:
            running = self._running = part.start(log)
        limit_s = work.limit.total_seconds() + _WRITE_LIMIT_S
        task = asyncio.ensure_future(in_thread(partial(running.result, work), limit_s))
        task.add_done_callback(lambda _: agent.condition.notify())
        await agent.condition.until(
            lambda: task.done() or agent.stop.asked or current.is_over_before_start
        )
        if not task.done():
            running.end()
        try:
            found = await task
        except (OSError, TimeoutError) as error:
            found = part.Result(why=str(error))
        self._running = None
        self.is_suspect = False
        self._report = found.report or self._report
        if found.verdict is None:
            agent.say(f"preflight: this node could not check its edges: {found.why}")
            return None
        await self._record(found.verdict, self._report, current.number)
        head, *rows = shown.lines(found.verdict)
        bad = shown.failed(found.verdict)
        for line in (f"preflight: {head}", *rows):
            (agent.say if bad else agent.note)(line)
        return found.verdict

    def conclude(self, verdict: Verdict | None, current: Round) -> Conclusion:
        """What node 0 makes of it."""
        rendezvous, gathered = self._info.rendezvous, current.gathered or []
        if verdict is None:
            return Conclusion(refused="node 0 could not check the edges: see its nodes.log")
        serving = [rank for rank, facts in enumerate(gathered) if facts.hosts]
        return conclude(
            verdict,
            [facts.name for facts in gathered],
            active=rendezvous.active,
            serving=serving[0] if serving else None,
            replaceable=rendezvous.backend == "c10d",
            lost=current.state.lost,
        )

    def _part(self, host: str, meeting: str, rank: int, size: int) -> part.Part:
        info, rendezvous = self._info, self._info.rendezvous
        check = info.check or part.NodeCheck(edges=True)
        old = self._report is not None and time.time() - self._report.time > _FRESH_S
        return part.Part(
            host=host,
            port=rendezvous.port,
            meeting=meeting,
            count=size,
            least=rendezvous.active,
            rank=rank,
            name=info.name,
            check=structs.replace(check, report=self._report),
            again=old or (self.is_suspect and info.check is not None),
        )

    async def _record(self, verdict: Verdict, report: NodeReport | None, attempt: int) -> None:
        run, failed = self._job.run, shown.failed(verdict)
        hosts = [] if report is None else [report]
        document = hand_over.document(hosts, verdict)
        run.add(
            PreflightEvent(
                attempt=attempt,
                failed=failed,
                hosts=sorted(name for name, bad in shown.convicted(verdict).items() if bad),
                causes=[cause["what"] for cause in document["edges"]["causes"]],
            )
        )
        write = partial(documents.write_whole, run.paths.preflight, documents.encode(document))
        with suppress(OSError, TimeoutError):
            await in_thread(write, _WRITE_LIMIT_S)
