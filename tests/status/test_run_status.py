"""What is known of a run, from values to values: events, ranks together, nodes together."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from ncclops.cli._status_table import draw
from ncclops.record.events import (
    ClassifiedEvent,
    Event,
    FaultEvent,
    StepEvent,
    StragglerEvent,
    WorkerStartedEvent,
    decode,
)
from ncclops.record.paths import RunPaths
from ncclops.record.receipt_records import EndRecord, IterationRecord, ReceiptRecord, StepRecord
from ncclops.status.compare import compared, run_phase
from ncclops.status.event_facts import RunFacts
from ncclops.status.merge import load, merge, save
from ncclops.status.model import FaultStatus, LastEvent, RankStatus, RunStatus, from_json
from ncclops.status.ranks import step_times
from tests.control.conftest import event, start_of_run

BEGAN = 1000.0


def typed(line: dict[str, Any]) -> Event:
    """The event that is read from ``line``."""
    event = decode(json.dumps(line))
    assert event is not None
    return event


def facts(*lines: dict[str, Any], world_size: int = 2) -> RunFacts:
    run = RunFacts()
    for line in (*start_of_run(BEGAN, world_size), *lines):
        run.add(typed(line))
    return run


def rank(number: int, **fields: Any) -> RankStatus:
    given: dict[str, Any] = {"rank": number, "host": "n01", "phase": "training"}
    return RankStatus(**given | fields)


def run(*ranks: RankStatus, **fields: Any) -> RunStatus:
    known: dict[str, Any] = {"run_id": "r", "run_dir": "/r", "phase": "training", "as_of": 2000.0}
    return RunStatus(ranks=ranks, **known | fields)


# --- events ---------------------------------------------------------------------------------------


def test_a_start() -> None:
    seen = facts()
    assert (seen.run_id, seen.profile, seen.started, seen.world_size) == (
        "a-run",
        "local-cpu",
        BEGAN,
        2,
    )
    assert seen.ranks[1].started == BEGAN + 1
    assert seen.ranks[1].last == LastEvent(ts=BEGAN + 1, event="worker-started", text="pid 1")


def test_a_restart_in_place_clears_what_was_before() -> None:
    seen = facts(
        event("bootstrapped", 1010, 0),
        event("compile-warmup", 1020, 0, seconds=5.0),
        event("step", 1030, 0, step=7),
        event("straggler", 1031, 1, ratio=1.2, kind="chronic", since=1020.0, since_step=5),
        event("fault", 1040, 1, cause="RuntimeError: no", kind="exception"),
        event("restart", 1041, 0, iteration=1, cause="RuntimeError: no"),
    )
    assert (seen.restarts, seen.iteration, seen.interrupted) == (1, 1, True)
    assert (seen.ranks[0].step, seen.ranks[0].warm, seen.stragglers) == (None, False, {})
    assert seen.last_fault == FaultStatus(
        ts=1040, rank=1, kind="exception", cause="RuntimeError: no"
    )
    seen.add(StepEvent(ts=1050, rank=0, step=3))
    assert (seen.interrupted, seen.ranks[0].step) == (False, 3)


def test_a_failed_attempt_has_its_fault_counted_once_under_its_class() -> None:
    seen = facts(
        event("worker-exited", 1010, 1, exit_code=1, signal=None),
        event("fault", 1011, 1, cause="exit code 1", attempt=0),
        event("classified", 1012, **{"class": "bootstrap"}),
        event("retry", 1013, reason="once, lazily"),
    )
    assert dict(seen.faults) == {"bootstrap": 1}
    assert seen.last_fault is not None
    assert (seen.last_fault.kind, seen.last_fault.cause) == ("bootstrap", "exit code 1")
    assert (seen.between_attempts, seen.retries, seen.ranks[1].ended) == (True, 1, False)
    seen.add(WorkerStartedEvent(ts=1020, rank=1, pid=2, attempt=1))
    assert (seen.between_attempts, seen.attempt) == (False, 1)
    assert (seen.ranks[1].ended, seen.ranks[1].pid, seen.ranks[0].pid) == (None, 2, 1)


def test_faults_in_place_are_counted_by_what_the_restart_core_calls_them() -> None:
    seen = facts(
        event("fault", 1010, 1, cause="killed", kind="death"),
        event("fault", 1020, 0, cause="stuck", kind="timeout"),
        event("fault", 1030, 0, cause="stuck", kind="timeout"),
        event("fault", 1040, None, cause="store-lost", log="store.log"),
    )
    assert dict(seen.faults) == {"death": 1, "timeout": 2, "store-lost": 1}


def test_the_loss_of_the_store_interrupts_no_rank() -> None:
    lost = {"cause": "the job's store is lost", "kind": "store-lost"}
    assert not facts(event("fault", 1010, None, **lost)).interrupted
    assert facts(event("fault", 1010, None, cause="store-lost", kind="exception")).interrupted
    assert not facts(event("fault", 1010, None, cause="store-lost")).interrupted


def test_the_end_of_a_grace_time_is_no_stop() -> None:
    assert not facts(event("stop-requested", 1010, signal="SIGKILL", ranks=[0])).stopping
    assert facts(event("stop-requested", 1010, signal="SIGTERM")).stopping
    assert facts(event("stop-requested", 1010, reason="ncclops stop")).stopping


NAMES = """run-started env-applied worker-started bootstrapped compile-warmup step straggler fault
classified retry restart stop-requested worker-exited verdict resource-growth"""
anything = st.none() | st.integers(-2, 9) | st.floats() | st.text(max_size=4)
OTHERS = ("rank", "node", "attempt", "step", "cause", "iteration", "class", "world_size", "kind")
lines = st.fixed_dictionaries(
    {"event": st.sampled_from(NAMES.split()) | anything, "ts": st.floats(0, 9e9) | anything},
    optional=dict.fromkeys(OTHERS, anything),
)


@given(st.lists(lines, max_size=15))
def test_nothing_in_a_line_is_a_fault(lines: list[dict[str, Any]]) -> None:
    seen = RunFacts()
    for found in filter(None, map(decode, map(json.dumps, lines))):
        seen.add(found)


# --- ranks together -------------------------------------------------------------------------------


def test_step_times_are_held_against_the_lower_median() -> None:
    seen = compared(run(rank(0, step_s=1.0, step=9), rank(1, step_s=1.5, step=8)))
    assert (seen.median_step_s, seen.step) == (1.0, 8)
    assert [each.step_ratio for each in seen.ranks] == [1.0, 1.5]


def test_a_rank_that_the_others_wait_for_is_a_straggler_until_it_is_over() -> None:
    """Its steps are as long as theirs."""
    slow = {"ratio": 1.4, "since": 1020.0, "since_step": 5, "measured": "waiting"}
    chronic = event("straggler", 1031, 1, kind="chronic", **slow)
    over = event("straggler", 1041, 1, kind="over", **slow)
    ranks = [rank(number, own_step_s=1.0) for number in range(2)]
    (found,) = compared(run(*ranks), facts(chronic).stragglers).stragglers
    assert (found.rank, found.ratio, found.kind) == (1, 1.4, "chronic")
    assert compared(run(*ranks), facts(chronic, over).stragglers).stragglers == ()


def test_a_straggler_is_found_by_its_own_time() -> None:
    ranks = [rank(n, step_s=2.0, own_step_s=1.0 if n != 3 else 1.5) for n in range(5)]
    slow = StragglerEvent(rank=3, ratio=1.5, kind="chronic", since_step=40, since=0.0)
    known = {3: slow, 1: StragglerEvent(rank=1, ratio=1.3, kind="one-off", since_step=2, since=0.0)}
    (found,) = compared(run(*ranks), known).stragglers
    assert (found.rank, found.ratio, found.kind, found.since_step) == (3, 1.5, "chronic", 40)


def test_ranks_that_have_ended_are_not_compared() -> None:
    ended = rank(1, phase="failed", step=2, step_s=9.0, own_step_s=9.0)
    seen = compared(run(rank(0, step=5, step_s=1.0, own_step_s=1.0), ended))
    assert (seen.step, seen.median_step_s, seen.stragglers) == (5, 1.0, ())


@pytest.mark.parametrize(
    ("phases", "phase"),
    [
        ((), "starting"),
        (("starting", "training"), "starting"),
        (("warming-up", "training"), "warming-up"),
        (("training", "running"), "training"),
        (("running", "running"), "running"),
        (("checkpoint", "checkpoint"), "training"),
        (("failed", "training"), "training"),
        (("failed", "starting"), "starting"),
    ],
)
def test_a_job_is_as_far_as_its_last_rank(phases: Sequence[str], phase: str) -> None:
    assert run_phase([rank(n, phase=each) for n, each in enumerate(phases)]) == phase


@pytest.mark.parametrize(("step", "phase"), [(7, "training"), (None, "running")])
def test_a_job_whose_ranks_have_all_ended_is_as_it_was(step: int | None, phase: str) -> None:
    assert run_phase([rank(n, phase="ended", step=step) for n in range(2)]) == phase


def step(seconds: float, **more: Any) -> ReceiptRecord:
    return StepRecord(ts=0.0, step=0, seconds=seconds, **more)


def test_step_times_leave_out_what_says_nothing_of_the_pace() -> None:
    records = [step(99.0), IterationRecord(ts=0.0), step(50.0, first=True)]
    records += [step(1.0)] * 3 + [step(60.0, phase_s=59.0), step(1.2), EndRecord(ts=0.0)]
    assert step_times(records).step_s == 1.0
    assert step_times(records).own_step_s is None  # too few to compare ranks by
    assert step_times([]).step_s is None


def test_a_rank_s_own_time_is_without_the_waiting() -> None:
    records = [step(2.0, busy_s=1.5)] * 20
    times = step_times(records)
    assert (times.step_s, times.own_step_s) == (2.0, 1.5)
    assert step_times([*records, step(2.0)]).own_step_s == 2.0  # not all of them say


# --- nodes together -------------------------------------------------------------------------------


def test_one_node_alone_is_what_it_is() -> None:
    alone = run(rank(0))
    assert merge([alone]) is alone


def test_nodes_are_put_together() -> None:
    first = run(
        rank(0, step=5, step_s=1.0, own_step_s=1.0, step_age_s=1.0),
        nodes=("n01",),
        faults={"death": 1},
        restarts=2,
        goodput={"ratio": 0.9},
    )
    second = run(
        rank(1, host="n02", step=4, step_s=1.3, own_step_s=1.3, step_age_s=1.0),
        run_dir="/elsewhere",
        nodes=("n02",),
        as_of=1997.0,
        faults={"death": 1, "timeout": 1},
        restarts=3,
        last_fault=FaultStatus(ts=5.0, rank=1, kind="death", cause="killed"),
    )
    seen = merge([first, second])
    assert (seen.run_dir, seen.goodput, seen.nodes) == ("/r", {"ratio": 0.9}, ("n01", "n02"))
    assert (seen.restarts, seen.faults) == (3, {"death": 2, "timeout": 1})
    assert seen.last_fault == second.last_fault
    assert (seen.step, seen.median_step_s) == (4, 1.0)
    assert [(each.rank, each.step_age_s) for each in seen.ranks] == [(0, 1.0), (1, 4.0)]
    assert [each.rank for each in seen.stragglers] == [1]
    assert seen.notes == ()


def test_of_a_rank_that_has_moved_the_newest_holds() -> None:
    old = run(rank(1, host="n02", phase="failed"), as_of=1990.0, nodes=("n02",))
    new = run(rank(1, host="n05"), as_of=1999.0, nodes=("n05",))
    for order in ([old, new], [new, old]):
        seen = merge([run(rank(0)), *order])
        assert [each.host for each in seen.ranks] == ["n01", "n05"]


def test_what_every_node_sees_counts_once() -> None:
    both = [run(rank(0), faults={"node-lost": 1}), run(rank(1), faults={"node-lost": 1})]
    assert merge(both).faults == {"node-lost": 1}


def test_ranks_of_other_nodes_end_with_the_run() -> None:
    others = run(rank(1, phase="training"), rank(2, phase="failed"))
    seen = merge([run(rank(0, phase="failed"), phase="ended"), others])
    assert [each.phase for each in seen.ranks] == ["failed", "ended", "failed"]


def test_a_rank_with_a_new_process_has_not_failed() -> None:
    """The restart is recorded after that process was started."""
    seen = facts(
        event("worker-exited", 1010, 1, exit_code=None, signal="SIGKILL"),
        event("worker-started", 1011, 1, pid=9),
        event("fault", 1012, 1, cause="rank 1: the process died", kind="died"),
        event("restart", 1013, 0, iteration=1, ranks_lost=[1, 2], ranks_returned=[1]),
    )
    assert seen.ranks[1].ended is None
    assert seen.last_fault is not None
    assert seen.last_fault.cause == "the process died", "the rank is told beside it"


def test_what_happens_on_another_node_is_shown_but_neither_counted_nor_a_rank_of_ours() -> None:
    facts = RunFacts(run_id="r")
    facts.add(WorkerStartedEvent(ts=1.0, rank=0, node="n01", pid=5))
    facts.add(FaultEvent(ts=2.0, rank=3, node="n01", cause="x", on="n02"))
    facts.add(ClassifiedEvent(ts=3.0, rank=0, node="n01", class_="peer-exit"))
    assert (list(facts.ranks), facts.faults) == ([0], {})
    assert facts.last_fault is not None
    assert (facts.last_fault.rank, facts.interrupted) == (3, True)
    facts.add(FaultEvent(ts=4.0, node="n01", cause="node-lost", on="n02"))
    assert facts.faults == {"node-lost": 1}


def test_a_node_that_is_silent_is_named() -> None:
    silent = run(rank(1, host="n02"), nodes=("n02",), as_of=1800.0)
    assert merge([run(rank(0)), silent]).notes == ("n02: last status 200 s ago",)
    assert merge([run(rank(0), phase="ended"), silent]).notes == ()


@pytest.mark.parametrize(
    ("first", "second", "together"),
    [
        ("training", "restarting", "restarting"),
        ("stopping", "training", "stopping"),
        ("ended", "training", "ended"),
        ("training", "training", "warming-up"),
        ("training", "lost", "warming-up"),
    ],
)
def test_what_is_amiss_anywhere_is_the_run_s_phase(first: Any, second: Any, together: str) -> None:
    statuses = [run(rank(0), phase=first), run(rank(1, phase="warming-up"), phase=second)]
    assert merge(statuses).phase == together


# --- the document ---------------------------------------------------------------------------------


def test_a_status_comes_back_from_its_document() -> None:
    import json

    whole = compared(
        run(
            rank(0, step_s=1.0, own_step_s=1.0, last_event=LastEvent(ts=1.0, event="step")),
            rank(1, step_s=2.0, own_step_s=2.0),
            nodes=("n01",),
            notes=("a note",),
            faults={"death": 1},
            last_fault=FaultStatus(ts=5.0, rank=None, kind="death", cause="killed"),
            goodput={"ratio": 0.5},
        )
    )
    document = json.loads(json.dumps(whole.to_json()))
    assert from_json(document) == whole
    later = document | {"new": 1, "ranks": [each | {"new": 1} for each in document["ranks"]]}
    assert from_json(later) == whole
    assert from_json(replace(whole, ranks=()).to_json()).ranks == ()


@pytest.mark.parametrize(
    "document", [{}, {"schema": "ncclops.status/2"}, {"schema": "ncclops.status/1"}, {"schema": 1}]
)
def test_what_is_no_status_is_refused(document: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no"):
        from_json(document)


@pytest.mark.parametrize("name", [each.name for each in fields(RunStatus)])
@pytest.mark.parametrize("wrong", [True, "7", 10**400, [None], {"a": []}], ids=repr)
def test_a_field_of_another_type_is_refused_or_means_what_it_says(name: str, wrong: Any) -> None:
    """What another version sends is never a fault of the one that reads it."""
    document = run(rank(0)).to_json()
    try:
        assert from_json(document | {name: wrong}).to_json()[name] == wrong
    except ValueError as error:
        assert "no status: " in str(error)


def test_of_the_status_of_other_nodes_what_can_be_read_is_read(tmp_path: Path) -> None:
    others = [run(rank(number)) for number in (0, 1)]
    save(tmp_path, others)
    assert load(tmp_path) == others
    path = RunPaths(tmp_path).nodes_status
    path.write_text(json.dumps([1, {"schema": "ncclops.status/2"}, others[1].to_json()]))
    assert load(tmp_path) == others[1:]
    path.write_text("[" * 100_000)
    assert load(tmp_path) == []


# --- for people -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ages", "said"),
    [
        ((2.0, 3.0), None),
        ((40.0, 41.0), "no step for 40s: `ncclops stacks` shows where each is"),
        ((2.0, 41.0), "no step on rank 1 for 41s: `ncclops stacks` shows where each is"),
        ((40.0, None), "no step for 40s: `ncclops stacks` shows where each is"),
    ],
)
def test_ranks_that_make_no_step_are_named(
    ages: tuple[float | None, ...], said: str | None
) -> None:
    ranks = [rank(number, step_age_s=age) for number, age in enumerate(ages)]
    assert said_of(run(*ranks, median_step_s=1.0)) == said


def test_slow_steps_and_what_a_script_has_declared_are_not_missed() -> None:
    assert said_of(run(rank(0, step_age_s=40.0), median_step_s=5.0)) is None
    assert said_of(run(rank(0, step_age_s=400.0, phase="checkpoint"), median_step_s=1.0)) is None


def said_of(status: RunStatus) -> str | None:
    """The line about steps that do not come."""
    out = io.StringIO()
    Console(file=out, width=120).print(draw(status))
    return next((line for line in out.getvalue().splitlines() if line.startswith("no step")), None)
