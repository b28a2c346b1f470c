"""The outcome follows from how the workers ended, and blames the one that failed first."""

from __future__ import annotations

import signal
from datetime import timedelta
from typing import Any

from ncclops.decision.outcome import Ending, FirstFailure, StopRequest, Verdict, judge


def ending(rank: int, exit_code: int | None = 0, **more: Any) -> Ending:
    defaults = {"pid": 100 + rank, "signal": None, "seconds": 1.0}
    return Ending(rank=rank, exit_code=exit_code, **(defaults | more))


def test_all_workers_ended_well() -> None:
    assert judge([ending(0), ending(1)], stopped_by=None, launcher_lost=False) == (
        "completed",
        0,
        "2 workers exited 0",
    )


def test_the_first_failure_is_the_one_nobody_asked_for() -> None:
    asked = ending(0, None, signal="SIGTERM", asked_to_stop=True)
    outcome, code, reason = judge([asked, ending(1, 7)], stopped_by=None, launcher_lost=False)
    assert (outcome, code) == ("failed", 1)
    assert reason == "rank 1 exited with code 7"


def test_a_stop_by_a_signal_is_an_interruption_even_if_workers_then_end_well() -> None:
    for signum, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        by = StopRequest(reason=signum.name, grace=timedelta(seconds=1), signum=signum)
        outcome, exit_code, _ = judge([ending(0)], stopped_by=by, launcher_lost=False)
        assert (outcome, exit_code) == ("interrupted", code)


def test_a_stop_on_demand_is_a_success_if_all_came_to_an_end_in_good_order() -> None:
    by = StopRequest(reason="no more budget", grace=timedelta(seconds=1))
    verdict = judge([ending(0)], stopped_by=by, launcher_lost=False)
    assert verdict == ("stopped", 0, "stopped: no more budget")
    endings = [ending(0), ending(1, None, signal="SIGTERM")]
    outcome, code, reason = judge(endings, stopped_by=by, launcher_lost=False)
    assert (outcome, code) == ("stopped", 1)
    assert reason.endswith("rank 1 did not come to an end in good order")


def test_a_killed_launcher_is_a_failure_not_an_interruption() -> None:
    by = StopRequest(reason="SIGTERM", grace=timedelta(seconds=1), signum=signal.SIGTERM)
    outcome, code, reason = judge([ending(0)], stopped_by=by, launcher_lost=True)
    assert (outcome, code) == ("failed", 1)
    assert "launcher was killed" in reason


def test_the_headline_names_rank_and_signal_and_what_it_often_means() -> None:
    failure = FirstFailure(
        ending=ending(3, None, signal="SIGKILL"),
        message=None,
        tail=["last words"],
        log="r/3.log",
        host="n1",
    )
    assert "rank 3 was killed by SIGKILL after 1.0s" in failure.headline()
    assert "out-of-memory" in failure.headline()


def test_the_document_carries_the_failure_flat() -> None:
    failed = ending(1, 1)
    document = Verdict(
        run_id="r",
        outcome="failed",
        exit_code=1,
        reason="rank 1 exited with code 1",
        attempts=1,
        seconds=2.0,
        first_failure=FirstFailure(
            ending=failed, message="KeyError: 'x'", tail=[], log="l", host="n1"
        ),
        workers=[ending(0), failed],
    ).to_json()
    assert document["schema"] == "ncclops.verdict/1"
    assert document["first_failure"]["rank"] == 1
    assert document["first_failure"]["message"] == "KeyError: 'x'"
    assert [worker["rank"] for worker in document["workers"]] == [0, 1]
