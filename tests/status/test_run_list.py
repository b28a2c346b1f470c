"""`ncclops runs`: what a list shows of each run, in which order, and what a bad one costs."""

from __future__ import annotations

import ctypes
import json
import os
import pty
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from ncclops.control.client import send, status_of
from ncclops.diagnose.diagnosis import diagnose
from ncclops.errors import NcclopsError
from ncclops.host import process_identity
from ncclops.record.control_address import listen_unix
from ncclops.record.paths import RunPaths
from ncclops.record.run_record import RUN, Launcher, ProfileUsed, RunRecord
from ncclops.record.verdict_record import VERDICT, FailureClass, GoodputFigures, VerdictRecord
from ncclops.status.run_list import list_runs
from tests.conftest import LIMIT_S, CompletedText, clean_environ
from tests.control.conftest import start_of_run, write_events

Ncclops = Callable[..., CompletedText]
NOW = 1_790_000_000.0
HERE = Launcher(**vars(process_identity.current()))
GONE = msgspec.structs.replace(HERE, started_ticks=HERE.started_ticks - 1)

WELL = VerdictRecord(
    run_id="x", outcome="completed", exit_code=0, reason="2 workers exited 0", attempts=1,
    seconds=7512.0, goodput=GoodputFigures(ratio=0.974, total_s=7512.0),
)  # fmt: skip
FAILED = VerdictRecord(
    run_id="x", outcome="failed", exit_code=78, reason="rank 3 on n07 raised KeyError: 'lr'",
    attempts=1, seconds=3.2, classification=FailureClass(class_="user-error"), next_action="fix",
)  # fmt: skip


def run(
    path: Path, *, age_s: float, verdict: VerdictRecord | None = WELL, launcher: Launcher = GONE
) -> Path:
    """A run directory as the agent leaves it."""
    write_events(path, start_of_run(NOW - age_s))
    record = RunRecord(
        run_id=path.name, started=NOW - age_s, world_size=2, profile=ProfileUsed(name="local-cpu"),
        launcher=launcher,
    )  # fmt: skip
    RUN.write(path / "run.json", record)
    if verdict is not None:
        VERDICT.write(path / "verdict.json", verdict)
    return path


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """One of each kind, the newest last."""
    parent = tmp_path / "runs"
    run(parent / "old", age_s=90_000)
    run(parent / "team" / "a", age_s=5000, verdict=FAILED)
    run(parent / "team" / "b", age_s=4000, verdict=msgspec.structs.replace(WELL, ranks_lost=[3]))
    run(parent / "lost", age_s=3000, verdict=None)
    (parent / "jobs").mkdir()
    (parent / "jobs" / "slurm-1.jsonl").write_text("{}\n")
    # The other node of a job, which was given the same directory, is part of that run.
    run(parent / "old" / "nodes" / "n02", age_s=90_000)
    return parent


def rows(done: CompletedText) -> list[list[str]]:
    assert done.returncode == 0, done.stderr
    return [line.split(maxsplit=6) for line in done.stdout.splitlines()[1:]]


def test_runs_at_any_depth_the_newest_first(runs: Path, ncclops_in_process: Ncclops) -> None:
    done = ncclops_in_process("runs")
    assert done.stdout.splitlines()[0].split() == [
        "run", "started", "outcome", "took", "good", "cause",
    ]  # fmt: skip
    lost, b, a, old = rows(done)
    assert (lost[0], lost[3], lost[5]) == ("lost", "lost", "-")
    assert [b[0], *b[3:]] == ["team/b", "completed", "2h05m", "97%", "finished without rank 3"]
    assert [a[0], *a[3:]] == [
        "team/a", "failed", "3.2s", "-", "user-error: rank 3 on n07 raised KeyError: 'lr'",
    ]  # fmt: skip
    assert [old[0], *old[3:]] == ["old", "completed", "2h05m", "97%"]


def test_the_document(runs: Path, ncclops_in_process: Ncclops) -> None:
    document = json.loads(ncclops_in_process("runs", "--json", "--limit", "3").stdout)
    assert (document["schema"], document["more"]) == ("ncclops.runs/1", True)
    assert document["runs"][2] == {
        "run_dir": "runs/team/a", "run_id": "a", "state": "ended", "outcome": "failed",
        "exit_code": 78, "next_action": "fix", "started": NOW - 5000, "seconds": 3.2,
        "goodput": None, "class": "user-error", "cause": "rank 3 on n07 raised KeyError: 'lr'",
        "world_size": 2, "profile": "local-cpu",
    }  # fmt: skip


def test_failed_since_and_limit(runs: Path, ncclops_in_process: Ncclops) -> None:
    def names(*arguments: str) -> list[str]:
        return [row[0] for row in rows(ncclops_in_process("runs", *arguments))]

    assert names("--failed") == ["lost", "team/a"]
    assert names("--failed", "--limit", "1") == ["lost"]
    assert names("--limit", "0") == ["lost", "team/b", "team/a", "old"]
    hours = (time.time() - NOW + 4500) / 3600
    assert names("--since", f"{hours:.3f}h") == ["lost", "team/b"]
    assert names("runs/team") == ["b", "a"]
    assert names("runs/old") == ["old"]
    assert names("runs/team", "runs/old") == ["runs/team/b", "runs/team/a", "runs/old"]
    done = ncclops_in_process("runs", "--limit", "2")
    assert (
        done.stderr == "ncclops: there are older ones: --limit 0 shows all, --limit N more than 2\n"
    )


@pytest.mark.parametrize(
    ("file", "text", "cause"),
    [
        ("verdict.json", "", "verdict.json cannot be read: Input data was truncated"),
        ("verdict.json", '{"schema": "ncclops.verdict/1", "outcome": 3}', "verdict.json cannot be"),
        ("verdict.json", "[1, 2]", "verdict.json cannot be read: "),
        ("verdict.json", None, "verdict.json cannot be read: "),
        ("run.json", '{"schema": "other/1"}', "verdict.json cannot be read: it is a document"),
    ],
)
def test_a_bad_run_costs_its_own_line(
    runs: Path, file: str, text: str | None, cause: str, ncclops_in_process: Ncclops
) -> None:
    bad = run(runs / "bad", age_s=10)
    (bad / "verdict.json").write_text(
        '{"outcome": "completed", "reason": "", "seconds": 1, "exit_code": 0}'
    )
    (bad / file).unlink()
    if text is None:
        (bad / file).mkdir()
    else:
        (bad / file).write_text(text)
    listed = rows(ncclops_in_process("runs"))
    assert [row[0] for row in listed[1:]] == ["lost", "team/b", "team/a", "old"]
    assert listed[0][0] == "bad" and listed[0][3] == "unreadable"
    assert cause in " ".join(listed[0])


def test_a_record_of_the_start_that_is_damaged_does_not_hide_the_verdict(runs: Path) -> None:
    (runs / "team" / "a" / "run.json").write_text("{")
    a = next(line for line in list_runs([runs]) if line.path.name == "a")
    assert (a.outcome, a.run_id) == ("failed", None)


def test_a_run_of_another_machine_may_go_on(runs: Path) -> None:
    lost = run(runs / "lost", age_s=3000, verdict=None)
    elsewhere = msgspec.structs.replace(HERE, host="n99", boot_id="another")
    record = RUN.read(lost / "run.json")
    assert record is not None
    RUN.write(lost / "run.json", msgspec.structs.replace(record, launcher=elsewhere))
    (line,) = (line for line in list_runs([runs]) if line.path.name == "lost")
    assert (line.state, line.is_bad) == ("unknown", False)
    assert replace(line, state="lost").is_bad


@contextmanager
def as_another_user(socket: Path) -> Iterator[None]:
    """This thread may not connect to ``socket``, whether root runs the tests or not."""
    socket.chmod(0)
    libc = ctypes.CDLL(None)
    before = libc.setfsuid(65534)  # takes root's right to pass over modes; of others it is refused
    try:
        yield
    finally:
        libc.setfsuid(before)


def test_the_run_of_another_user_is_not_lost_while_its_launcher_runs() -> None:
    with tempfile.TemporaryDirectory() as name:
        parent, socket = Path(name), RunPaths(Path(name) / "theirs").socket
        parent.chmod(0o755)  # for others to enter

        def states() -> list[str]:
            return [*(line.state for line in list_runs([parent])), diagnose(theirs).state]

        theirs = run(parent / "theirs", age_s=60, verdict=None, launcher=HERE)
        with listen_unix(theirs):
            assert states() == ["running", "running"]
            with as_another_user(socket):
                assert states() == ["running", "running"]
            record = RUN.read(theirs / "run.json")
            assert record is not None
            RUN.write(theirs / "run.json", msgspec.structs.replace(record, launcher=GONE))
            with as_another_user(socket):
                assert states() == ["lost", "lost"]


def test_a_copy_of_the_directory_of_a_run_under_way_shows_no_lost_run(tmp_path: Path) -> None:
    """As one has it that was moved to another file system: there no agent listens."""
    copy = run(tmp_path / "copy", age_s=60, verdict=None, launcher=HERE)
    (line,) = list_runs([tmp_path])
    assert (line.state, diagnose(copy).state, status_of(copy).phase) == (
        *("running", "running"),
        "starting",
    )
    with pytest.raises(NcclopsError, match="its launcher runs, and no agent listens here"):
        send(copy, {"action": "stop"})


def test_a_name_that_somebody_else_has_chosen_is_one_line(
    tmp_path: Path, ncclops_in_process: Ncclops
) -> None:
    run(tmp_path / "a\x1b[2J\nncclops: all is well", age_s=5)
    _, line = ncclops_in_process("runs", tmp_path).stdout.splitlines()
    assert line.startswith("a\\x1b[2J ncclops: all is well  ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere: No such file or directory: name a directory that has runs below"),
        (["file"], "file: Not a directory: name a directory"),
        (["--since", "yesterday"], "--since yesterday: write a duration, as in 12h or 7d, or a"),
    ],
)
def test_wrong_use_is_one_line(
    arguments: list[str], message: str, tmp_path: Path, ncclops_in_process: Ncclops
) -> None:
    (tmp_path / "file").touch()
    done = ncclops_in_process("runs", *arguments)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert message in done.stderr


def test_where_there_are_none_that_is_said(tmp_path: Path, ncclops_in_process: Ncclops) -> None:
    (tmp_path / "runs").mkdir()
    done = ncclops_in_process("runs", "--failed", "--since", "2026-11-20")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == "ncclops: no failed runs in or below runs since 2026-11-20\n"


def test_only_what_is_shown_is_read(runs: Path) -> None:
    """The verdict of a run that is further down than anybody looks may not even be there."""
    lines = list_runs([runs])
    assert [next(lines).path.name for _ in range(3)] == ["lost", "b", "a"]
    (runs / "old" / "verdict.json").unlink()
    assert next(lines).state == "lost"


@pytest.mark.slow
def test_a_terminal_of_80_columns_is_not_exceeded(runs: Path, tmp_path: Path) -> None:
    (runs / "team" / "a").rename(runs / ("a-name-that-somebody-has-chosen-and-that-is-too-long"))
    main, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "ncclops", "runs"], cwd=tmp_path, stdout=terminal,
        env=clean_environ({"COLUMNS": "80", "TERM": "xterm", "NO_COLOR": "1"}),
    )  # fmt: skip
    os.close(terminal)
    shown = b""
    while True:
        try:
            part = os.read(main, 65536)
        except OSError:  # Linux: the other side is closed
            break
        if not part:
            break
        shown += part
    os.close(main)
    assert process.wait(LIMIT_S) == 0
    lines = shown.decode().replace("\x1b[1m", "").replace("\x1b[0m", "").splitlines()
    assert len(lines) == 5
    assert all(len(line) <= 80 for line in lines), lines
    (failed,) = (line for line in lines if " failed " in line)
    assert failed.startswith("a-name-that-somebody-…  ") and failed.endswith("  user-error: rank …")
