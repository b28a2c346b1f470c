"""What faults have cost a run, from its events."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ncclops.goodput import Losses, losses, restarts_within, spans
from ncclops.goodput.losses import NEW_PROCESSES, PAUSE, REDONE, SEAT, UNFINISHED
from ncclops.record.events import (
    Event,
    FaultEvent,
    HangEvent,
    RestartEvent,
    RetryEvent,
    RunStartedEvent,
    StepEvent,
    VerdictEvent,
    WorkerExitedEvent,
    WorkerStartedEvent,
)

from .test_goodput import EVENTS, TRAINING


def of(events: list[Event]) -> Losses:
    found = losses(spans(events), events)
    assert found is not None
    return found


def test_a_run_without_a_fault_has_lost_nothing() -> None:
    found = of([*TRAINING, VerdictEvent(ts=80, outcome="completed")])
    assert found == Losses(useful=55, lost={}, total=80)
    assert found.ideal == 80


def test_a_restart_in_place_is_told_by_its_phases() -> None:
    """The last step before the fault ended at 75."""
    phases = {"detect": 500.0, "grow": 1000.0, "barrier": 500.0}
    found = of(
        [
            *TRAINING,
            FaultEvent(ts=80, cause="it raised", rank=1),
            RestartEvent(ts=81, rank=0, iteration=1, phases_ms=phases),
            StepEvent(ts=91, step=41, step_s=1.0),
            StepEvent(ts=111, step=61),
            VerdictEvent(ts=120, outcome="completed"),
        ]
    )
    assert found.lost == pytest.approx(
        {
            UNFINISHED: 4,
            "restart in place: detect": 0.5,
            SEAT: 1,
            "restart in place: barrier": 0.5,
            "start-up again": 9,
            REDONE: 10,
        }
    )
    assert found.useful == pytest.approx(50 + 20)
    assert found.ideal == pytest.approx(120 - 25)


def test_a_hang_is_lost_from_its_last_step_on() -> None:
    hang = HangEvent(ts=700, rank=1, culprits=[1], cause="step counter stale")
    found = of(
        [
            *TRAINING,
            hang,
            FaultEvent(ts=701, cause="it hangs", rank=1),
            VerdictEvent(ts=702, outcome="failed"),
        ]
    )
    assert found.useful == 50
    assert found.lost == pytest.approx({UNFINISHED: 626, NEW_PROCESSES: 1})


def test_new_processes_and_a_start_in_vain() -> None:
    found = of(
        [
            RunStartedEvent(ts=0, run_id="r", world_size=1),
            WorkerStartedEvent(ts=0, rank=0),
            WorkerExitedEvent(ts=10, rank=0, exit_code=1),
            FaultEvent(ts=12, cause="it raised", rank=0),
            RetryEvent(ts=13),
            WorkerStartedEvent(ts=23, rank=0),
            StepEvent(ts=34, step=1, step_s=1.0),
            VerdictEvent(ts=40, outcome="completed"),
        ]
    )
    assert found.lost == pytest.approx({"start-up in vain": 10, NEW_PROCESSES: 3, PAUSE: 10})
    assert found.ideal == pytest.approx(17)


def test_without_a_step_nothing_is_said() -> None:
    assert losses([], []) is None


@given(st.lists(EVENTS))
def test_useful_and_lost_time_are_never_more_than_the_run(events: list[Event]) -> None:
    found = losses(spans(events), events)
    if found is not None:
        assert found.useful >= 0
        assert all(seconds > 0 for seconds in found.lost.values())
        assert found.useful + sum(found.lost.values()) <= found.total * (1 + 1e-9) + 1e-6


def test_a_restart_belongs_to_the_span_of_a_restart_that_it_ended_in() -> None:
    """One pass over the events, however many restarts there are."""
    restarts = [
        RestartEvent(ts=ts, rank=0, iteration=n, phases_ms={"abort": 500.0})
        for n, ts in enumerate((81.0, 81.2, 100.0))
    ]
    events: list[Event] = [
        *TRAINING,
        FaultEvent(ts=80, cause="it raised", rank=1),
        *restarts,
        StepEvent(ts=120, step=41, step_s=1.0),
        VerdictEvent(ts=130, outcome="completed"),
    ]
    seen = spans(events)
    found = restarts_within(seen, iter(events))
    assert [seen[place].kind for place in found] == ["restart", "restart"]
    assert sorted((seen[place].end, [e.ts for e in each]) for place, each in found.items()) == [
        (81.2, [81.0, 81.2]),
        (100.0, [100.0]),
    ]
