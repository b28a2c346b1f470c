"""Nobody is called hung on one kind of evidence, and unknown is not dead."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ncclops.health.evidence import WARMUP_PHASE, Kind, Reading, Sample, Tracker
from ncclops.health.hang import HangFinding, HangLimits, HangVerdict, assess, judge
from tests.conftest import LIMIT_S, REPOSITORY, clean_environ
from tests.scripts_of_repository import load_script

LIMITS = HangLimits()
FRESH, STALE, VERY_STALE = timedelta(seconds=5), timedelta(minutes=11), timedelta(minutes=31)
SIMULATION = REPOSITORY / "scripts" / "simulate_hangs.py"


def ages(default: timedelta, **changes: timedelta | None) -> dict[Kind, timedelta]:
    """Every receipt's age; by name another one, or None for one that cannot be read."""
    values: dict[Kind, timedelta] = {kind: default for kind in Kind if kind is not Kind.PHASE}
    values |= {Kind[name.upper()]: age for name, age in changes.items() if age is not None}
    unknown = {Kind[name.upper()] for name, age in changes.items() if age is None}
    return {kind: age for kind, age in values.items() if kind not in unknown}


def sample(rank: int = 0, **fields: Any) -> Sample:
    return Sample(**{"rank": rank, "alive": True, "ages": ages(FRESH), **fields})


def inside(rank: int = 0, *, collectives: int = 7) -> Sample:
    """A rank that waits in a collective, its CPU and GPU spinning."""
    stuck = ages(STALE, cpu=FRESH, gpu=FRESH, interpreter=FRESH)
    return sample(rank, ages=stuck, in_collective=True, collectives=collectives)


def verdict(*samples: Sample, world_size: int | None = None) -> HangVerdict:
    findings = [assess(sample, LIMITS) for sample in samples]
    return judge(findings, world_size=world_size or len(samples))


def test_one_stale_receipt_is_never_enough() -> None:
    only_step = sample(ages={Kind.STEP: timedelta(days=1)})
    assert assess(only_step, LIMITS).state == "unclear"
    assert not verdict(only_step).hung


def test_nothing_known_is_not_dead() -> None:
    finding = assess(Sample(rank=0), LIMITS)
    assert finding.state == "unclear"
    assert not verdict(Sample(rank=0), Sample(rank=1)).hung


def test_the_same_operation_on_all_ranks_is_a_hang_although_all_spin() -> None:
    result = verdict(inside(0), inside(1, collectives=6), inside(2))
    assert result.hung
    assert result.culprits == (1,), "the one that has come least far"
    assert "step counter, main thread and collective counters stale for more than 10m" in (
        result.reason
    )


@pytest.mark.parametrize(
    ("awaited", "culprits"),
    [
        ((1, 2, 1), (1, 2)),  # a circle, and one that waits for it
        ((1, None, 1), (1,)),
        ((None, 0, 1), (0,)),
        ((None, None, None), (0, 2)),
        ((1, 3, 1), (0, 2)),  # no rank of the job
    ],
)
def test_of_ranks_that_wait_in_messages_those_are_named_that_are_waited_for(
    awaited: tuple[int | None, ...], culprits: tuple[int, ...]
) -> None:
    """The number of operations that each has enqueued says nothing there."""
    counts = (6, 8, 6)
    samples = [
        replace(inside(rank, collectives=counts[rank]), awaited=awaited[rank]) for rank in range(3)
    ]
    result = verdict(*samples)
    assert (result.hung, result.culprits) == (True, culprits)
    if culprits == (1, 2):
        assert result.reason.startswith("all ranks wait, and messages wait for ranks 1, 2: ")


def test_whom_messages_wait_for_is_not_told_where_ranks_have_other_numbers() -> None:
    """One has been lost: the others count from 0 without it."""
    samples = [replace(inside(rank, collectives=rank), awaited=1) for rank in (0, 2, 3)]
    assert verdict(*samples).culprits == (0,)


def test_ranks_that_wait_for_one_at_work_are_not_hung() -> None:
    """An undeclared checkpoint: rank 0 is outside any collective and uses its CPU."""
    busy = sample(0, ages=ages(VERY_STALE, cpu=FRESH, interpreter=FRESH), in_collective=False)
    result = verdict(busy, inside(1), inside(2))
    assert not result.hung
    assert [finding.state for finding in result.findings] == ["working", "waiting", "waiting"]
    assert result.reason.startswith("ranks 1, 2 waiting; rank 0: CPU time within 30m")


def test_a_rank_on_which_the_script_has_ended_before_a_collective_is_to_blame() -> None:
    waiting = [assess(inside(rank, collectives=7), LIMITS) for rank in (0, 2)]
    early = HangFinding(rank=1, state="ended", collectives=6)
    found = judge([*waiting, early], world_size=2)
    assert (found.hung, found.culprits) == (True, (1,))
    assert found.reason == (
        "all others wait in a collective that rank 1 did not come to: the script has ended there"
    )


@pytest.mark.parametrize("collectives", [7, None])
def test_a_rank_that_came_to_the_collective_or_may_have_is_not_to_blame(
    collectives: int | None,
) -> None:
    waiting = [assess(inside(rank, collectives=7), LIMITS) for rank in (0, 2)]
    done = HangFinding(rank=1, state="ended", collectives=collectives)
    assert judge([*waiting, done], world_size=2).culprits == (0, 2)


def test_nobody_has_ended_too_early_while_a_rank_works() -> None:
    early = HangFinding(rank=1, state="ended", collectives=6)
    findings = [assess(inside(0), LIMITS), early, assess(sample(2), LIMITS)]
    assert not judge(findings, world_size=2).hung


def test_ranks_that_wait_for_a_rank_out_of_sight_are_not_hung() -> None:
    result = verdict(inside(0), inside(1), world_size=3)
    assert not result.hung
    assert "cannot be seen" in result.reason


def test_a_rank_that_keeps_the_gil_hangs_even_while_it_burns_cpu() -> None:
    holds = sample(0, ages=ages(STALE, cpu=FRESH), in_collective=False)
    result = verdict(holds, inside(1))
    assert result.hung
    assert result.culprits == (0,)


def test_an_idle_rank_whose_interpreter_runs_has_the_long_window() -> None:
    stalled = sample(0, ages=ages(STALE, interpreter=FRESH), in_collective=False)
    assert not verdict(stalled, inside(1)).hung
    for_good = sample(0, ages=ages(VERY_STALE, interpreter=FRESH), in_collective=False)
    assert verdict(for_good, inside(1)).culprits == (0,)


def test_outside_a_collective_counters_that_move_with_steps_are_one_kind() -> None:
    """A recompile whose CPU time cannot be read leaves step, collectives and GPU still."""
    running = ages(VERY_STALE, cpu=None, interpreter=FRESH, main_thread=FRESH)
    compiles = sample(0, ages=running, in_collective=False)
    assert assess(compiles, LIMITS).state == "unclear"
    assert not verdict(compiles, inside(1)).hung


def test_an_idle_service_is_not_taken_for_a_hung_training() -> None:
    """As far as it is not known what its main thread does: nothing restarts in place."""
    silent = ages(VERY_STALE, step=None, interpreter=FRESH, main_thread=None)
    idle = sample(ages=silent, in_collective=False)
    assert assess(idle, LIMITS).state == "unclear"
    assert not verdict(idle).hung


def test_a_dead_process_needs_no_second_evidence() -> None:
    result = verdict(sample(0), sample(1, alive=False))
    assert result.hung
    assert (result.culprits, result.reason) == ((1,), "rank 1 has ended")


def test_compile_and_declared_phases_have_windows_of_their_own() -> None:
    silent = ages(timedelta(minutes=40))
    assert verdict(sample(ages=silent, in_collective=False)).hung
    assert not verdict(sample(ages=silent, in_collective=False, warming_up=True)).hung
    phase: dict[str, Any] = {
        "phase": "checkpoint",
        "phase_limit": timedelta(hours=1),
        "ages": silent,
    }
    result = verdict(sample(**phase, phase_age=timedelta(minutes=40)), inside(1))
    assert not result.hung
    assert "rank 0: in checkpoint, declared for up to 1h" in result.reason


def test_a_short_limit_is_not_for_an_idle_rank_whose_main_thread_runs() -> None:
    """An evaluation that was not declared, which waits for something again and again."""
    limits = LIMITS.at_most(timedelta(minutes=1))
    idle = ages(STALE, interpreter=FRESH, main_thread=FRESH)
    assert assess(sample(ages=idle, in_collective=False), limits).state == "working"
    blocked = ages(STALE, interpreter=FRESH)
    assert assess(sample(ages=blocked, in_collective=False), limits).state == "stuck"


def test_until_warm_up_is_over_the_window_is_that_of_a_compile() -> None:
    silent = ages(timedelta(minutes=80), step=None, interpreter=FRESH)
    ranks = [sample(n, ages=silent, warming_up=True, in_collective=False) for n in range(2)]
    waits = sample(2, ages=silent, warming_up=True, in_collective=None)
    assert not verdict(*ranks, waits).hung, "it may be compiling in other processes"
    for_good = ages(timedelta(minutes=91), interpreter=FRESH)
    hangs = sample(1, ages=for_good, warming_up=True, in_collective=False)
    assert verdict(ranks[0], hangs, waits).culprits == (1,)


def test_nobody_compiles_where_all_wait_in_a_collective() -> None:
    def waits(rank: int) -> Sample:
        silent = ages(VERY_STALE, step=None, cpu=FRESH, gpu=FRESH)
        return sample(rank, ages=silent, warming_up=True, in_collective=True, collectives=1)

    assert verdict(waits(0), waits(1)).hung
    compiles = sample(1, ages=ages(VERY_STALE), warming_up=True, in_collective=False)
    assert not verdict(waits(0), compiles).hung


def test_a_rank_that_waits_outside_collectives_may_wait_for_one_in_a_declared_phase() -> None:
    saves = sample(
        0,
        phase="checkpoint",
        phase_age=timedelta(minutes=40),
        phase_limit=timedelta(hours=1),
        ages=ages(VERY_STALE),
    )
    polls = sample(1, ages=ages(VERY_STALE, interpreter=FRESH), in_collective=False)
    assert not verdict(saves, polls).hung
    frozen = sample(1, ages=ages(VERY_STALE), in_collective=False)
    assert verdict(saves, frozen).culprits == (1,), "it waits for nobody"


def test_ranks_may_wait_for_one_that_has_declared_its_compile() -> None:
    compiles = sample(
        0,
        ages=ages(VERY_STALE),
        warming_up=True,
        phase=WARMUP_PHASE,
        phase_age=timedelta(minutes=80),
    )
    polls = sample(1, ages=ages(VERY_STALE, interpreter=FRESH), in_collective=False)
    assert not verdict(compiles, polls).hung
    late = replace(compiles, ages=ages(timedelta(minutes=95)), phase_age=timedelta(minutes=95))
    assert verdict(replace(late, in_collective=False), inside(1)).culprits == (0,)


def test_a_phase_that_outlasts_its_limit_is_evidence() -> None:
    late = sample(
        ages=ages(STALE, interpreter=STALE),
        in_collective=False,
        phase="checkpoint",
        phase_age=timedelta(minutes=20),
        phase_limit=timedelta(minutes=12),
    )
    finding = assess(late, LIMITS)
    assert finding.state == "stuck"
    assert Kind.PHASE in finding.stale


def test_slow_steps_are_given_their_time() -> None:
    slow = sample(ages=ages(STALE), in_collective=True, step_time=timedelta(minutes=2))
    assert assess(slow, LIMITS).state == "working"


@given(
    known=st.dictionaries(
        st.sampled_from([kind for kind in Kind if kind is not Kind.PHASE]),
        st.timedeltas(timedelta(0), timedelta(days=2)),
        max_size=1,
    ),
    in_collective=st.sampled_from([True, False, None]),
    warming_up=st.booleans(),
)
def test_with_one_receipt_or_none_it_is_never_hung(
    known: dict[Kind, timedelta], in_collective: bool | None, warming_up: bool
) -> None:
    alone = Sample(rank=0, ages=known, in_collective=in_collective, warming_up=warming_up)
    assert not verdict(alone).hung


# ---- ages --------------------------------------------------------------------------------------


def test_ages_grow_while_nothing_moves() -> None:
    tracker = Tracker()
    tracker.add(Reading(rank=0, steps=5, tick=1, cpu_s=10.0), 0.0)
    later = tracker.add(Reading(rank=0, steps=5, tick=2, cpu_s=10.1), 30.0)
    assert later.ages == {
        Kind.STEP: timedelta(seconds=30),
        Kind.INTERPRETER: timedelta(0),
        Kind.CPU: timedelta(seconds=30),  # 0.1 s in 30 s is idling
    }


def test_a_look_that_failed_neither_ages_nor_refreshes() -> None:
    tracker = Tracker()
    tracker.add(Reading(rank=0, cpu_s=10.0), 0.0)
    assert tracker.add(Reading(rank=0), 100.0).ages == {}
    assert tracker.add(Reading(rank=0, cpu_s=10.0), 200.0).ages[Kind.CPU] == timedelta(seconds=200)
    assert tracker.add(Reading(rank=0, cpu_s=90.0), 300.0).ages[Kind.CPU] == timedelta(0)


def test_a_tick_of_the_clock_between_two_quick_looks_is_no_work() -> None:
    tracker = Tracker()
    for look in range(60):  # every 0.1 s, and every two seconds 10 ms of CPU, as the kernel counts
        sample = tracker.add(Reading(rank=0, cpu_s=0.01 * (look // 20)), look / 10)
    assert sample.ages[Kind.CPU] == timedelta(seconds=5.9)
    for look in range(60, 75):  # and now 10 % of a core
        sample = tracker.add(Reading(rank=0, cpu_s=look / 100), look / 10)
    assert sample.ages[Kind.CPU] < timedelta(seconds=1.5)


def test_a_new_iteration_starts_with_fresh_receipts() -> None:
    tracker = Tracker()
    tracker.add(Reading(rank=0, incarnation=(1, 0), steps=5), 0.0)
    assert tracker.add(Reading(rank=0, incarnation=(1, 1), steps=0), 900.0).ages == {
        Kind.STEP: timedelta(0)
    }


def test_step_time_is_the_usual_one() -> None:
    tracker = Tracker()
    for look in range(6):
        known = tracker.add(Reading(rank=0, steps=3 * look), 60.0 * look)
    assert known.step_time == timedelta(seconds=20)


def test_inside_a_collective_means_more_enqueued_than_completed() -> None:
    assert Tracker().add(Reading(rank=0, enqueued=4, completed=3), 0.0).in_collective is True
    assert Tracker().add(Reading(rank=0, enqueued=4, completed=4), 0.0).in_collective is False
    assert Tracker().add(Reading(rank=0, enqueued=4), 0.0).in_collective is None


# ---- the simulation ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def simulation() -> ModuleType:
    return load_script("simulate_hangs")


@pytest.mark.slow
def test_no_false_kill_and_no_missed_hang_in_a_hundred_histories(simulation: ModuleType) -> None:
    scores = simulation.simulate(100, seed=0)
    ours = scores[simulation.OURS]
    assert ours.false_kills == []
    assert ours.missed == []
    assert sum(map(len, ours.delays_s.values())) == ours.hanging > 40, "the histories do hang"
    # That they are hard enough shows in what one timer makes of them.
    assert len(scores["one timer, 10 minutes"].false_kills) > 40
    assert len(scores["one timer, 120 minutes"].missed) > 40


def test_every_kind_of_history_is_among_them(simulation: ModuleType) -> None:
    histories = [simulation.write_history(seed) for seed in range(1000)]
    assert {history.fault for history in histories} == {None, *simulation.DUE_S}
    assert {history.name for history in histories} == {name for name, _ in simulation.HARMLESS}
    assert simulation.write_history(7) == simulation.write_history(7)


@pytest.mark.slow
def test_the_script_prints_a_table(tmp_path: Path) -> None:
    for arguments in ([], ["--json"]):
        done = subprocess.run(
            [sys.executable, SIMULATION, "--histories", "5", *arguments],
            env=clean_environ(),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ours, everything that acts"]["false_kills"] == 0
