"""The end of a run as it is printed: the first failure in full, the outcome in a line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ncclops.agent.verdict_report import (
    clock_offset,
    first_failure,
    judge_receipt,
    measure_goodput,
    print_verdict,
)
from ncclops.receipts.log_receipts import PrintedReceipts
from ncclops.record.run_directory import RunDirectory
from ncclops.record.verdict_record import (
    VERDICT,
    JudgedReceipt,
    Outcome,
    RuleOutcome,
    VerdictRecord,
    WorkerEnding,
)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory.create(exact=tmp_path / "run", parent=None, node="n1")
    for rank in range(3):
        run.paths.rank(rank).root.mkdir(parents=True)
    return run


def ending(
    rank: int, code: int | None, *, signal: str | None = None, asked: bool = False
) -> WorkerEnding:
    return WorkerEnding(
        rank=rank, pid=1, exit_code=code, signal=signal, seconds=1.0, asked_to_stop=asked
    )


@pytest.mark.parametrize("set_by_s", [7200.0, -7200.0])
def test_there_is_no_goodput_where_the_clock_was_set(run: RunDirectory, set_by_s: float) -> None:
    assert measure_goodput(run, clock_offset()) is not None
    assert measure_goodput(run, clock_offset() - set_by_s) is None


def test_it_is_the_first_that_failed_by_itself(run: RunDirectory) -> None:
    order = [ending(0, 0), ending(2, 143, asked=True), ending(1, 7), ending(2, 1)]
    failure = first_failure(run, order, 0)
    assert failure is not None
    assert (failure.rank, failure.host) == (1, "n1")


def test_an_exception_that_was_written_nowhere_is_told_as_the_rank_reported_it(
    run: RunDirectory,
) -> None:
    failure = first_failure(run, [ending(1, 1)], 0, {1: "OSError: [Errno 28] No space left"})
    assert failure is not None
    assert failure.message == "OSError: [Errno 28] No space left"


def test_no_worker_that_ended_well_or_was_stopped_has_failed(run: RunDirectory) -> None:
    assert (
        first_failure(run, [ending(0, 0), ending(1, None, signal="SIGTERM", asked=True)], 0) is None
    )


def test_it_is_taken_from_stderr_and_from_stdout_where_that_is_empty(run: RunDirectory) -> None:
    run.paths.rank(1).stdout_log.write_text("the last line\n")
    failure = first_failure(run, [ending(1, 7)], 0)
    assert failure is not None
    assert failure.tail == ["the last line"]
    run.paths.rank(1).stderr_log.write_text("".join(f"line {n}\n" for n in range(100)))
    failure = first_failure(run, [ending(1, 7)], 0)
    assert failure is not None
    assert (failure.tail[-1], len(failure.tail)) == ("line 99", 25)
    assert failure.log.endswith("ranks/1/stderr.log")


@pytest.mark.parametrize(
    ("left", "message"),
    [
        (json.dumps({"message": "ValueError: bad\nand more"}), "ValueError: bad"),
        (json.dumps({"message": {"message": "ValueError: bad"}}), "ValueError: bad"),
        ("{", None),
        ("[]", None),
        ('{"message": ""}', None),
    ],
)
def test_its_message_is_what_it_has_recorded_of_this_attempt(
    run: RunDirectory, left: str, message: str | None
) -> None:
    run.paths.rank(1).error(2).write_text(left)
    failure, earlier = (first_failure(run, [ending(1, 7)], attempt) for attempt in (2, 1))
    assert failure is not None
    assert earlier is not None
    assert (failure.message, earlier.message) == (message, None)


@pytest.mark.parametrize(
    ("outcome", "code", "shown"),
    [("completed", 0, False), ("stopped", 0, False), ("stopped", 1, True), ("failed", 1, True)],
)
def test_of_a_good_end_a_quiet_launch_prints_where_the_verdict_is(
    run: RunDirectory,
    capsys: pytest.CaptureFixture[str],
    outcome: Outcome,
    code: int,
    shown: bool,
) -> None:
    verdict = VerdictRecord(
        run_id="r", outcome=outcome, exit_code=code, reason="so it is", attempts=1, seconds=2.0
    )
    print_verdict(verdict, run, as_json=True, quiet=True)
    printed = capsys.readouterr()
    assert json.loads(printed.out) == VERDICT.to_json(verdict)
    first, *_, last = ["", *printed.err.splitlines()][-2:]
    assert first == (f"ncclops: {outcome} after 2.0s: so it is" if shown else "")
    assert last == f"ncclops: verdict: {run.shown(run.paths.verdict)}"


def test_the_last_line_names_the_ranks_without_which_the_job_has_finished(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    verdict = VerdictRecord(
        run_id="r", outcome="completed", exit_code=0, reason="so it is", attempts=1, seconds=2.0,
        ranks_lost=[1, 3],
    )  # fmt: skip
    print_verdict(verdict, run, as_json=False, quiet=True)
    shown = f"verdict: {run.shown(run.paths.verdict)}; finished without ranks 1, 3"
    assert capsys.readouterr().err == f"ncclops: {shown}\n"


def test_a_run_of_too_few_steps_is_told_by_their_number(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    rules = [
        RuleOutcome(rule="step-0-contaminated", ok=False, note="the only step there is"),
        RuleOutcome(rule="three-steps", ok=False, note="0 of the 3 steps"),
    ]
    verdict = VerdictRecord(
        run_id="r", outcome="completed", exit_code=0, reason="so it is", attempts=1, seconds=2.0,
        receipt=JudgedReceipt(verdict="rumour", rules=rules, steps=1),
    )  # fmt: skip
    print_verdict(verdict, run, as_json=False)
    told = "ncclops: receipt: rumour: three-steps: 0 of the 3 steps; step-0-contaminated\n"
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(("failure", "healthy"), [(None, True), ("rank 0 raised", False)])
def test_a_run_that_failed_behind_its_end_marker_is_not_healthy(
    tmp_path: Path, failure: str | None, healthy: bool
) -> None:
    log = tmp_path / "ranks" / "0" / "stdout.log"
    printed = PrintedReceipts(tmp_path, lambda rank, seen: None)
    printed.follow({log: 0})
    steps = "".join(f"step {step} loss 2.3\n" for step in range(9))
    printed.feed(log, f"{steps}Peak memory: 3 GiB\nTraining finished\n".encode())
    assert judge_receipt(tmp_path, printed, failure).healthy is healthy
