"""A run directory read into a status: pages, receipts, logs and processes as they are."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace as replaced
from prometheus_client.parser import text_string_to_metric_families

from ncclops.host import process_identity
from ncclops.record import progress, shared_page
from ncclops.record.paths import RunPaths
from ncclops.record.progress import ProgressPage, Warmup
from ncclops.record.run_record import RUN, Launcher, RunRecord
from ncclops.record.verdict_record import VERDICT, VerdictRecord
from ncclops.status import merge
from ncclops.status.metrics import render
from ncclops.status.model import RankStatus, RunStatus
from ncclops.status.reading import RunReader, read_once
from tests.control.conftest import event, start_of_run, write_events


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """A run of two ranks, begun ten seconds ago; this process stands for its workers."""
    path, began, launcher = tmp_path / "a-run", time.time() - 10, process_identity.current()
    write_events(path, start_of_run(began))
    for rank in (0, 1):
        (path / "ranks" / str(rank)).mkdir(parents=True)
        started = event(
            *("worker-started", began + 1, rank),
            pid=os.getpid(),
            attempt=0,
            started_ticks=launcher.started_ticks,
        )
        write_events(path, [started, event("bootstrapped", began + 2, rank)])
    yield path
    shared_page.settle_all(path)


def page_of(run: Path, rank: int, **numbers: int) -> ProgressPage:
    """A progress page as a worker of this moment has it."""
    page, now = ProgressPage.create(RunPaths(run).rank(rank).progress), time.monotonic_ns()
    for name, value in {"STARTED_NS": now, "TICK_NS": now, "PID": os.getpid(), **numbers}.items():
        page.numbers[getattr(progress, name)] = value
    return page


def at_step(run: Path, rank: int, step: int, age_s: float = 0.0) -> ProgressPage:
    then = time.monotonic_ns() - int(age_s * 1e9)
    page = page_of(run, rank, STEP=step + 1, STEPS=step + 1, STEP_NS=then)
    page.numbers[progress.WARMUP] = Warmup.OVER
    return page


def receipts(run: Path, rank: int, seconds: list[float], **more: Any) -> None:
    with (run / "ranks" / str(rank) / "receipt.jsonl").open("a") as file:
        file.write(json.dumps({"ts": 0, "kind": "start", "iteration": 0}) + "\n")
        for number, each in enumerate(seconds):
            record = {"ts": 0, "kind": "step", "iteration": 0, "step": number, "seconds": each}
            file.write(json.dumps(record | more) + "\n")


def rank_of(status: RunStatus, rank: int) -> RankStatus:
    return next(each for each in status.ranks if each.rank == rank)


def phases(run: Path) -> list[str]:
    status = read_once(run)
    return [status.phase, *(rank.phase for rank in status.ranks)]


def test_of_a_process_that_has_its_number_by_now_nothing_is_shown(run: Path) -> None:
    assert rank_of(read_once(run), 0).memory_gib is not None
    own = vars(process_identity.current())
    RUN.write(RunPaths(run).run, RunRecord(launcher=Launcher(**own | {"boot_id": "before"})))
    assert rank_of(read_once(run), 0).memory_gib is None, "the machine has started again"
    RUN.write(RunPaths(run).run, RunRecord(launcher=Launcher(**own)))
    again = event("worker-started", time.time(), 0, pid=os.getpid(), attempt=0, started_ticks=1)
    write_events(run, [again])
    assert rank_of(read_once(run), 1).memory_gib is not None
    assert rank_of(read_once(run), 0).memory_gib is None, "another process has the number"


def test_a_rank_is_read_from_its_page_its_receipts_and_its_process(run: Path) -> None:
    at_step(run, 0, 41, age_s=3.0)
    receipts(run, 0, [9.0] + [0.5] * 20)
    rank = rank_of(read_once(run), 0)
    assert (rank.phase, rank.step, rank.step_s, rank.own_step_s) == ("training", 41, 0.5, 0.5)
    assert rank.pid == os.getpid()
    assert rank.step_age_s is not None
    assert rank.step_age_s >= 3.0
    assert rank.heartbeat_age_s is not None
    assert rank.memory_gib is not None
    assert 0 < rank.memory_gib < 1000
    assert rank.last_event is not None
    assert rank.last_event.event == "bootstrapped"


def test_phases_of_a_start(run: Path) -> None:
    assert phases(run) == [
        "running",
        "running",
        "running",
    ]  # no page: a script that reports nothing
    pages_held = [page_of(run, 0), page_of(run, 1)]
    assert phases(run) == ["warming-up", "warming-up", "warming-up"]
    for page in pages_held:
        page.numbers[progress.STEPS] = 1
    assert phases(run) == ["training", "training", "training"]
    pages_held[1].numbers[progress.WARMUP] = Warmup.RUNNING  # it warms up again
    assert phases(run) == ["warming-up", "training", "warming-up"]
    pages_held[1].numbers[progress.WARMUP] = Warmup.OVER
    pages_held[0].set_phase("checkpoint", time.monotonic_ns(), 10**12)
    assert phases(run) == ["training", "checkpoint", "training"]


def test_a_worker_that_has_exited_is_no_longer_measured(run: Path) -> None:
    at_step(run, 1, 7)
    write_events(run, [event("worker-exited", time.time(), 1, exit_code=None, signal="SIGKILL")])
    rank = rank_of(read_once(run), 1)
    assert (rank.phase, rank.step) == ("failed", 7)
    assert (rank.step_age_s, rank.heartbeat_age_s, rank.memory_gib) == (None, None, None)


def test_a_page_of_an_earlier_attempt_is_ignored(run: Path) -> None:
    at_step(run, 0, 41)
    write_events(run, [event("worker-started", time.time() + 60, 0, pid=os.getpid(), attempt=1)])
    rank = rank_of(read_once(run), 0)
    assert (rank.phase, rank.step) == ("starting", None)


def test_without_receipts_the_printed_step_is_shown(run: Path) -> None:
    log = run / "ranks" / "0" / "stdout.log"
    log.write_text("step 00003 loss 3.1 tok/s 100\nsomething else\nstep 00025 loss 2.9 tok/s 101\n")
    status = read_once(run)
    assert (rank_of(status, 0).step, rank_of(status, 0).phase) == (25, "training")
    assert rank_of(status, 0).step_age_s is not None
    assert (rank_of(status, 1).step, rank_of(status, 1).phase) == (None, "running")
    assert (status.step, status.phase) == (25, "training")


def test_without_receipts_step_times_are_the_mean_since_a_step_was_reported(run: Path) -> None:
    log = run / "ranks" / "0" / "stdout.log"
    log.write_text("step 00003 loss 3.1 tok/s 100\nstep 00025 loss 2.9 tok/s 101\n")
    os.utime(log, (2000.0, 2000.0))
    assert rank_of(read_once(run), 0).step_s is None
    write_events(run, [event("step", 1989.0, 0, step=3)])
    assert rank_of(read_once(run), 0).step_s == 0.5
    write_events(run, [event("step", 1999.0, 0, step=23, step_s=0.4)])
    assert rank_of(read_once(run), 0).step_s == 0.4


def test_step_times_that_a_trainer_prints_are_shown(run: Path) -> None:
    line = " iteration {}/ 99 | elapsed time per iteration (ms): {} | lm loss: 9.1"
    lines = [line.format(n, 1000.0 if n < 20 else 250.0) for n in range(1, 30)]
    (run / "ranks" / "0" / "stdout.log").write_text("\n".join(lines) + "\n")
    assert (rank_of(read_once(run), 0).step, rank_of(read_once(run), 0).step_s) == (29, 0.25)


def test_a_run_that_restarts_is_restarting_until_a_step(run: Path) -> None:
    held = [at_step(run, rank, 41) for rank in (0, 1)]
    write_events(
        run,
        [
            event("fault", time.time(), 1, cause="RuntimeError: no", kind="exception"),
            event("restart", time.time(), 0, iteration=1, cause="RuntimeError: no"),
        ],
    )
    status = read_once(run)
    assert (status.phase, status.restarts, status.iteration) == ("restarting", 1, 1)
    assert status.last_fault is not None
    for page in held:
        page.numbers[progress.ITERATION] = 1
    assert read_once(run).phase == "training"


def test_a_fault_that_ends_the_run_is_no_restart(run: Path) -> None:
    said = {"iteration": 1, "cause": "KeyError: 'lr'", "instead": "stop"}
    write_events(run, [event("restart", time.time(), 0, **said)])
    assert read_once(run).restarts == 0


def test_stragglers_are_those_of_now(run: Path) -> None:
    for rank, seconds in ((0, 1.0), (1, 1.2)):
        at_step(run, rank, 30)
        receipts(run, rank, [seconds] * 30)
    fields = {"ratio": 1.3, "kind": "chronic", "since": time.time(), "since_step": 4}
    write_events(run, [event("straggler", time.time(), 1, **fields)])
    (straggler,) = read_once(run).stragglers
    assert (straggler.rank, straggler.ratio, straggler.kind) == (1, 1.2, "chronic")
    receipts(run, 1, [1.0] * 60)
    assert read_once(run).stragglers == ()


def test_the_verdict_ends_it(run: Path) -> None:
    with (run / "events.jsonl").open() as file:
        ended = json.loads(file.readline())["ts"] + 5
    exits = [event("worker-exited", ended, rank, exit_code=0) for rank in (0, 1)]
    fields = {"outcome": "completed", "exit_code": 0, "reason": "2 workers exited 0"}
    write_events(run, [*exits, event("verdict", ended, **fields)])
    status = read_once(run)
    assert (status.phase, status.outcome, status.exit_code) == ("ended", "completed", 0)
    assert [rank.phase for rank in status.ranks] == ["ended", "ended"]
    assert status.seconds == pytest.approx(5.0)  # by the records' clock, not by ours
    assert read_once(run).seconds == status.seconds


@pytest.mark.parametrize("has_verdict", [True, False])
def test_a_rank_whose_end_nobody_has_seen_is_lost_once_the_run_is_over(
    run: Path, has_verdict: bool
) -> None:
    at_step(run, 1, 3)
    write_events(run, [event("worker-exited", time.time(), 0, code=1, reason="x")])
    if has_verdict:
        fields: dict[str, Any] = {"outcome": "failed", "exit_code": 1, "reason": "r"}
        write_events(run, [event("verdict", time.time(), **fields)])
    status = read_once(run, lambda _: True)
    assert [rank.phase for rank in status.ranks] == ["failed", "lost"]
    assert status.ranks[1].step == 3


def test_where_the_clock_was_set_meanwhile_the_verdict_says_how_long_it_took(run: Path) -> None:
    with (run / "events.jsonl").open() as file:
        ended = json.loads(file.readline())["ts"] + 3600
    fields: dict[str, Any] = {
        "outcome": "completed",
        "exit_code": 0,
        "reason": "2 workers exited 0",
    }
    write_events(run, [event("step", ended - 1, 0, step=3), event("verdict", ended, **fields)])
    record = VerdictRecord(run_id="a-run", attempts=1, seconds=24.5, **fields)
    VERDICT.write(run / "verdict.json", record)
    status = read_once(run)
    assert (status.seconds, status.goodput) == (24.5, None)
    VERDICT.write(run / "verdict.json", replaced(record, seconds=3599.0))
    assert read_once(run).seconds == pytest.approx(3600)
    assert read_once(run).goodput is not None


@pytest.mark.parametrize("events", ["cut", "a link to the verdict"])
def test_a_run_with_a_verdict_has_ended_whatever_its_events_say(run: Path, events: str) -> None:
    """They could not be written to their end, or something else lies there by now."""
    record = VerdictRecord(
        run_id="a-run",
        attempts=1,
        outcome="failed",
        exit_code=1,
        reason="rank 1 died",
        seconds=24.5,
    )
    VERDICT.write(run / "verdict.json", record)
    if events != "cut":
        (run / "events.jsonl").unlink()
        (run / "events.jsonl").symlink_to("verdict.json")
    status = read_once(run)
    assert (status.phase, status.outcome, status.exit_code) == ("ended", "failed", 1)
    assert (status.reason, status.seconds) == ("rank 1 died", 24.5)


def test_goodput_is_shown_while_the_run_goes_on(run: Path) -> None:
    now = time.time()
    steps = [event("step", now - 7 + n, 0, step=n) for n in range(3)]
    write_events(run, steps)
    goodput = read_once(run).goodput
    assert goodput is not None
    assert 0 < goodput["ratio"] < 1
    assert goodput["total_s"] == pytest.approx(sum(goodput["seconds"].values()), abs=0.01)


def test_what_other_nodes_have_sent_is_shown_with_it(run: Path) -> None:
    other = RankStatus(rank=2, host="n02", phase="training", step=12)
    status = replace(read_once(run), ranks=(other,), nodes=("n02",))
    merge.save(run, [status])
    seen = read_once(run)
    assert [rank.rank for rank in seen.ranks] == [0, 1, 2]
    assert "n02" in seen.nodes
    (run / "control" / "nodes.json").write_text("[{}]")
    assert [rank.rank for rank in read_once(run).ranks] == [0, 1]


def test_a_reader_takes_up_what_is_new(run: Path) -> None:
    reader = RunReader(run)
    assert reader.read().restarts == 0
    with (run / "events.jsonl").open("a") as file:
        file.write(json.dumps(event("restart", time.time(), 0, iteration=1))[:20])
        file.flush()
        assert reader.read().restarts == 0  # half a line is none yet
        file.write(json.dumps(event("restart", time.time(), 0, iteration=1))[20:] + "\nnot json\n")
        file.write("[1]\n")
    assert reader.read().restarts == 1
    reader.close()


def test_without_events_there_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_once(tmp_path)


def test_metrics_say_what_the_status_says(run: Path) -> None:
    for rank, seconds in ((0, 1.0), (1, 1.2)):
        at_step(run, rank, 30)
        receipts(run, rank, [seconds] * 30)
    write_events(
        run,
        [
            event("fault", time.time(), 1, cause='a "quoted"\ncause', kind='odd"\\kind\n'),
            event("restart", time.time(), 0, iteration=1),
        ],
    )
    status = read_once(run)
    samples = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(render(status).decode())
        for sample in family.samples
    }
    host = ("host", status.ranks[0].host)
    assert samples["ncclops_rank_step", host, ("rank", "1")] == 30
    assert samples["ncclops_rank_step_seconds", host, ("rank", "1")] == 1.2
    assert samples["ncclops_rank_straggler_ratio", ("rank", "1")] == 1.2
    assert samples["ncclops_restarts_total", ("mode", "in-process")] == 1
    assert samples["ncclops_faults_total", ("class", 'odd"\\kind\n')] == 1
    assert samples["ncclops_run_phase", ("phase", "restarting")] == 1
    assert samples["ncclops_run_phase", ("phase", "training")] == 0
    assert samples["ncclops_world_size",] == 2
    assert status.goodput is not None
    for phase, seconds in status.goodput["seconds"].items():
        assert samples["ncclops_phase_seconds", ("phase", phase)] == seconds


def test_a_clock_that_was_set_back_gives_no_time_below_zero(tmp_path: Path) -> None:
    write_events(tmp_path / "a-run", start_of_run(time.time() + 3600))
    assert read_once(tmp_path / "a-run").seconds == 0
