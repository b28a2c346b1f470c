"""What a terminal says of a job without steps, from its events."""

from __future__ import annotations

from ncclops.agent.start_line import StartLine
from ncclops.record.events import (
    BootstrappedEvent,
    CompileStallEvent,
    Event,
    FaultEvent,
    NodesEvent,
    RestartEvent,
    RetryEvent,
    StepEvent,
    StopRequestedEvent,
    VerdictEvent,
    WorkerExitedEvent,
    WorkerStartedEvent,
)


def started(*ranks: int) -> list[Event]:
    return [WorkerStartedEvent(rank=rank, pid=1) for rank in ranks]


def after(*events: Event, line: StartLine | None = None, at: float = 0.0) -> StartLine:
    line = line or StartLine()
    for event in events:
        line.take(event, at)
    return line


def test_from_the_start_to_the_first_step() -> None:
    line = StartLine()
    line.start(0.0)
    assert line.text(1.0) is None  # what is over at once needs no line
    assert line.text(9.0) == "starting the workers (9s)"
    after(*started(0, 1), line=line, at=0.0)
    assert line.text(12.2) == "2 workers started, no process group yet (12s)"
    after(BootstrappedEvent(rank=1), line=line, at=13.0)
    assert line.text(14.0) == "1 of 2 workers have a process group (14s)"
    after(BootstrappedEvent(rank=0), line=line, at=14.0)
    assert line.text(95.0) == "2 workers with a process group, no step seen yet (1m35s)"
    after(StepEvent(rank=0, step=0), line=line, at=96.0)
    assert (line.text(200.0), line.is_waiting) == (None, False)


def test_nodes_that_meet() -> None:
    line = StartLine()
    line.meet("1/2 nodes: n1; waiting for n2", 0.0)
    assert line.text(3.0) == "1/2 nodes: n1; waiting for n2 (3s)"
    line.meet("2/2 nodes: n1 n2; last call for spares", 60.0)
    assert line.text(61.0) == "2/2 nodes: n1 n2; last call for spares (1m01s)"
    after(NodesEvent(attempt=0), line=line, at=62.0)
    assert line.text(70.0) == "starting the workers (8s)"
    after(*started(4), line=line, at=70.0)
    assert line.text(75.0) == "1 worker started, no process group yet (5s)"


def test_a_restart_in_place_until_its_first_step() -> None:
    training = after(*started(0, 1), StepEvent(rank=0, step=1))
    line = after(FaultEvent(rank=1, cause="x", kind="exception"), line=training, at=100.0)
    assert line.text(100.1) is None
    assert line.text(104.0) == "rank 1 failed, no step since (4s)"
    after(RestartEvent(iteration=1), line=line, at=105.0)
    after(FaultEvent(rank=0, cause="x", kind="exception"), line=line, at=105.0)  # each rank's own
    assert line.text(108.0) == "restarted in place, no step since (3s)"
    after(*started(1), line=line, at=106.0)  # a rank that comes back
    assert line.text(108.0) == "restarted in place, no step since (3s)"
    after(StepEvent(rank=0, step=1), line=line, at=109.0)
    assert line.text(120.0) is None


def test_another_attempt() -> None:
    line = after(*started(0, 1), BootstrappedEvent(rank=0), BootstrappedEvent(rank=1))
    after(RetryEvent(attempt=2, cooldown_s=90.0), line=line, at=10.0)
    assert line.text(20.0) == "attempt 2 in 1m20s"
    assert line.text(103.0) == "attempt 2: starting (1m33s)"
    after(*started(0, 1), line=line, at=110.0)
    assert line.text(112.0) == "2 workers started, no process group yet (2s)"


def test_a_lost_store_stops_nothing() -> None:
    line = after(*started(0), StepEvent(rank=0, step=1))
    after(FaultEvent(cause="store-lost", kind="store-lost"), line=line)
    assert line.text(60.0) is None
    after(FaultEvent(cause="node-lost", kind="node-lost", on="n2"), line=line)
    assert line.text(60.0) == "a node was lost, no step since (1m00s)"


def test_what_ends_it() -> None:
    for event in (
        CompileStallEvent(window_s=1800.0, message="x"),
        StopRequestedEvent(signal="SIGINT"),
        VerdictEvent(outcome="failed"),
        WorkerExitedEvent(rank=0, exit_code=0),
    ):
        assert after(*started(0), event).text(60.0) is None
    for event in (
        WorkerExitedEvent(rank=0, exit_code=1),
        StopRequestedEvent(signal="SIGKILL", ranks=[1]),  # what is left of a failed attempt
    ):
        assert after(*started(0), event).text(60.0) is not None
    assert after(*started(0)).text(1799.0) is not None
    assert after(*started(0)).text(1801.0) is None
