"""The spans of a trace, from events."""

from __future__ import annotations

import json

import pytest

from ncclops.record.event_values import EvidenceLine, RetryAdvice
from ncclops.record.events import (
    BootstrappedEvent,
    ClassifiedEvent,
    Event,
    FaultEvent,
    RestartEvent,
    RunStartedEvent,
    StepEvent,
    VerdictEvent,
    WorkerExitedEvent,
    WorkerStartedEvent,
)
from ncclops.traces.model import Trace, TraceEvent, attributes, trace_of

START = [
    RunStartedEvent(ts=100, run_id="r", world_size=2, node="n01"),
    WorkerStartedEvent(ts=101, rank=0),
    BootstrappedEvent(ts=105, rank=0),
    StepEvent(ts=110, step=1, step_s=1.0),
    StepEvent(ts=119, step=10, step_s=1.0),
]
FAULT = FaultEvent(ts=120, rank=1, cause="RuntimeError: CUDA error")
RESTART = RestartEvent(
    ts=122, iteration=1, cause="x", faulty_ranks=[1], phases_ms={"detect": 500.0, "abort": 1500.0}
)
AFTER = [StepEvent(ts=124, step=11, step_s=1.0)]
END = [
    WorkerExitedEvent(ts=130, rank=0, exit_code=0),
    WorkerExitedEvent(ts=130.5, rank=1, exit_code=1),
]


def trace(*events: Event, **about: object) -> Trace:
    made = trace_of(events, about)
    assert made is not None
    return made


def verdict(outcome: str, reason: str = "") -> VerdictEvent:
    return VerdictEvent(ts=131, outcome=outcome, exit_code=1, reason=reason)


def test_where_time_went_is_below_the_run_and_phases_are_below_the_restart() -> None:
    made = trace(*START, FAULT, RESTART, *AFTER, *END, verdict("completed"))
    shown = [
        (each.name, None if each.parent is None else made.spans[each.parent].name, each.start)
        for each in made.spans
    ]
    assert shown == [
        ("run", None, 100),
        ("start-up", "run", 100),
        ("unmeasured", "run", 105),
        ("steps", "run", 109),
        ("restart", "run", 120),
        ("start-up", "run", 122),
        ("steps", "run", 123),
        ("end", "run", 130),
        ("detect", "restart", 120),
        ("abort", "restart", 120.5),
    ]
    assert (made.spans[0].end, made.spans[-1].end, made.host) == (131, 122, "n01")
    assert made.spans[3].attributes == {"ncclops.first_step": 1, "ncclops.last_step": 10}


def test_what_happened_is_an_event_of_the_span_in_which_it_did() -> None:
    made = trace(*START, FAULT, RESTART, *AFTER, *END, verdict("completed"))
    found = {
        (made.spans[place].name, event.name): event
        for place in range(len(made.spans))
        for event in made.spans[place].events
    }
    assert found.keys() == {("restart", "fault"), ("start-up", "restart"), ("end", "worker-exited")}
    assert found["restart", "fault"] == TraceEvent(
        "fault", 120, {"ncclops.rank": 1, "ncclops.cause": "RuntimeError: CUDA error"}
    )
    # A worker that has ended well is none.
    assert found["end", "worker-exited"].attributes["ncclops.exit_code"] == 1


def test_a_run_that_failed_has_an_error_and_one_that_goes_on_has_none() -> None:
    failed = trace(*START, *END, verdict("failed", "rank 1 exited with 1")).spans[0]
    assert failed.error == "rank 1 exited with 1"
    assert failed.attributes["ncclops.outcome"] == "failed"
    assert trace(*START, *END, verdict("stopped", "asked")).spans[0].error is None
    going = trace(*START).spans[0]
    assert (going.error, going.end) == (None, 119)
    assert "ncclops.outcome" not in going.attributes
    assert trace_of([], {}) is None
    assert trace_of(START[:1], {}) is None


def test_ids_follow_from_the_run() -> None:
    one, again = trace(*START), trace(*START, FAULT)
    other = trace(RunStartedEvent(ts=100, run_id="s", world_size=2), *START[1:])
    assert (one.trace_id, one.span_id(0)) == (again.trace_id, again.span_id(0))
    assert len({one.trace_id, other.trace_id, one.span_id(0), one.span_id(1)}) == 4
    assert 0 < one.trace_id < 2**128
    assert 0 < one.span_id(0) < 2**64


def test_a_restart_that_begins_before_its_span_is_cut() -> None:
    """Two restarts that follow each other: phases of the second began in the first."""
    early = RestartEvent(ts=120.5, iteration=1, phases_ms={"detect": 1000.0})
    late = RestartEvent(ts=121, iteration=2, phases_ms={"detect": 100.0, "abort": 900.0})
    made = trace(*START, FAULT, early, late, *AFTER)
    for span in made.spans[1:]:
        assert span.parent is not None
        above = made.spans[span.parent]
        assert above.start <= span.start <= span.end <= above.end


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, True),
        (7, 7),
        (2**70, str(2**70)),
        (0.5, 0.5),
        ("\ud800x", "?x"),
        ("x" * 5000, "x" * 4000),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [1, 2]),
        ([1, 2**70], f"[1, {2**70}]"),
        ([True, 1], "[true, 1]"),
        ([1, "a"], '[1, "a"]'),
        ({"a": {"b": 1}}, '{"a": {"b": 1}}'),
        ([{"a": 1}], '[{"a": 1}]'),
    ],
)
def test_values_are_what_an_attribute_can_be(value: object, expected: object) -> None:
    assert attributes({"x": value}) == {"ncclops.x": expected}


def test_what_is_unknown_or_empty_is_no_attribute() -> None:
    assert attributes({"a": None, "b": "", "c": [], "d": {}}) == {}
    assert attributes({"zero": 0, "no": False}) == {"ncclops.zero": 0, "ncclops.no": False}


def test_objects_within_an_event_are_json() -> None:
    classified = ClassifiedEvent(
        ts=115,
        class_="user-error",
        retry=RetryAdvice(policy="fix-code"),
        evidence=[EvidenceLine(file="ranks/1/stderr.log", line=7, text="KeyError: 'lr'")],
    )
    (event,) = (each for span in trace(*START, classified).spans for each in span.events)
    assert event.attributes["ncclops.class"] == "user-error"
    retry, evidence = (str(event.attributes[f"ncclops.{name}"]) for name in ("retry", "evidence"))
    assert json.loads(retry)["policy"] == "fix-code"
    assert json.loads(evidence)[0]["text"] == "KeyError: 'lr'"
