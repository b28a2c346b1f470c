"""What becomes an event while a run goes on: little of what is seen, and each thing once."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest

from ncclops.health.live import LiveWatch, WatchRules
from ncclops.health.stalls import StallLimits
from ncclops.health.stragglers import step_time_in
from ncclops.receipts.observation import Kind, Observation, Where, observe_record
from ncclops.record import receipt_records
from ncclops.record.events import (
    STEP_EVERY_S,
    CompileStallEvent,
    CompileWarmupEvent,
    Event,
    StartupStallEvent,
    StepEvent,
    StragglerEvent,
)

LIMITS = StallLimits(startup=timedelta(seconds=100), compile=timedelta(seconds=1000))
NOWHERE = Where("receipt.jsonl", 0, "")


def watch() -> LiveWatch:
    return LiveWatch(WatchRules(stall=LIMITS), now=0.0)


def line(kind: Kind, **fields: Any) -> Observation:
    return Observation(kind=kind, where=NOWHERE, **fields)


def record(live: LiveWatch, rank: int, now: float = 0.0, **fields: Any) -> list[Event]:
    full = receipt_records.decode(json.dumps({"ts": now, "iteration": 0, **fields}))
    assert full is not None
    seen = observe_record(full, NOWHERE)
    assert seen is not None
    return live.saw_record(rank, seen, step_time_in(full), full.iteration, now, now)


def reported_steps(
    live: LiveWatch, rank: int, numbers: range, now: float, **fields: Any
) -> list[int]:
    notes = [
        note for n in numbers for note in record(live, rank, now, kind="step", step=n, **fields)
    ]
    return [note.step for note in notes if isinstance(note, StepEvent)]


def test_a_window_that_passes_is_reported_once_with_its_name() -> None:
    live = watch()
    assert live.deadline == 100.0
    assert live.check(99.0) == []
    (stall,) = live.check(100.0)
    assert isinstance(stall, StartupStallEvent)
    assert live.check(1e6) == []
    live.saw_line(0, line("begun"), now=200.0, at=0.0)
    (stall,) = live.check(1200.0)
    assert isinstance(stall, CompileStallEvent)
    assert stall.window_s == 1000.0


def test_a_step_of_any_rank_closes_the_windows() -> None:
    live = watch()
    live.saw_line(3, line("step", step=0), now=10.0, at=0.0)
    assert live.deadline is None


def test_training_that_shows_by_its_optimizers_alone_is_no_stall() -> None:
    live = watch()
    live.trains(now=99.0)
    assert live.check(100.0) == []


def test_a_restart_in_place_opens_them_again() -> None:
    live = watch()
    record(live, 0, kind="step", step=0)
    record(live, 0, now=50.0, kind="iteration", iteration=1)
    assert live.deadline == 150.0


def test_steps_are_reported_at_intervals_and_the_last_one_at_an_end() -> None:
    live = watch()
    assert reported_steps(live, 1, range(10), now=1.0) == [0]
    assert reported_steps(live, 0, range(10), now=2.0) == [], "reported already, of another rank"
    pace = STEP_EVERY_S
    assert reported_steps(live, 0, range(10, 20), now=1.0 + pace) == [10]
    assert reported_steps(live, 1, range(20, 30), now=99.0 + pace) == [], "the lowest rank leads"
    assert live.flush() == [StepEvent(rank=0, step=19, step_s=0.0, ts=1.0 + pace)]
    assert live.flush() == []


def test_an_end_of_an_iteration_reports_its_last_step_first() -> None:
    live = watch()
    reported_steps(live, 0, range(3), now=1.0)
    ended = record(live, 1, now=5.0, kind="iteration", iteration=1)
    assert ended == [StepEvent(rank=0, step=2, step_s=0.0, ts=1.0)]
    assert reported_steps(live, 0, range(1, 5), now=6.0, iteration=1) == [1]


def test_what_other_ranks_wrote_before_they_started_again_does_not_count() -> None:
    live = watch()
    reported_steps(live, 0, range(16), now=1.0)
    record(live, 0, now=5.0, kind="iteration", iteration=1)
    assert record(live, 1, now=5.0, kind="step", step=15) == []
    assert live.saw_line(0, line("step", step=15), now=5.0, at=5.0) == []
    record(live, 1, now=5.0, kind="iteration", iteration=1)
    assert reported_steps(live, 1, range(10, 15), now=6.0, iteration=1) == [10]


def test_the_time_per_step_is_the_mean_since_the_last_one_reported() -> None:
    live = watch()
    for n in range(12):
        notes = record(live, 0, now=10.0 + n, kind="step", step=n)
    assert live.flush() == [StepEvent(ts=21.0, rank=0, step=11, step_s=1.0)]
    assert notes == []


@pytest.mark.parametrize("set_by_s", [-7200.0, -1.5, 1.5, 7200.0])
def test_a_clock_that_is_set_changes_no_step_time(set_by_s: float) -> None:
    """It gave a negative one, and then no step for as long as the clock had been set back."""
    live, notes = watch(), list[Event]()
    for n in range(36):
        at = 10.0 + n + (set_by_s if n > 2 else 0.0)
        notes += live.saw_line(0, line("step", step=n), now=10.0 + n, at=at)
    steps = [note for note in notes + live.flush() if isinstance(note, StepEvent)]
    assert [(each.step, each.step_s) for each in steps[1:]] == [
        *((n, 1.0) for n in (10, 20, 30)),
        (35, 1.0),
    ]


def test_a_clock_that_is_set_back_between_steps_that_are_seen_at_once_gives_no_step_time() -> None:
    live = watch()
    live.saw_line(0, line("step", step=0), now=10.0, at=10.0)
    live.saw_line(0, line("step", step=1), now=10.0, at=-5.0)
    assert live.flush() == [StepEvent(ts=-5.0, rank=0, step=1, step_s=None)]


def test_that_steps_were_reported_is_known_after_another_start_too() -> None:
    live = watch()
    live.saw_line(0, line("step", step=0), now=0.0, at=0.0)
    assert not live.steps_recorded()
    record(live, 0, kind="step", step=0)
    record(live, 0, kind="start", iteration=1)
    assert live.steps_recorded()


def test_a_step_that_is_printed_and_recorded_counts_once() -> None:
    live = watch()
    assert record(live, 0, kind="step", step=0, tokens=50, seconds=0.5) == [
        StepEvent(ts=0.0, rank=0, step=0, step_s=0.5, rate=100.0, unit="tokens/s")
    ]
    assert live.saw_line(0, line("step", step=0), now=0.0, at=0.0) == []
    assert live.flush() == []
    assert live.steps_printed(0) == 1


def test_warmup_is_reported_once_per_rank_and_start() -> None:
    live = watch()
    stated = CompileWarmupEvent(ts=0.0, rank=0, seconds=3.5, stated=True)
    assert record(live, 0, kind="compile-warmup", seconds=3.5) == [stated]
    assert live.saw_line(0, line("warmup", seconds=3.5), now=0.0, at=0.0) == [], "printed as well"
    silent = [note for n in range(3) for note in record(live, 1, kind="step", step=n)]
    assert [note for note in silent if isinstance(note, CompileWarmupEvent)] == [
        CompileWarmupEvent(ts=0.0, rank=1, seconds=None, stated=False)
    ]
    record(live, 0, kind="iteration", iteration=1)
    assert record(live, 0, kind="compile-warmup", seconds=1.0, iteration=1)


def test_what_is_printed_before_the_record_of_the_start_is_read_is_of_that_start() -> None:
    """Output and records are read independently of each other."""
    live = watch()
    assert live.saw_line(0, line("warmup", seconds=3.5), now=0.0, at=0.0)
    record(live, 0, kind="start", version=1)
    again = [note for n in range(3) for note in record(live, 0, kind="step", step=n)]
    assert not [note for note in again if isinstance(note, CompileWarmupEvent)]


def test_a_slow_rank_is_reported_with_its_ratio_and_the_advice() -> None:
    live = watch()
    found: list[Event] = []
    for n in range(40):
        for rank in range(4):
            seconds = 0.11 if rank == 2 else 0.1
            found += record(live, rank, now=float(n), kind="step", step=n, seconds=seconds)
    (slow,) = [note for note in found if isinstance(note, StragglerEvent)]
    assert slow.rank == 2
    assert slow.kind == "chronic"
    assert slow.ratio == 1.1
    assert slow.since_step == 1, "never the contaminated one"
    assert "Swap the GPU" in slow.advice
