"""How long ago a run under way made its last step, and when the next one is overdue."""

from __future__ import annotations

from ncclops.diagnose.pace import Pace
from ncclops.record.events import Event, StepEvent, WorkerStartedEvent


def step(number: int, ts: float, step_s: float | None = None) -> StepEvent:
    return StepEvent(ts=ts, rank=0, node="n", step=number, step_s=step_s)


STEPS: list[Event] = [step(0, 100.0), step(20, 110.0, 0.5)]


def test_a_run_without_steps_is_not_judged() -> None:
    pace = Pace.of([], 1000.0)
    assert (str(pace), pace.is_overdue) == ("no step is on record", False)


def test_the_next_step_is_overdue_when_ten_of_them_are_missing_beside_what_a_record_takes() -> None:
    assert not Pace.of(STEPS, 134.0).is_overdue
    pace = Pace.of(STEPS, 136.0)
    assert pace.is_overdue
    assert str(pace) == "the last step on record, 20, was 26s ago"
    assert str(Pace.of(STEPS, 410.0)) == "the last step on record, 20, was 5m ago"


def test_a_first_step_alone_says_nothing_of_the_next_one() -> None:
    assert not Pace.of(STEPS[:1], 1000.0).is_overdue


def test_workers_that_start_again_are_not_overdue() -> None:
    started = WorkerStartedEvent(ts=115.0, rank=0, node="n", pid=7, attempt=1, started_ticks=1)
    assert not Pace.of([*STEPS, started], 1000.0).is_overdue
