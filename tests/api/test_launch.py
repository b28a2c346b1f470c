"""`ncclops.launch`: a request in, a verdict out, whatever thread asks and however the run ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from ncclops.errors import NcclopsError, ProfileError, UsageError
from ncclops.launch import LaunchRequest, RunVerdict, launch, prepare, read_verdict, start
from tests.conftest import LIMIT_S, CompletedText, clean_environ

Ncclops = Callable[..., CompletedText]
pytestmark = pytest.mark.slow  # real launchers and workers

LIMIT = timedelta(seconds=LIMIT_S)
QUIET = subprocess.DEVNULL


def request(
    project: Path, script: str = "train.py", steps: int = 4, **more: object
) -> LaunchRequest:
    fields: dict[str, object] = {
        "target": project / script,
        "arguments": ["--steps", str(steps)],
        "profile": "local-cpu",
        "nproc_per_node": 1,
        "log_dir": project / "runs",
    }
    return LaunchRequest(**{**fields, **more})  # type: ignore[arg-type]


def test_a_job_that_completes_is_a_verdict_with_its_receipt(project: Path) -> None:
    verdict = launch(
        request(project, run_dir=project / "run", require_receipt=True),
        environ=clean_environ(),
        stderr=QUIET,
    )
    assert (verdict.outcome, verdict.exit_code, verdict.ok) == ("completed", 0, True)
    assert (verdict.receipt, verdict.failed_rank, verdict.failure_class) == ("healthy", None, None)
    assert (verdict.what, verdict.next_action) == (None, None)
    assert verdict.run_dir == project / "run"
    assert verdict.duration > timedelta(0)
    assert verdict == read_verdict(project / "run")
    assert verdict.document == json.loads((project / "run" / "verdict.json").read_text())


def test_a_job_that_fails_is_a_verdict_that_names_the_rank_and_the_class(project: Path) -> None:
    verdict = launch(
        request(project, "fail.py", nproc_per_node=2, restart="none"),
        environ=clean_environ(),
        stderr=QUIET,
    )
    assert (verdict.outcome, verdict.exit_code, verdict.ok) == ("failed", 1, False)
    assert verdict.failed_rank == 1
    assert verdict.failure_class == "user-error"
    assert verdict.what is not None
    assert verdict.what.startswith("rank 1 on ")
    assert "ValueError: a mistake" in verdict.what
    assert verdict.next_action == "fix"
    assert verdict.remedy


@pytest.mark.parametrize(
    ("fields", "kind", "said"),
    [
        ({"target": "missing.py"}, UsageError, "missing.py does not exist"),
        ({"profile": "no-such"}, ProfileError, "unknown profile 'no-such'"),
        ({"nproc_per_node": 0}, UsageError, "--nproc-per-node 0"),
        ({"timeouts": {"patience": LIMIT}}, UsageError, "there is no 'patience'"),
        ({"restart": "never"}, UsageError, "--restart never: choose in-process, .* or none"),
        ({"arguments": "--steps 4"}, UsageError, "give a list of words"),
        ({"run_dir": 5}, UsageError, r"run_dir=5: give str \| PathLike\[str\] \| None"),
        ({"keep": "NCCL_DEBUG"}, UsageError, r"keep='NCCL_DEBUG': give Sequence\[str\]"),
        ({"env": {"OMP_NUM_THREADS": 4}}, UsageError, "give Mapping"),
        ({"env": {"A": "1\0"}}, UsageError, "no program can be given that"),
        ({"arguments": ["\ud800"]}, UsageError, "no program can be given that"),
        ({"target": "train\0.py"}, UsageError, "no program can be given that"),
        ({"preflight": "hosts"}, UsageError, "--preflight hosts: choose off"),
        ({"env": {"A-B": "1"}}, UsageError, "not the name"),
        ({"env": {"A": "1"}, "keep": ["A"]}, UsageError, "A is given with --set and --keep"),
        (
            {"env": {"NCCLOPS_STORE": "node0"}},
            UsageError,
            "NCCLOPS_STORE='node0': expected host:port",
        ),
        ({"env": {"NCCLOPS_STORE_RELAY": "yes"}}, UsageError, "NCCLOPS_STORE_RELAY='yes': 1 "),
        ({"env": {"NCCLOPS_RESTART_HOST": ".."}}, UsageError, "NCCLOPS_RESTART_HOST='..': "),
        (
            {"env": {"NCCLOPS_RESTART_HOST": "192.0.2.7"}},
            UsageError,
            "NCCLOPS_RESTART_HOST='192.0.2.7': 192.0.2.7 is no address of this host; put ",
        ),
        (
            {"nnodes": "2", "rdzv_endpoint": "127.0.0.1", "local_addr": "192.0.2.7"},
            UsageError,
            "--local-addr='192.0.2.7': 192.0.2.7 is no address of this host; put this host's",
        ),
        ({"node_rank": 3}, UsageError, "--node-rank 3 of a job of one node"),
    ],
)
def test_a_request_that_cannot_be_met_raises_the_same_before_and_at_the_start(
    project: Path, fields: dict[str, object], kind: type[Exception], said: str
) -> None:
    wrong = request(project, **fields)  # type: ignore[arg-type]
    with pytest.raises(kind, match=said) as before:
        prepare(wrong)
    with pytest.raises(kind, match=said) as at_start:
        start(wrong, environ=clean_environ(), stderr=QUIET)
    assert isinstance(before.value, type(at_start.value))
    assert not (project / "runs").exists()


@pytest.mark.parametrize("given", ["train.py", None])
def test_what_is_no_request_is_refused(given: Any) -> None:
    for call in (prepare, start, launch):
        with pytest.raises(UsageError, match=f"{given!r} is no request: give LaunchRequest"):
            call(given)


def test_a_directory_that_holds_a_run_is_refused_at_the_start(project: Path) -> None:
    (project / "run").mkdir()
    (project / "run" / "run.json").write_text("{}")
    with pytest.raises(UsageError, match="already holds a run"):
        start(request(project, run_dir=project / "run"), environ=clean_environ(), stderr=QUIET)


def test_a_launcher_that_dies_before_the_run_begins_is_an_error(project: Path) -> None:
    broken = clean_environ({"PYTHONPATH": str(project)})
    (project / "ncclops.py").write_text("raise SystemExit(5)")
    with pytest.raises(NcclopsError, match="exit code"):
        start(request(project), environ=broken, stderr=QUIET)


@pytest.mark.extended
def test_any_thread_may_launch(project: Path) -> None:
    verdicts: list[RunVerdict] = []

    def work() -> None:
        asked = request(project, restart="none")
        verdicts.append(launch(asked, environ=clean_environ(), stderr=QUIET))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert [verdict.outcome for verdict in verdicts] == ["completed", "completed"]
    assert len({verdict.run_dir for verdict in verdicts}) == 2


def test_leaving_the_block_interrupts_a_run_that_goes_on(project: Path) -> None:
    with start(request(project, steps=10**6), environ=clean_environ(), stderr=QUIET) as run:
        assert run.is_running()
        with pytest.raises(UsageError, match="has no verdict"):
            read_verdict(run.run_dir)
        with pytest.raises(TimeoutError, match="has not ended"):
            run.wait(timedelta(seconds=-1))  # of a deadline that has passed
        with pytest.raises(UsageError, match="timeout=1: give a timedelta"):
            run.wait(1)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="grace=30: give a timedelta"):
            run.stop(grace=30)  # type: ignore[arg-type]
    assert not run.is_running()
    assert run.wait().outcome == "interrupted"
    run.interrupt()  # of a run that has ended, does nothing


def test_a_run_can_be_stopped_from_the_moment_it_has_begun(project: Path) -> None:
    with start(request(project, steps=10**6), environ=clean_environ(), stderr=QUIET) as run:
        assert "stop" in run.stop(grace=timedelta(seconds=1))
        assert run.wait(LIMIT).outcome == "stopped"


def test_a_run_without_a_verdict_is_an_error_of_wait(project: Path) -> None:
    with start(request(project, steps=10**6), environ=clean_environ(), stderr=QUIET) as run:
        stat = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
        for pid in (*map(int, stat), run.pid):  # the agent, then the launcher
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(NcclopsError, match="without a verdict"):
            run.wait(LIMIT)


def test_ctrl_c_ends_the_run_and_is_raised_again(project: Path) -> None:
    program = (
        "import sys\n"
        "from ncclops.launch import LaunchRequest, launch\n"
        "try:\n"
        "    launch(LaunchRequest(target='train.py', arguments=['--steps', '1000000'],"
        " profile='local-cpu', nproc_per_node=1, run_dir='run'))\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted')\n"
    )
    caller = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=project,
        env=clean_environ(),
        stdout=subprocess.PIPE,
        stderr=QUIET,
        text=True,
    )
    wait_for(project / "run" / "ranks" / "0" / "receipt.jsonl")
    caller.send_signal(signal.SIGINT)
    assert caller.communicate(timeout=LIMIT_S)[0] == "interrupted\n"
    assert read_verdict(project / "run").outcome == "interrupted"


def test_a_run_outlives_the_program_that_started_it(project: Path) -> None:
    program = (
        "from ncclops.launch import LaunchRequest, start\n"
        "start(LaunchRequest(target='train.py', arguments=['--steps', '20'],"
        " profile='local-cpu', nproc_per_node=1, run_dir='run'))\n"
    )
    subprocess.run(
        [sys.executable, "-c", program],
        cwd=project,
        env=clean_environ(),
        stderr=QUIET,
        stdout=QUIET,
        timeout=LIMIT_S,
        check=True,
    )
    assert not (project / "run" / "verdict.json").exists()
    wait_for(project / "run" / "verdict.json")
    assert read_verdict(project / "run").outcome == "completed"


def test_the_command_line_of_a_request_means_the_same(
    project: Path, ncclops_in_process: Ncclops
) -> None:
    asked = request(
        project,
        profile=["local-cpu", "debug-bootstrap"],
        parameters={"recorder_entries": 100},
        env={"NCCL_ALGO": "Ring", "NCCL_PROTO": None},
        keep=["NCCL_NET"],
        timeouts={"soft": timedelta(seconds=90), "groups.mesh_*": timedelta(minutes=5)},
        restart="process",
        max_restarts=2,
        nproc_per_node=3,
        tee="all",
    )
    command, *arguments = asked.command_line()
    typed = ncclops_in_process(command, "--dry-run", "--json", *arguments)
    assert typed.returncode == 0, typed.stderr
    document = json.loads(typed.stdout)
    prepared = prepare(asked).to_json()
    for name in ("profile", "restart", "max_restarts", "nproc_per_node", "command", "timeouts"):
        assert document[name] == prepared[name]
    by_name = {row["name"]: row for row in document["plan"]}
    assert by_name["NCCL_ALGO"]["after"] == "Ring"
    assert by_name["TORCH_FR_BUFFER_SIZE"]["after"] == "100"


@pytest.mark.parametrize(
    ("content", "said"),
    [("", "damaged"), ('{"schema": "ncclops.run/1"}', "is ncclops.run/1"), ("[]", "damaged")],
)
def test_a_verdict_that_is_none_is_refused(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "verdict.json").write_text(content)
    with pytest.raises(UsageError, match=said):
        read_verdict(tmp_path)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.05)  # another process makes it
