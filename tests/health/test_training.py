"""Ranks that show no steps are known to train by their collectives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import pytest

from ncclops.health.evidence import WARMUP_PHASE, Reading
from ncclops.health.hang import HangLimits
from ncclops.health.liveness import Elsewhere, Liveness, NodeView
from ncclops.health.training import Training, shows_steps

LIMITS = HangLimits(hang=timedelta(minutes=10), quiet=timedelta(minutes=30))
LOOK_S = 30.0

Count = Callable[[int], int]


def silent(count: int | None, rank: int = 1) -> Reading:
    """A rank that shows no steps, after ``count`` collectives."""
    return Reading(rank=rank, enqueued=count, completed=count, warming_up=True)


def looks_until_it_trains(count: Count, others_since: int | None = None) -> int | None:
    """After which look of 300; another rank shows steps from look ``others_since`` on."""
    training = Training(LIMITS)
    for look in range(300):
        others = others_since is not None and look >= others_since
        if training.saw(silent(count(look)), look * LOOK_S, others_show_steps=others):
            return look
    return None


def test_collectives_that_go_on_for_the_window_of_an_idle_rank_are_training() -> None:
    assert looks_until_it_trains(lambda look: look) == 60
    assert looks_until_it_trains(lambda look: look // 4) in range(60, 65), "slow steps"


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(lambda _look: 7, id="none move"),
        pytest.param(lambda look: look if look < 50 else 50, id="they stop"),
        pytest.param(lambda look: look // 6, id="each comes minutes after the last"),
        pytest.param(lambda look: look // 40 * 40 + min(look % 40, 30), id="with a pause between"),
    ],
)
def test_those_of_a_compile_are_not(count: Count) -> None:
    assert looks_until_it_trains(count) is None


def test_where_another_rank_shows_steps_two_looks_are_enough() -> None:
    assert looks_until_it_trains(lambda look: look, others_since=10) == 11
    assert looks_until_it_trains(lambda look: min(look, 9), others_since=10) is None
    assert looks_until_it_trains(lambda look: look // 6, others_since=10) == 18


def test_a_declared_warm_up_and_a_new_start_hold() -> None:
    training = Training(LIMITS)
    for look in range(100):
        declared = replace(silent(look), phase=WARMUP_PHASE)
        assert not training.saw(declared, look * LOOK_S, others_show_steps=True)
    assert not training.saw(silent(100), 100 * LOOK_S, others_show_steps=True)
    assert not training.saw(silent(101), 101 * LOOK_S, others_show_steps=True)
    assert training.saw(silent(102), 102 * LOOK_S, others_show_steps=True)
    again = replace(silent(103), incarnation="the next")
    assert not training.saw(again, 103 * LOOK_S, others_show_steps=True)


def test_where_collectives_are_not_known_nothing_is_concluded() -> None:
    training = Training(LIMITS)
    for look in range(200):
        assert not training.saw(silent(None), look * LOOK_S, others_show_steps=True)


def test_steps_are_shown_once_they_prove_that_warm_up_is_over() -> None:
    assert shows_steps(Reading(rank=0, steps=2))
    assert not shows_steps(Reading(rank=0, steps=1))
    assert not shows_steps(Reading(rank=0, steps=9, warming_up=True)), "it warms up again"
    assert not shows_steps(Reading(rank=0)), "it has said so, without a step"


@pytest.mark.parametrize("where", ["on its node", "on another node", "nowhere"])
def test_a_rank_without_steps_that_idles_is_found_as_soon_as_others(where: str) -> None:
    limits = replace(LIMITS, compile=timedelta(minutes=90))
    node, other = Liveness(limits), NodeView(ranks=1, shows_steps=where == "on another node")
    for look in range(400):
        count = min(look, 20)
        idle = replace(silent(count), tick=look, main_beat=count, cpu_s=float(count))
        works = Reading(rank=0, steps=look if where == "on its node" else None, cpu_s=20.0 * look)
        findings = node.look([works, idle], look * LOOK_S)
        if node.verdict(findings, Elsewhere.of([other])) is not None:
            break
    minutes = (look - 20) * LOOK_S / 60
    assert minutes == pytest.approx(90 if where == "nowhere" else 30, abs=2)
