"""What is told of a default group that has come to its members after a restart in place."""

from __future__ import annotations

from typing import Any

import pytest

from ncclops.diagnose.incident_events import decision_on
from ncclops.diagnose.story import tried
from ncclops.record.events import Event, RegroupedEvent, RestartEvent
from ncclops.record.incident_record import GroupRecord, IncidentRecord


def test_the_restart_says_what_became_of_the_group() -> None:
    events = [
        RestartEvent(iteration=1, cause="a"),
        RegroupedEvent(iteration=1, rung="reconfigured", world_size=2, ms=4.0),
        RestartEvent(iteration=2, cause="b", ranks_lost=[1]),
        RegroupedEvent(iteration=2, rung="anew", why="c", world_size=1, ms=30.0),
        RestartEvent(iteration=3, cause="d"),
        RestartEvent(iteration=4, cause="e", ranks_lost=[2]),
        RegroupedEvent(iteration=4, rung="shrunk", world_size=2, ms=4.0),
        RegroupedEvent(iteration=4, group="a (0, 1)", rung="kept", world_size=2, ms=4.0),
    ]
    assert [step.what for step in tried(events)] == [
        "restart 1 in place, its group reconfigured",
        "restart 2 in place, without rank 1, its group made anew",
        "restart 3 in place",
        "restart 4 in place, without rank 2, its group shrunk",
    ]


ALL = [("default", "shrunk"), ("a (1, 2)", "kept"), ("b (3)", "kept"), ("pair (0)", "anew")]


class Counted(list[Event]):
    """Counts the events that it hands out by their places."""

    handed_out = 0

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        self.handed_out += len(found) if isinstance(place, slice) else 1
        return found


def test_twice_as_many_restarts_are_twice_the_work() -> None:
    events = Counted(RestartEvent(iteration=each, cause="a") for each in range(1000))
    assert len(list(tried(events))) == 1000
    assert events.handed_out <= 3000


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ([GroupRecord(group="default", rung="reconfigured")], "was reconfigured in place"),
        ([GroupRecord(group="default", rung="shrunk")], "was shrunk in place"),
        ([GroupRecord(group="default", rung="anew", why="c")], "was made anew (c)"),
        (
            [GroupRecord(group=name, rung=rung, why="d") for name, rung in ALL],
            "was shrunk in place; the pair (0) group was made anew (d);"
            " 2 that lost nobody were kept",
        ),
    ],
)
def test_the_decision_on_an_incident_has_it(groups: list[GroupRecord], said: str) -> None:
    incident = IncidentRecord(
        iteration=0, cause="exception", summary="a", first_faulty_rank=0, at=10.0,
        world_size_before=2, world_size=2, rank_before=0, rank=0, groups=groups,
    )  # fmt: skip
    decision = decision_on(incident, [RestartEvent(ts=11.0, iteration=1)])
    assert decision.why == f"every rank was healthy and came back; the default group {said}"


def test_the_decision_does_not_say_what_goes_without_saying() -> None:
    """The script was called again, and has made its group."""
    incident = IncidentRecord(
        iteration=0, cause="exception", summary="a", first_faulty_rank=0, at=10.0, rank_before=0,
        world_size_before=2, world_size=2, rank=0,
        groups=[GroupRecord(group="default", rung="anew")],
    )  # fmt: skip
    decision = decision_on(incident, [RestartEvent(ts=11.0, iteration=1)])
    assert decision.why == "every rank was healthy and came back"
