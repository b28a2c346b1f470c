"""What a run makes of what it is asked: a second stop, shorter timeouts."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ncclops.agent.condition import Condition
from ncclops.agent.control_handler import ControlHandler, tightened
from ncclops.agent.stop_requests import StopRequests
from ncclops.control.commands import ControlRefused, Stop, run_command
from ncclops.decision.outcome import StopRequest
from ncclops.record.run_directory import RunDirectory
from ncclops.timeouts.model import Window


def handler(directory: Path) -> tuple[ControlHandler, StopRequests, list[StopRequest]]:
    """One of a run without workers, and the stops that are asked of it."""
    requested: list[StopRequest] = []
    grace = timedelta(seconds=15)
    requests = StopRequests(Condition(), grace, on_request=requested.append, pass_on=lambda _: None)
    run = RunDirectory.create(exact=directory / "run", parent=None, node="n01")
    job: Any = SimpleNamespace(run=run, stop_grace=grace)
    control_handler = ControlHandler(job, requests, lambda: None, lambda _: False, print)
    return control_handler, requests, requested


def test_a_second_stop_is_accepted_if_its_grace_is_shorter(tmp_path: Path) -> None:
    control_handler, requests, requested = handler(tmp_path)
    assert "SIGKILL after 5m" in control_handler.stop(reason="drain", by="me")
    with pytest.raises(ControlRefused, match=r"stopped already: drain \(me\)"):
        control_handler.stop(reason="drain", by="another")
    first_deadline = requests.deadline
    assert "SIGKILL after 3s" in control_handler.stop(
        reason="now", by="me", grace=timedelta(seconds=3)
    )
    assert requests.deadline < first_deadline
    assert [request.reason for request in requested] == ["drain (me)", "now (me)"]


def test_a_stop_without_a_reason_is_told_by_who_asked_for_it(tmp_path: Path) -> None:
    control_handler, _, requested = handler(tmp_path)
    run_command(control_handler, Stop(by="me@n01 with ncclops stop"))
    assert [request.reason for request in requested] == [
        "me@n01 with ncclops stop, without a reason"
    ]


def window(soft: float, hard: float, group: float) -> Window:
    return Window(**seconds(soft=soft, hard=hard, process_group=group))


def seconds(**limits: float) -> dict[str, timedelta]:
    return {name: timedelta(seconds=value) for name, value in limits.items()}


@pytest.mark.parametrize(
    ("asked", "becomes"),
    [
        ({"process_group": 100}, (80, 90, 100)),
        ({"soft": 60}, (60, 540, 600)),
        ({"hard": 90}, (80, 90, 600)),
        ({"soft": 10, "hard": 20, "process_group": 30}, (10, 20, 30)),
        ({"process_group": 599}, (479.2, 539.1, 599)),
    ],
)
def test_what_is_not_named_shrinks_where_the_order_demands_it(
    asked: dict[str, float], becomes: tuple[float, float, float]
) -> None:
    assert tightened(window(480, 540, 600), seconds(**asked)) == window(*becomes)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"soft": 481}, "soft is 8m already"),
        ({"process_group": 601}, "process_group is 10m already"),
        ({"soft": 100, "hard": 100}, "soft < hard"),
        ({"hard": 90, "process_group": 80}, "soft < hard"),
    ],
)
def test_timeouts_only_get_shorter_and_keep_their_order(asked: Any, says: str) -> None:
    with pytest.raises(ControlRefused, match=says):
        tightened(window(480, 540, 600), seconds(**asked))
