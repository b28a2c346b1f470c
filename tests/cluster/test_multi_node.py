"""What an agent does on messages of its rendezvous process and of other nodes."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from ncclops.agent.condition import Condition
from ncclops.agent.coordinator import AgentSide, LimitsChange
from ncclops.agent.stop_requests import StopRequests
from ncclops.classify.policy import default_rules
from ncclops.cluster import messages
from ncclops.cluster.fingerprint import Fingerprint
from ncclops.cluster.multi_node import MultiNode
from ncclops.cluster.node_info import NodeInfo
from ncclops.cluster.records import (
    BackRecord,
    DecisionRecord,
    EndedRecord,
    FailedRecord,
    LimitsRecord,
    LostRecord,
    Record,
    StartRecord,
    StopRecord,
    UnknownRecord,
    ViewRecord,
)
from ncclops.cluster.rendezvous_config import RendezvousConfig, RendezvousPace
from ncclops.decision.deciding import AttemptDecision
from ncclops.decision.node_end import CannotStart, JobRules, NodeEnd
from ncclops.decision.outcome import StopRequest
from ncclops.decision.retrying import RetryPlan
from ncclops.errors import NcclopsError
from ncclops.health.hang import HangFinding
from ncclops.health.liveness import Elsewhere, NodeView
from ncclops.record import event_log
from ncclops.record.events import FaultEvent
from ncclops.record.run_directory import RunDirectory
from ncclops.timeouts.model import Window
from tests.conftest import LIMIT_S

CONFIG = RendezvousConfig(
    backend="c10d", active=2, most=2, host="n0", port=29400, job_id="job", local_addr="127.0.0.1"
)
KILLED = "was killed by SIGKILL"
START = StartRecord(
    node=0,
    names=["n0", "n1"],
    addresses=["10.0.0.1", "10.0.0.2"],
    attempt=0,
    history=[],
    store=("10.0.0.1", 4711),
    external=False,
    prefix="job",
)
RULES = JobRules(retry=RetryPlan(lane="generic", rules=default_rules(), granted=0))


class Node:
    """Node 1 of two, as its agent knows it after the nodes have met."""

    def __init__(
        self, directory: Path, *, in_process: bool = False, lost_after: timedelta = CONFIG.pace.beat
    ) -> None:
        self.run = RunDirectory.create(exact=directory / "run", parent=None, node="n1")
        self.said: list[str] = []
        self.limits: list[LimitsChange] = []
        grace = timedelta(seconds=15)
        self.condition = condition = Condition()
        self.stop = StopRequests(
            condition, grace, on_request=lambda _: None, pass_on=lambda _: None
        )
        job: Any = SimpleNamespace(
            run=self.run, restarts_in_process=in_process, layout=SimpleNamespace(nproc=4)
        )
        side = AgentSide(
            condition=condition,
            stop=self.stop,
            say=self.said.append,
            note=self.said.append,
            rules=lambda: RULES,
            take_limits=self.limits.append,
        )
        info = NodeInfo(
            rendezvous=dataclasses.replace(
                CONFIG, pace=RendezvousPace(beat=lost_after, missed_beats=1)
            ),
            name="n1",
            print=Fingerprint(host="n1", variables={}, facts={}),
            allowed=(),
            script="train.py",
            listener=None,
        )
        self.nodes = MultiNode(info, job, side)
        self.nodes.deliver(messages.Connected())
        self.nodes.deliver(messages.Met(1, 2))

    def receives(self, record: Record) -> None:
        self.nodes.deliver(messages.Logged(record))

    def faults(self) -> list[FaultEvent]:
        return [e for e in event_log.read(self.run.paths.events) if isinstance(e, FaultEvent)]


def in_loop(test: Callable[[], None]) -> None:
    async def main() -> None:
        test()

    asyncio.run(main())


@pytest.mark.parametrize("in_process", [False, True])
def test_a_lost_node_ends_the_attempt_where_all_are_needed(
    tmp_path: Path, in_process: bool
) -> None:
    def test() -> None:
        node = Node(tmp_path, in_process=in_process)
        node.receives(LostRecord(node=0, why="silent for 15s"))
        assert node.nodes.over_for_all(entered=True) == (None if in_process else "node 0 was lost")
        assert node.said == ["node 0 is lost: silent for 15s"]
        (fault,) = node.faults()
        assert (fault.loss, fault.on, fault.why) == ("node-lost", "node 0", "silent for 15s")

    in_loop(test)


def test_a_node_that_is_lost_before_its_ranks_came_is_not_waited_for(tmp_path: Path) -> None:
    """Ours wait for them in the store, where nobody says that they will not come."""

    async def main() -> None:
        node = Node(tmp_path, in_process=True, lost_after=timedelta(milliseconds=50))
        node.receives(LostRecord(node=0, why="its agent was killed"))
        over = await node.condition.until(
            lambda: node.nodes.over_for_all(entered=False), timedelta(seconds=LIMIT_S)
        )
        assert over
        assert node.nodes.over_for_all(entered=False) == "node 0 was lost"
        assert node.nodes.over_for_all(entered=True) is None, "they restart without its ranks"

    asyncio.run(main())


def test_a_node_that_was_only_late_is_waited_for(tmp_path: Path) -> None:
    async def main() -> None:
        node = Node(tmp_path, in_process=True, lost_after=timedelta(milliseconds=50))
        node.receives(LostRecord(node=0, why="silent for 15s"))
        node.receives(BackRecord(node=0))
        over = await node.condition.until(
            lambda: node.nodes.over_for_all(entered=False), timedelta(milliseconds=200)
        )
        assert not over

    asyncio.run(main())


def test_a_failure_elsewhere_is_shown_recorded_and_ends_the_attempt(tmp_path: Path) -> None:
    def test() -> None:
        node = Node(tmp_path)
        node.receives(FailedRecord(node=0, rank=3, how=KILLED, lines=["last line"]))
        assert node.nodes.over_for_all(entered=True) == "rank 3 failed on node 0"
        node.receives(FailedRecord(node=0, rank=2, how="exited with code 1"))
        assert node.said == ["node 0: rank 3 was killed by SIGKILL"], "the first, in one line"
        (fault,) = node.faults()
        assert (fault.rank, fault.how, fault.lines) == (3, KILLED, ["last line"])

    in_loop(test)


def test_our_own_failure_in_the_log_is_not_shown_again(tmp_path: Path) -> None:
    def test() -> None:
        node = Node(tmp_path)
        node.receives(FailedRecord(node=1, rank=2, how="exited with code 1"))
        assert node.nodes.over_for_all(entered=True) is None, "the agent ends the attempt by itself"
        assert node.said == []
        assert node.faults() == []

    in_loop(test)


def test_a_stop_asked_elsewhere_has_its_grace_here_too(tmp_path: Path) -> None:
    def test() -> None:
        node = Node(tmp_path)
        node.receives(StopRecord(node=0, reason="drain", grace_s=9.0))
        assert node.nodes.over_for_all(entered=True) == "stopped on node 0"
        assert node.said == ["asked to stop on node 0"]
        asked = node.nodes.stop_elsewhere()
        assert asked is not None and (asked.reason, asked.signum) == ("drain", None)
        assert not node.stop.asked
        assert node.stop.deadline < float("inf")

    in_loop(test)


def test_shorter_timeouts_of_another_node_are_taken_over(tmp_path: Path) -> None:
    def test() -> None:
        node = Node(tmp_path)
        window = Window(process_group=timedelta(seconds=2), soft=timedelta(seconds=1.5), hard=None)
        node.receives(LimitsRecord(node=0, window=window, reason="slow", by="me"))
        assert node.limits == [LimitsChange(window, "slow", "me")]

    in_loop(test)


def test_the_ranks_of_other_nodes_count_by_what_their_node_says(tmp_path: Path) -> None:
    def test() -> None:
        node = Node(tmp_path)
        assert node.nodes.elsewhere() == Elsewhere(ranks=4), "it has not said anything"
        stuck = HangFinding(rank=1, state="stuck")
        node.receives(ViewRecord(node=0, view=NodeView(ranks=3, findings=(stuck,))))
        node.receives(ViewRecord(node=1, view=NodeView(ranks=4)))  # our own
        assert node.nodes.elsewhere() == Elsewhere(ranks=3, findings=(stuck,))
        node.receives(LostRecord(node=0, why="silent for 15s"))
        assert node.nodes.elsewhere() == Elsewhere(), "nobody waits for a node that is lost"

    in_loop(test)


@pytest.mark.parametrize(
    ("external", "follows"),
    [(True, "the workers meet there too"), (False, "cannot recover from another failure")],
)
def test_the_loss_of_the_store_is_recorded_once_with_what_it_means(
    tmp_path: Path, external: bool, follows: str
) -> None:
    def test() -> None:
        node = Node(tmp_path)
        node.receives(replace(START, external=external))
        node.nodes.deliver(messages.StoreLost("Broken pipe"))
        node.nodes.deliver(messages.StoreLost("Broken pipe"))
        (said,) = node.said
        assert said.startswith("the job's store at n0:29400 is lost (Broken pipe): ")
        assert follows in said
        (fault,) = node.faults()
        assert (fault.loss, fault.why) == ("store-lost", "Broken pipe")

    in_loop(test)


def test_a_record_of_another_version_changes_nothing(tmp_path: Path) -> None:
    def test() -> None:
        node = Node(tmp_path)
        node.receives(UnknownRecord(node=0))
        assert (node.said, node.faults(), node.nodes.over_for_all(entered=True)) == ([], [], None)

    in_loop(test)


def test_before_any_rendezvous_a_node_decides_alone(tmp_path: Path) -> None:
    async def main() -> None:
        decision = await Node(tmp_path).nodes.settle(NodeEnd(name="n1", failed=True, fatal=True))
        assert (decision.outcome, decision.reason) == ("failed", "a worker failed")

    asyncio.run(main())


@pytest.mark.parametrize("asked_elsewhere", [True, False])
def test_a_stop_here_after_the_workers_have_ended_completes_nothing(
    tmp_path: Path, asked_elsewhere: bool
) -> None:
    """A scheduler signals all nodes, and not at one moment: where the signal came last, the stop of
    another node has ended the workers. Or they had ended by themselves, and others had not."""

    async def main() -> None:
        node = Node(tmp_path)
        vars(node.nodes)["_peers"] = SimpleNamespace(post=lambda _: None)
        node.receives(START)
        grace = timedelta(seconds=15)
        request = StopRequest(reason="SIGTERM", grace=grace, signum=signal.SIGTERM)
        other = NodeEnd(name="n0", stop=request)
        if asked_elsewhere:
            node.receives(StopRecord(node=0, reason="SIGTERM", grace_s=15.0, signal=15))
            node.receives(EndedRecord(node=0, end=other))
        node.stop.add(request)
        node.stop.signals = 2  # asked once more: nobody is waited for
        own = NodeEnd(name="n1")
        node.receives(EndedRecord(node=1, end=own))
        decision = await node.nodes.settle(own)
        assert (decision.outcome, decision.exit_code) == ("interrupted", 128 + signal.SIGTERM)

    asyncio.run(main())


def test_a_node_that_loses_the_store_while_another_one_stops_the_job_has_not_completed_it(
    tmp_path: Path,
) -> None:
    """The node that serves the store is signalled, and killed before all have ended."""

    async def main() -> None:
        node = Node(tmp_path)
        vars(node.nodes)["_peers"] = SimpleNamespace(post=lambda _: None)
        node.receives(START)
        node.receives(StopRecord(node=0, reason="SIGTERM", grace_s=15.0, signal=15))
        node.nodes.deliver(messages.StoreLost("Broken pipe"))
        decision = await node.nodes.settle(NodeEnd(name="n1"))
        assert (decision.outcome, decision.exit_code) == ("interrupted", 128 + signal.SIGTERM)

    asyncio.run(main())


def test_a_stop_elsewhere_before_the_start_is_no_failure_here(tmp_path: Path) -> None:
    async def main() -> None:
        node = Node(tmp_path)
        vars(node.nodes)["_peers"] = SimpleNamespace(post=lambda _: None)
        node.receives(StopRecord(node=0, reason="SIGINT", grace_s=15.0, signal=signal.SIGINT))
        node.nodes.deliver(messages.StoreLost("Broken pipe"))  # it goes with the other node
        refused = CannotStart.of(NcclopsError("stopped during rendezvous"))
        decision = await node.nodes.settle(NodeEnd(name="n1", failed=True, cannot_start=refused))
        assert (decision.outcome, decision.exit_code) == ("interrupted", 128 + signal.SIGINT)

    asyncio.run(main())


def test_a_stop_does_not_hide_why_there_is_no_start(tmp_path: Path) -> None:
    async def main() -> None:
        node = Node(tmp_path)
        vars(node.nodes)["_peers"] = SimpleNamespace(post=lambda _: None)
        node.nodes.deliver(messages.NoRound("node 1 is there already"))
        node.receives(StopRecord(node=0, reason="SIGINT", grace_s=15.0, signal=signal.SIGINT))
        refused = CannotStart.of(NcclopsError("node 1 is there already"))
        decision = await node.nodes.settle(NodeEnd(name="n1", failed=True, cannot_start=refused))
        assert (decision.outcome, decision.reason) == ("failed", "node 1 is there already")

    asyncio.run(main())


COMPLETED = AttemptDecision(outcome="completed", exit_code=0, reason="1 worker exited 0")


@pytest.mark.parametrize(
    ("lost", "outcome", "reason"),
    [
        (False, "completed", "1 worker exited 0"),
        (True, "failed", "look at the output of the host that serves it"),
    ],
)
def test_a_node_in_reserve_ends_with_the_attempt_and_with_the_store(
    tmp_path: Path, lost: bool, outcome: str, reason: str
) -> None:
    """Without restarts in place it has no workers that could end."""

    async def main() -> None:
        node = Node(tmp_path)
        vars(node.nodes)["_peers"] = SimpleNamespace(post=lambda _: None)
        node.receives(START)
        state = node.nodes._round.state
        state.idle = frozenset({1})
        assert node.nodes.over_for_all(entered=False) is None
        if lost:
            node.nodes.deliver(messages.StoreLost("Broken pipe"))
        else:
            node.receives(DecisionRecord(node=0, decision=COMPLETED))
        assert node.nodes.over_for_all(entered=False) is not None
        decision = await node.nodes.settle(NodeEnd(name="n1"))
        assert decision.outcome == outcome
        assert decision.reason.endswith(reason)

    asyncio.run(main())
