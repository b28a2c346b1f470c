"""Spans and goodput from events, as `ncclops launch` writes them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ncclops.goodput import Span, SpansSoFar, describe, measure, spans
from ncclops.record.events import (
    BootstrappedEvent,
    CompileWarmupEvent,
    Event,
    FaultEvent,
    HangEvent,
    RestartEvent,
    RetryEvent,
    RunStartedEvent,
    StepEvent,
    StopForcedEvent,
    StopRequestedEvent,
    VerdictEvent,
    WorkerExitedEvent,
    WorkerStartedEvent,
)

START = [RunStartedEvent(ts=0, run_id="r", world_size=2), WorkerStartedEvent(ts=1, rank=0)]
TRAINING = [
    *START,
    BootstrappedEvent(ts=5, rank=0),
    CompileWarmupEvent(ts=25, rank=0, seconds=15.0),
    StepEvent(ts=26, step=1, step_s=1.0),
    StepEvent(ts=75, step=50, step_s=1.0),
]


def rounded(events: list[Event]) -> list[tuple[str, float, float]]:
    return [(span.kind, span.start, span.end) for span in spans(events)]


def test_an_undisturbed_run() -> None:
    end = [WorkerExitedEvent(ts=76, rank=0), VerdictEvent(ts=77, outcome="completed")]
    assert rounded([*TRAINING, *end]) == [
        ("start-up", 0, 5),
        ("unmeasured", 5, 10),
        ("compile", 10, 25),
        ("steps", 25, 76),
        ("end", 76, 77),
    ]


def test_times_outside_of_the_run_make_it_no_longer() -> None:
    """Receipts have the times that a script gives them."""
    far = [StepEvent(ts=-1e9, step=2, step_s=1.0), StepEvent(ts=1e18, step=3, step_s=1.0)]
    end = [WorkerExitedEvent(ts=76, rank=0), VerdictEvent(ts=77, outcome="completed")]
    measured = measure(spans([*TRAINING, *far, *end]))
    assert measured.total == 77
    assert measure(spans([*TRAINING, *far], now=80)).total == 80


def test_a_restart_in_process_and_the_steps_that_are_done_again() -> None:
    phases = {"detect": 500.0, "abort": 1000.0, "barrier": 500.0}
    events = [
        *TRAINING,
        FaultEvent(ts=80, cause="it raised", rank=1),
        RestartEvent(ts=81, rank=0, iteration=1, phases_ms=phases),
        BootstrappedEvent(ts=83, rank=0),
        CompileWarmupEvent(ts=90, rank=0, seconds=5.0),
        StepEvent(ts=91, step=41),
        StepEvent(ts=111, step=61),
        VerdictEvent(ts=120, outcome="completed"),
    ]
    assert rounded(events)[3:] == [
        ("steps", 25, 79),  # the phases say that the fault was at 79, before it was recorded
        ("restart", 79, 81),
        ("start-up", 81, 83),
        ("unmeasured", 83, 85),
        ("compile", 85, 90),
        ("redone", 90, 100),  # steps 42 to 50 of 42 to 61, which took 20 s
        ("steps", 100, 120),
    ]


def test_a_rank_that_is_lost_does_not_end_the_run() -> None:
    events = [
        *TRAINING,
        WorkerExitedEvent(ts=80, rank=1, signal="SIGKILL"),
        RestartEvent(ts=81, phases_ms={"abort": 500.0}),
        StepEvent(ts=82, step=51),
        WorkerExitedEvent(ts=90, rank=0),
        VerdictEvent(ts=91, outcome="completed"),
    ]
    assert rounded(events)[3:] == [
        ("steps", 25, 80.5),
        ("restart", 80.5, 81),
        ("start-up", 81, 82),
        ("steps", 82, 90),
        ("end", 90, 91),
    ]


def test_ranks_that_stand_still_do_not_train() -> None:
    """A job that hung until it was stopped had made steps for 98 % of its time."""
    forced = [
        StopForcedEvent(ts=900, ranks=[0, 1], late=[0, 1]),
        VerdictEvent(ts=902, outcome="failed"),
    ]
    hang = HangEvent(ts=700, rank=1, culprits=[1], cause="step counter stale")
    fault = FaultEvent(ts=701, cause="rank 1 hangs", rank=1)
    stood = ("unmeasured", 75)
    assert rounded([*TRAINING, *forced])[3:] == [("steps", 25, 75), (*stood, 902)]
    assert rounded([*TRAINING, hang, fault])[3:] == [("steps", 25, 75), (*stood, 701)]
    # One that went on was no hang; and a stop by force may be for want of a point to end at.
    more = [StepEvent(ts=800, step=51, step_s=1.0), VerdictEvent(ts=801, outcome="failed")]
    assert rounded([*TRAINING, hang, *more])[4:] == [(*stood, 799), ("steps", 799, 801)]
    no_point = [StopForcedEvent(ts=100, ranks=[0, 1]), VerdictEvent(ts=102, outcome="failed")]
    assert rounded([*TRAINING, *no_point])[3:] == [("steps", 25, 102)]


def test_a_fault_that_is_recorded_after_its_restart_is_no_second_one() -> None:
    events = [
        *TRAINING,
        RestartEvent(ts=80, faulty_ranks=[1], phases_ms={"abort": 1000.0}),
        FaultEvent(ts=81, cause="it raised", rank=1),
        CompileWarmupEvent(ts=83, seconds=1.0),
        StepEvent(ts=103, step=60, step_s=1.0),
        FaultEvent(ts=110, cause="it raised", rank=1),
        VerdictEvent(ts=111, outcome="completed"),
    ]
    assert rounded(events)[3:] == [
        ("steps", 25, 79),
        ("restart", 79, 80),
        ("start-up", 80, 82),
        ("compile", 82, 83),
        ("redone", 83, 93),  # steps 41 to 50 of 41 to 60
        ("steps", 93, 110),
        ("restart", 110, 111),
    ]


def test_a_retry_with_new_processes() -> None:
    events = [
        *TRAINING,
        WorkerExitedEvent(ts=80, rank=0, exit_code=1),
        FaultEvent(ts=82, cause="it raised", rank=0),
        RetryEvent(ts=83),
        WorkerStartedEvent(ts=93, rank=0),
        StepEvent(ts=95, step=50, step_s=1.0),
        StepEvent(ts=96, step=51),
        VerdictEvent(ts=97, outcome="completed"),
    ]
    assert rounded(events)[3:] == [
        ("steps", 25, 80),
        ("restart", 80, 83),
        ("cool-down", 83, 93),
        ("start-up", 93, 94),
        ("redone", 94, 95),
        ("steps", 95, 97),
    ]


def test_a_store_that_is_lost_stops_nothing() -> None:
    events = [
        *TRAINING,
        FaultEvent(ts=80, cause="store-lost"),
        VerdictEvent(ts=90, outcome="completed"),
    ]
    assert rounded(events)[-1] == ("steps", 25, 90)


def test_without_signs_of_training_nothing_is_claimed() -> None:
    events = [*START, BootstrappedEvent(ts=5), VerdictEvent(ts=60, outcome="completed")]
    assert rounded(events) == [("start-up", 0, 5), ("unmeasured", 5, 60)]
    assert measure(spans(events)).ratio is None
    assert describe(measure(spans(events)).to_record()) is None


def test_a_run_that_goes_on_is_counted_until_now() -> None:
    assert spans(TRAINING, now=100.0)[-1] == Span("steps", 25, 100.0)
    assert spans(TRAINING)[-1].end == 75


def test_of_a_run_whose_beginning_is_not_recorded_nothing_is_claimed() -> None:
    """Its run directory was removed meanwhile, or the record of events cut, and begins later."""
    rest = [*TRAINING[2:], WorkerStartedEvent(ts=76, rank=0), StepEvent(ts=90, step=60)]
    assert spans(rest, now=95) == []
    assert measure(spans(rest, now=95)).ratio is None


def test_goodput_adds_up() -> None:
    goodput = measure([Span("start-up", 0, 10), Span("steps", 10, 90), Span("redone", 90, 100)])
    assert goodput.ratio == pytest.approx(0.8)
    document = goodput.to_json()
    assert document["total_s"] == 100
    assert document["seconds"]["redone"] == 10
    assert document["seconds"]["cool-down"] == 0
    line = describe(goodput.to_record())
    assert line == "goodput: 80.0% (start-up 10.0s, steps 80.0s, redone 10.0s)"


RECORDED = [StepEvent(ts=25 + 10 * n, step=10 * n, step_s=1.0) for n in range(1, 5)]


def test_of_a_run_under_way_a_step_that_does_not_end_is_no_goodput() -> None:
    events = [*START, BootstrappedEvent(ts=5, rank=0), *RECORDED]
    so_far = SpansSoFar()
    so_far.take_all(events, 85.0)
    assert so_far.until(85.0)[-1] == Span("steps", 34.0, 85.0), "the next is not overdue yet"
    assert so_far.until(98.0)[-2:] == [Span("steps", 34.0, 65.0), Span("unmeasured", 65.0, 98.0)]
    so_far.take(StepEvent(ts=99.0, step=41, step_s=34.0))
    assert so_far.until(100.0)[-1] == Span("steps", 34.0, 100.0), "it ended after all"


@pytest.mark.parametrize(
    "recorded",
    [
        [StepEvent(ts=30, step=1, step_s=5.0)],
        [StepEvent(ts=30, step=1), StepEvent(ts=60, step=2)],
    ],
    ids=["by its steps", "by what is recorded"],
)
def test_a_step_is_overdue_by_what_is_usual_in_the_run(recorded: list[Event]) -> None:
    last = recorded[-1].ts
    events = [*START, *recorded]
    assert spans(events, now=last + 45)[-1].kind == "steps"
    assert spans(events, now=last + 65)[-1] == Span("unmeasured", last, last + 65)


def test_nothing_comes_of_nothing() -> None:
    assert spans([]) == []
    assert measure([]).ratio is None


TIMES = st.floats(0, 1000)
SECONDS = st.floats(0, 500)
PHASES = st.dictionaries(st.text(max_size=3), st.floats(0, 1e6))
EVENTS: st.SearchStrategy[Event] = st.one_of(
    st.builds(RunStartedEvent, ts=TIMES, run_id=st.just("r"), world_size=st.just(2)),
    st.builds(WorkerStartedEvent, ts=TIMES),
    st.builds(BootstrappedEvent, ts=TIMES),
    st.builds(CompileWarmupEvent, ts=TIMES, seconds=st.none() | SECONDS),
    st.builds(StepEvent, ts=TIMES, step=st.integers(-1, 50), step_s=st.none() | SECONDS),
    st.builds(FaultEvent, ts=TIMES, cause=st.just("it raised"), rank=st.integers(0, 3)),
    st.builds(RestartEvent, ts=TIMES, phases_ms=PHASES, faulty_ranks=st.lists(st.integers(0, 3))),
    st.builds(RetryEvent, ts=TIMES),
    st.builds(WorkerExitedEvent, ts=TIMES),
    st.builds(StopRequestedEvent, ts=TIMES),
    st.builds(StopForcedEvent, ts=TIMES, late=st.lists(st.integers(0, 3))),
    st.builds(HangEvent, ts=TIMES, culprits=st.just([1]), cause=st.just("it stands still")),
    st.builds(VerdictEvent, ts=TIMES, outcome=st.just("failed")),
)


@given(st.lists(EVENTS))
def test_spans_follow_each_other_without_a_gap(events: list[Event]) -> None:
    found = spans(events)
    for before, after in itertools.pairwise(found):
        assert before.end == after.start
        assert before.kind != after.kind
    assert all(span.start < span.end for span in found)
    goodput = measure(found)
    assert goodput.total == pytest.approx(found[-1].end - found[0].start if found else 0.0)
    assert goodput.ratio is None or 0 <= goodput.ratio <= 1


@given(st.lists(EVENTS), st.integers(0, 20))
def test_a_run_that_is_read_as_it_goes_comes_to_the_same(events: list[Event], first: int) -> None:
    """Its status is asked for again and again: what was read before is not gone through anew."""
    going_on = [event for event in events if not isinstance(event, VerdictEvent)]
    events = [START[0], *sorted(going_on, key=lambda event: event.ts)]
    so_far = SpansSoFar()
    for part in (events[: first + 1], events[first + 1 :]):
        now = max((event.ts for event in part), default=0.0)
        so_far.take_all(part, now)
    assert so_far.until(1000.0) == spans(events, now=1000.0)
