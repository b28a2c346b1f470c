"""The rules over the events of a run: what is told, by whom, and how often."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import pytest
from msgspec import structs

from ncclops.notify.rules import SEVERITIES, Notice, Rules
from ncclops.profiles.notification import RULES, NotifySettings
from ncclops.record.event_values import GpuFault, NodeEntry
from ncclops.record.events import (
    ClassifiedEvent,
    Event,
    FaultEvent,
    GpuFaultEvent,
    HangEvent,
    NodesEvent,
    PreflightEvent,
    RestartEvent,
    RetryEvent,
    RunStartedEvent,
    StartupStallEvent,
    StepEvent,
    StopRequestedEvent,
    StragglerEvent,
    VerdictEvent,
    WorkerStartedEvent,
)

SETTINGS = NotifySettings(
    cooldown=timedelta(minutes=10), progress=timedelta(minutes=5), restarts=3,
    restarts_within=timedelta(minutes=1), goodput=0.8, goodput_after=timedelta(minutes=30),
)  # fmt: skip
FAILED = VerdictEvent(outcome="failed", exit_code=1, reason="rank 1 exited with code 1")


@dataclass
class Story:
    """Events at times, in seconds since the start, and what the rules made of them."""

    rules: Rules
    now: float = 0.0
    told: list[Notice] = field(default_factory=list)

    def at(self, now: float, *events: Event) -> list[Notice]:
        """What ``events`` of that time, and the time itself, are told as."""
        self.now = now
        new: list[Notice] = []
        for event in events:
            stamped = type(event)(**{**{n: getattr(event, n) for n in event.__struct_fields__},
                                     "ts": 1e9 + now})  # fmt: skip
            new += self.rules.take(stamped, now)
        new += self.rules.tick(now, 1e9 + now)
        self.told += new
        return new

    def ruled(self, now: float, *events: Event) -> list[str]:
        return [notice.rule for notice in self.at(now, *events)]


def story(node: str = "n0", settings: NotifySettings = SETTINGS) -> Story:
    begun = Story(Rules(settings, node=node))
    begun.at(0, RunStartedEvent(run_id="r", world_size=4), WorkerStartedEvent(rank=0))
    return begun


def nodes(*names: str, spares: int = 0) -> NodesEvent:
    entries = [
        NodeEntry(rank=rank, name=name, spare=rank >= len(names) - spares)
        for rank, name in enumerate(names)
    ]
    return NodesEvent(attempt=0, nodes=entries)


def step(number: int, **more: Any) -> StepEvent:
    return StepEvent(rank=0, step=number, step_s=1.0, **more)


def test_what_the_job_ended_with_is_no_restart() -> None:
    run = story()
    run.at(6, RestartEvent(rank=0, iteration=1, cause="KeyError: 'lr'"))
    run.at(8, RestartEvent(rank=0, iteration=2, cause="KeyError: 'lr'", instead="stop"))
    assert run.rules.progress.restarts == 1


def test_each_rule_has_a_severity() -> None:
    assert set(SEVERITIES) == {*RULES, "test"}


def test_a_job_that_fails_is_told_in_the_words_of_the_verdict_and_with_the_class() -> None:
    """It said "rank 1 exited with code 1; rank 1: KeyError: 'lr'", as no other output did."""
    run = story()
    run.at(5, ClassifiedEvent(class_="user-error"))
    what = "rank 1 on a raised KeyError: 'lr' at train.py:4 in main"
    (notice,) = run.at(6, structs.replace(FAILED, what=what))
    assert (notice.rule, notice.severity) == ("failed", "critical")
    assert notice.summary == f"failed: {what}"
    assert run.rules.progress.reason == what
    assert notice.details == {"exit_code": 1, "class": "user-error"}


@pytest.mark.parametrize(
    ("outcome", "rules"),
    [("completed", []), ("stopped", []), ("interrupted", []), ("no-receipt", ["failed"])],
)
def test_an_end_that_was_meant_is_not_told(outcome: str, rules: list[str]) -> None:
    assert story().ruled(5, VerdictEvent(outcome=outcome, reason="why")) == rules


class TestRestarts:
    def test_as_many_within_the_window_are_a_storm(self) -> None:
        run = story()
        assert run.ruled(10, RestartEvent(cause="a")) == []
        assert run.ruled(20, RestartEvent(cause="b")) == []
        (notice,) = run.at(30, RetryEvent(reason="new processes"))
        assert notice.summary == "3 restarts within 1m, the last one after: new processes"
        assert run.rules.progress.restarts == 3

    def test_slower_ones_are_none(self) -> None:
        run = story()
        for minute in range(10):
            assert run.ruled(60.0 * minute + 1, RestartEvent(cause="a")) == []

    def test_the_cooldown_holds_back_and_counts(self) -> None:
        run = story()
        rules = [run.ruled(10.0 + second, RestartEvent(cause="a")) for second in range(5)]
        assert rules == [[], [], ["restart-storm"], [], []]
        run.at(605, RestartEvent(cause="a"), RestartEvent(cause="a"))
        (notice,) = run.at(613, RestartEvent(cause="a"))
        assert (notice.rule, notice.held_back) == ("restart-storm", 2)


class TestProgress:
    def test_no_step_for_long(self) -> None:
        run = story()
        assert run.ruled(600) == [], "what a start takes, the stall windows watch"
        run.at(610, step(7))
        assert run.ruled(900) == []
        (notice,) = run.at(911)
        assert notice.summary == "no step for more than 5m after 7"
        assert run.ruled(912) == []
        assert run.ruled(1512) == ["no-progress"], "again, after the cooldown"

    def test_a_restart_begins_anew(self) -> None:
        run = story()
        run.at(10, step(1), RestartEvent(cause="a"))
        assert run.ruled(1000) == []

    def test_a_run_that_is_stopping_makes_none(self) -> None:
        run = story()
        run.at(10, step(1), StopRequestedEvent(reason="drain"))
        assert run.ruled(1000) == []

    def test_workers_that_were_killed_after_a_failure_do_not_stop_the_run(self) -> None:
        run = story()
        killed = StopRequestedEvent(signal="SIGKILL", ranks=[1])
        run.at(10, step(1), killed, RetryEvent(attempt=2), WorkerStartedEvent(rank=0))
        run.at(60, step(2))
        assert run.ruled(1000) == ["no-progress"]

    def test_a_hang_and_a_start_that_takes_too_long_are_told_at_once(self) -> None:
        (notice,) = story().at(5, HangEvent(culprits=[1, 2], cause="step counter stale"))
        assert notice.summary == "ranks 1, 2 hung: step counter stale"
        stall = StartupStallEvent(window_s=1800.0, message="no sign of training for 30m")
        assert [each.summary for each in story().at(5, stall)] == ["no sign of training for 30m"]


class TestGoodput:
    def test_too_little_is_told_once_the_run_has_lasted(self) -> None:
        run = story()
        run.at(1000, step(0))
        assert run.ruled(1700, step(700)) == [], "not so early"
        (notice,) = run.at(1900, step(900))
        assert notice.rule == "goodput-below"
        assert notice.summary == "goodput is 47%, below 80%"
        assert run.rules.progress.goodput == pytest.approx(0.4742, abs=0.001)

    def test_enough_is_not(self) -> None:
        run = story()
        run.at(60, step(0))
        assert run.ruled(4000, step(3900)) == []

    def test_where_nothing_is_seen_of_training_nothing_is_said(self) -> None:
        assert story().ruled(10_000) == []


class TestNodes:
    def test_a_gpu_a_lost_node_and_one_that_is_not_fit_are_suspected(self) -> None:
        run = story()
        run.at(1, nodes("n0", "n1", "n2"))
        fault = GpuFault(rank=1, node="n0", device="GPU 3", what="Xid 79")
        told = run.at(
            5,
            GpuFaultEvent(rank=1, fault=fault),
            FaultEvent(cause="node-lost", kind="node-lost", on="n2", why="silent for 30s"),
            PreflightEvent(attempt=1, failed=True, hosts=["n1"], causes=["mtu: too small"]),
        )
        assert [each.subject for each in told] == ["n0", "n2", "n1"]
        assert [each.summary for each in told] == [
            "GPU 3 on node n0: Xid 79; replace node n0",
            "node n2 was lost: silent for 30s",
            "node n1 is not fit: mtu: too small",
        ]

    def test_what_all_agents_see_the_first_one_tells(self) -> None:
        second = story(node="n1")
        second.at(1, nodes("n0", "n1"))
        assert second.ruled(5, step(1), RetryEvent(reason="a"), RetryEvent(reason="b"),
                            RetryEvent(reason="c"), FAILED) == []  # fmt: skip
        first = story(node="n0")
        first.at(1, nodes("n0", "n1"))
        assert first.ruled(5, FAILED) == ["failed"]

    def test_where_the_first_is_lost_the_next_one_tells_it(self) -> None:
        second = story(node="n1")
        second.at(1, nodes("n0", "n1", "n2"))
        gone = FaultEvent(cause="node-lost", kind="node-lost", on="n0", why="silent")
        assert second.ruled(5, gone) == ["node-suspected"]
        assert second.ruled(6, FAILED) == ["failed"]

    def test_a_spare_that_moves_up_is_told(self) -> None:
        run = story()
        run.at(1, nodes("n0", "n1", "n2", spares=1))
        (notice,) = run.at(5, RestartEvent(cause="died", ranks_lost=[2, 3], world_size=4))
        assert notice.summary == "a node in reserve (n2) has taken the place of ranks 2, 3"
        (notice,) = story_after(nodes("n0", "n1", "n2", spares=1)).at(9, nodes("n0", "n2"))
        assert notice.summary == "n2 was in reserve and trains now"

    def test_a_rank_that_is_lost_or_comes_back_uses_no_spare(self) -> None:
        run = story_after(nodes("n0", "n1", "n2", spares=1))
        assert run.ruled(5, RestartEvent(cause="died", ranks_lost=[3], world_size=3)) == []
        run = story_after(nodes("n0", "n1", "n2", spares=1))
        back = RestartEvent(cause="died", ranks_lost=[3], ranks_returned=[3], world_size=4)
        assert run.ruled(5, back) == []


def story_after(event: Event) -> Story:
    run = story()
    run.at(1, event)
    return run


def test_a_slow_rank_is_told_by_its_own_node_each_rank_for_itself() -> None:
    slow = StragglerEvent(
        rank=3, ratio=1.31, kind="chronic", since_step=9, since=1.0, host="n0",
        hardware=["hardware slowdown"],
    )  # fmt: skip
    run = story()
    (notice,) = run.at(5, slow)
    assert notice.subject == "rank 3"
    assert notice.summary == (
        "rank 3 on n0 takes 1.31 times as long as the median rank (hardware slowdown)"
    )
    other = StragglerEvent(rank=4, ratio=1.2, kind="chronic", since_step=9, since=1.0, host="n0")
    over = StragglerEvent(rank=3, ratio=1.0, kind="over", since_step=9, since=1.0, host="n0")
    assert run.ruled(6, slow, other, over) == ["slow-rank"]
    assert story(node="n1").ruled(5, slow) == []


def test_the_cooldown_is_of_each_thing() -> None:
    run = story(settings=replace(SETTINGS, cooldown=timedelta(0)))
    assert run.ruled(1, FAILED) == ["failed"]
    assert run.ruled(1, FAILED) == ["failed"]
