"""Spans and goodput from events, as `ncclops launch` writes them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ncclops.goodput import Span, measure, spans

Event = dict[str, Any]


def event(ts: float, name: str, **fields: Any) -> Event:
    return {"ts": ts, "event": name, "rank": None, "node": "n01", **fields}


START = [event(0, "run-started"), event(1, "worker-started", rank=0)]
TRAINING = [
    *START,
    event(5, "bootstrapped", rank=0),
    event(25, "compile-warmup", rank=0, seconds=15.0),
    event(26, "step", step=1, step_s=1.0),
    event(75, "step", step=50, step_s=1.0),
]


def told(events: list[Event]) -> list[tuple[str, float, float]]:
    return [(span.kind, span.start, span.end) for span in spans(events)]


def test_an_undisturbed_run() -> None:
    end = [event(76, "worker-exited", rank=0), event(77, "verdict")]
    assert told([*TRAINING, *end]) == [
        ("start-up", 0, 5),
        ("unmeasured", 5, 10),
        ("compile", 10, 25),
        ("steps", 25, 76),
        ("end", 76, 77),
    ]


def test_a_restart_in_process_and_the_steps_that_are_done_again() -> None:
    phases = {"detect": 500.0, "abort": 1000.0, "barrier": 500.0}
    events = [
        *TRAINING,
        event(80, "fault", rank=1),
        event(81, "restart", rank=0, iteration=1, phases_ms=phases),
        event(83, "bootstrapped", rank=0),
        event(90, "compile-warmup", rank=0, seconds=5.0),
        event(91, "step", step=41),
        event(111, "step", step=61),
        event(120, "verdict"),
    ]
    assert told(events)[3:] == [
        ("steps", 25, 79),  # the phases say that the fault was at 79, before anybody told of it
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
        event(80, "worker-exited", rank=1, signal="SIGKILL"),
        event(81, "restart", phases_ms={"abort": 500.0}),
        event(82, "step", step=51),
        event(90, "worker-exited", rank=0),
        event(91, "verdict"),
    ]
    assert told(events)[3:] == [
        ("steps", 25, 80.5),
        ("restart", 80.5, 81),
        ("start-up", 81, 82),
        ("steps", 82, 90),
        ("end", 90, 91),
    ]


def test_a_fault_that_is_told_after_its_restart_is_no_second_one() -> None:
    events = [
        *TRAINING,
        event(80, "restart", faulty_ranks=[1], phases_ms={"abort": 1000.0}),
        event(81, "fault") | {"rank": 1},
        event(83, "compile-warmup", seconds=1.0),
        event(103, "step", step=60, step_s=1.0),
        event(110, "fault") | {"rank": 1},
        event(111, "verdict"),
    ]
    assert told(events)[3:] == [
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
        event(80, "worker-exited", rank=0, exit_code=1),
        event(82, "fault", rank=0),
        event(83, "retry"),
        event(93, "worker-started", rank=0),
        event(95, "step", step=50, step_s=1.0),
        event(96, "step", step=51),
        event(97, "verdict"),
    ]
    assert told(events)[3:] == [
        ("steps", 25, 80),
        ("restart", 80, 83),
        ("cool-down", 83, 93),
        ("start-up", 93, 94),
        ("redone", 94, 95),
        ("steps", 95, 97),
    ]


def test_a_store_that_is_lost_stops_nothing() -> None:
    events = [*TRAINING, event(80, "fault", cause="store-lost"), event(90, "verdict")]
    assert told(events)[-1] == ("steps", 25, 90)


def test_without_signs_of_training_nothing_is_claimed() -> None:
    events = [*START, event(5, "bootstrapped"), event(60, "verdict")]
    assert told(events) == [("start-up", 0, 5), ("unmeasured", 5, 60)]
    assert measure(spans(events)).ratio is None
    assert measure(spans(events)).line() is None


def test_a_run_that_goes_on_is_counted_until_now() -> None:
    assert spans(TRAINING, now=100.0)[-1] == Span("steps", 25, 100.0)
    assert spans(TRAINING)[-1].end == 75


def test_goodput_adds_up() -> None:
    goodput = measure([Span("start-up", 0, 10), Span("steps", 10, 90), Span("redone", 90, 100)])
    assert goodput.ratio == pytest.approx(0.8)
    document = goodput.to_json()
    assert document["total_s"] == 100
    assert document["seconds"]["redone"] == 10
    assert document["seconds"]["cool-down"] == 0
    line = goodput.line()
    assert line == "goodput: 80.0% (start-up 10.0s, steps 80.0s, redone 10.0s)"


def test_nothing_comes_of_nothing() -> None:
    assert spans([]) == []
    assert measure([]).ratio is None


NAMES = """run-started worker-started bootstrapped compile-warmup step fault restart retry
worker-exited verdict stop-requested"""
fields = st.fixed_dictionaries(
    {"ts": st.floats(0, 1000), "event": st.sampled_from(NAMES.split())},
    optional={
        "step": st.integers(-1, 50) | st.none() | st.text(),
        "seconds": st.floats(0, 500) | st.none(),
        "step_s": st.floats(0, 50),
        "phases_ms": st.dictionaries(st.text(max_size=3), st.floats(0, 1e6)) | st.none(),
    },
)


@given(st.lists(fields))
def test_spans_follow_each_other_without_a_gap(events: list[Event]) -> None:
    found = spans(events)
    for before, after in itertools.pairwise(found):
        assert before.end == after.start
        assert before.kind != after.kind
    assert all(span.start < span.end for span in found)
    goodput = measure(found)
    assert goodput.total == pytest.approx(found[-1].end - found[0].start if found else 0.0)
    assert goodput.ratio is None or 0 <= goodput.ratio <= 1
