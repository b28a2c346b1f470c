"""`ncclops receipt check` as people and scripts call it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import CompletedText

Ncclops = Callable[..., CompletedText]


@pytest.fixture
def ncclops(ncclops_in_process: Ncclops) -> Ncclops:
    """Commands that only read need no process of their own."""
    return ncclops_in_process


HEALTHY = """\
compile_warmup 31.20s
step 00000 loss 10.981 tok/s 2,310
step 00001 loss 10.455 tok/s 701,000
step 00002 loss 10.031 tok/s 790,500
step 00003 loss 9.722 tok/s 812,000
peak memory 17.92 GiB
training finished: final loss 9.722
"""


def record(kind: str, **fields: object) -> str:
    return json.dumps({"ts": 1.0, "kind": kind, "iteration": 0, **fields}) + "\n"


def records(steps: int, *, end: bool = True, gib: float = 2.0) -> str:
    lines = [record("start", pid=1, rank=0, attempt=0), record("warmup-begin")]
    lines += [record("compile-warmup", seconds=12.5)]
    lines += [record("step", step=n, seconds=0.5, tokens=100.0) for n in range(steps)]
    lines += [record("peak-memory", gib=gib, source="cuda")]
    return "".join([*lines, record("end", how="completed") if end else ""])


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    for rank in range(2):
        (path / "ranks" / str(rank)).mkdir(parents=True)
        for name in ("stdout.log", "stderr.log"):
            (path / "ranks" / str(rank) / name).touch()
    return path


def test_json_holds_what_the_contract_promises(ncclops: Ncclops, tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(HEALTHY)
    done = ncclops("receipt", "check", "train.log", "--json")
    assert done.returncode == 0
    assert done.stderr == ""
    document = json.loads(done.stdout)
    assert document["schema"] == "ncclops.receipt/1"
    assert document["verdict"] == "healthy"
    assert [rule["rule"] for rule in document["rules"]] == [
        "compile-warmup",
        "step-0-contaminated",
        "three-steps",
        "peak-memory",
        "end-marker",
    ]
    assert all(rule["ok"] for rule in document["rules"])
    assert document["rules"][0]["evidence"] == "train.log:1: compile_warmup 31.20s"
    assert document["compile_warmup_s"] == 31.2
    assert document["steps"] == 4
    assert document["first_real_step"] == 1
    assert document["steady_rate"] == 790_500
    assert document["peak_memory_gib"] == 17.92


def test_each_rule_is_printed_with_its_line(ncclops: Ncclops, tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(HEALTHY)
    done = ncclops("receipt", "check", "train.log")
    assert done.returncode == 0
    assert done.stdout.startswith("healthy: ")
    for line in HEALTHY.splitlines():
        if "step 00001" not in line and "step 00002" not in line:
            assert line in done.stdout
    assert "train.log:5: step 00003" in done.stdout


@pytest.mark.parametrize(
    ("lines", "verdict", "said"),
    [
        (0, "startup-stall", "no sign of training"),
        (1, "compile-stall", "no step"),
        (3, "rumour", "1 of the 3 steps after warm-up"),
        (6, "incomplete", "no end marker; this is the last step"),
    ],
)
def test_a_log_cut_off_exits_1_and_says_what_is_missing(
    ncclops: Ncclops, tmp_path: Path, lines: int, verdict: str, said: str
) -> None:
    (tmp_path / "train.log").write_text("".join(HEALTHY.splitlines(keepends=True)[:lines]))
    done = ncclops("receipt", "check", "train.log")
    assert done.returncode == 1
    assert done.stdout.startswith(f"{verdict}: ")
    assert said in done.stdout


@pytest.mark.parametrize(
    ("target", "said"),
    [("missing.log", "No such file"), (".", "holds no ranks/"), ("locked", "Not a directory")],
)
def test_what_cannot_be_read_is_one_line_and_exit_2(
    ncclops: Ncclops, tmp_path: Path, target: str, said: str
) -> None:
    (tmp_path / "file").touch()
    done = ncclops("receipt", "check", "file/x" if target == "locked" else target)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("ncclops: error: ")
    assert said in line


def test_a_receipt_file(ncclops: Ncclops, tmp_path: Path) -> None:
    (tmp_path / "receipt.jsonl").write_text(records(5))
    document = json.loads(ncclops("receipt", "check", "receipt.jsonl", "--json").stdout)
    assert document["verdict"] == "healthy"
    assert document["compile_warmup_s"] == 12.5
    assert document["steady_rate"] == 200.0
    assert document["rate_unit"] == "tokens/s"
    shown = ncclops("receipt", "check", "receipt.jsonl").stdout
    assert f"receipt.jsonl:3: {record('compile-warmup', seconds=12.5)}" in shown, "whole lines"


def test_a_line_cut_off_by_a_kill_does_no_harm(ncclops: Ncclops, tmp_path: Path) -> None:
    (tmp_path / "receipt.jsonl").write_text(records(5, end=False) + '{"ts": 1.0, "kind": "en')
    assert ncclops("receipt", "check", "receipt.jsonl").stdout.startswith("incomplete")


def test_a_run_holds_when_every_rank_with_receipts_does(ncclops: Ncclops, run_dir: Path) -> None:
    (run_dir / "ranks" / "0" / "receipt.jsonl").write_text(records(5, gib=2.0))
    (run_dir / "ranks" / "1" / "receipt.jsonl").write_text(records(5, gib=3.0))
    document = json.loads(ncclops("receipt", "check", run_dir, "--json").stdout)
    assert document["verdict"] == "healthy"
    assert document["peak_memory_gib"] == 3.0
    assert document["rules"][3]["evidence"].startswith("ranks/1/receipt.jsonl:")
    (run_dir / "ranks" / "1" / "receipt.jsonl").write_text(records(5, end=False))
    assert ncclops("receipt", "check", run_dir).returncode == 1


def test_a_rank_that_reports_nothing_is_not_held_against_the_run(
    ncclops: Ncclops, run_dir: Path
) -> None:
    (run_dir / "ranks" / "0" / "receipt.jsonl").write_text(records(5))
    (run_dir / "ranks" / "1" / "receipt.jsonl").write_text(record("start", pid=2, rank=1))
    assert ncclops("receipt", "check", run_dir).returncode == 0


def test_a_run_of_a_script_that_only_prints(ncclops: Ncclops, run_dir: Path) -> None:
    """One rank prints the steps, another the rest, as Megatron-LM's do."""
    lines = HEALTHY.splitlines(keepends=True)
    (run_dir / "ranks" / "1" / "stdout.log").write_text("".join(lines[:5]))
    (run_dir / "ranks" / "0" / "stderr.log").write_text("".join(lines[5:]))
    document = json.loads(ncclops("receipt", "check", run_dir, "--json").stdout)
    assert document["verdict"] == "healthy"
    assert document["rules"][4]["evidence"].startswith("ranks/0/stderr.log:2: ")


def test_help_names_the_verdict_s_exit_code(ncclops: Ncclops) -> None:
    assert "exit 0 when it is healthy" in " ".join(
        ncclops("receipt", "check", "--help").stdout.split()
    )


def test_without_a_path_the_newest_run_is_judged(ncclops: Ncclops, tmp_path: Path) -> None:
    for number, (name, steps) in enumerate((("old", 1), ("new", 5))):
        rank = tmp_path / "runs" / name / "ranks" / "0"
        rank.mkdir(parents=True)
        (rank / "receipt.jsonl").write_text(records(steps))
        events = rank.parent.parent / "events.jsonl"
        events.touch()
        os.utime(events, (1000 + number, 1000 + number))
    assert ncclops("receipt", "check").returncode == 0
    by_id = ncclops("receipt", "check", "old")
    assert (by_id.returncode, by_id.stdout.startswith("rumour: ")) == (1, True)
    assert ncclops("receipt", "check", "old", "--no-exit-code").returncode == 0


def test_without_a_path_and_a_run_it_is_wrong_usage(ncclops: Ncclops) -> None:
    done = ncclops("receipt", "check")
    assert (done.returncode, done.stdout) == (2, "")
    assert "no runs in runs/" in done.stderr


def exited(rank: int, **how: object) -> str:
    event = {"ts": 2.0, "event": "worker-exited", "rank": rank, "node": "n", **how}
    return json.dumps(event) + "\n"


@pytest.mark.parametrize(
    ("others", "verdict"), [({"exit_code": 0}, "healthy"), ({"exit_code": 1}, "incomplete")]
)
def test_a_rank_that_was_lost_owes_no_receipt(
    ncclops: Ncclops, run_dir: Path, others: dict[str, object], verdict: str
) -> None:
    """Unless all have failed: then none was lost by the others."""
    (run_dir / "ranks/0/receipt.jsonl").write_text(records(2, end=False))
    (run_dir / "ranks/1/receipt.jsonl").write_text(records(5))
    (run_dir / "events.jsonl").write_text(exited(0, signal="SIGKILL") + exited(1, **others))
    document = json.loads(ncclops("receipt", "check", str(run_dir), "--json").stdout)
    assert document["verdict"] == ("rumour" if verdict != "healthy" else verdict)


SLOWER = HEALTHY.replace("790,500", "600,000").replace("701,000", "600,000")


@pytest.mark.parametrize(
    ("other", "swings", "code"),
    [
        (HEALTHY, [], 0),
        (HEALTHY.replace("17.92", "44.80"), ["peak-memory"], 1),
        (HEALTHY.replace("17.92", "7.00"), ["peak-memory"], 1),
        (SLOWER, ["rate"], 1),
        (HEALTHY.replace("31.20s", "90.00s"), ["warm-up"], 1),
        (HEALTHY.replace("17.92", "18.50"), [], 0),
    ],
)
def test_two_runs_are_compared_and_swings_are_flagged(
    ncclops: Ncclops, tmp_path: Path, other: str, swings: list[str], code: int
) -> None:
    (tmp_path / "a.log").write_text(HEALTHY)
    (tmp_path / "b.log").write_text(other)
    done = ncclops("receipt", "compare", "a.log", "b.log", "--json", "--exit-code")
    document = json.loads(done.stdout)
    assert document["schema"] == "ncclops.receipt-compare/1"
    assert [row["name"] for row in document["figures"] if row["swings"]] == swings
    assert done.returncode == code
    shown = ncclops("receipt", "compare", "a.log", "b.log")
    assert shown.returncode == 0
    assert [line.split()[0] for line in shown.stdout.splitlines() if "SWING" in line] == swings


def test_a_run_that_is_not_healthy_has_no_rate_to_compare(ncclops: Ncclops, tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(HEALTHY)
    (tmp_path / "b.log").write_text("".join(HEALTHY.splitlines(keepends=True)[:-1]))
    done = ncclops("receipt", "compare", "a.log", "b.log", "--json", "--exit-code")
    rate = json.loads(done.stdout)["figures"][0]
    assert (rate["a"], rate["b"], rate["ratio"]) == (790_500, None, None)
    assert rate["note"] == "B has none: incomplete, end-marker"
    assert done.returncode == 1
