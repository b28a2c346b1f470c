"""What jobs do to their launcher: odd ends, odd names, odd terminals."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import LIMIT_S, CompletedText, clean_environ
from tests.launch.conftest import Background, Run
from tests.launch.test_kill import wait_until

Ncclops = Callable[..., CompletedText]
Script = Callable[..., Path]
OnlyRun = Callable[[], Run]


def test_a_program_that_fails_is_a_failure(ncclops: Ncclops, only_run: OnlyRun) -> None:
    """What is not Python has no restart core, so no rank goes on without it."""
    done = ncclops(
        "launch", "--nproc-per-node", "2", "--no-python", "sh", "-c", "exit $((3 * RANK))"
    )
    assert done.returncode == 1
    assert only_run().verdict["first_failure"]["rank"] == 1


def test_a_key_on_the_command_line_is_not_recorded(ncclops: Ncclops, only_run: OnlyRun) -> None:
    sh = ("--no-python", "sh", "-c", 'test "${#2}" = 12', "sh")
    command = ("launch", "--nproc-per-node", "1", *sh, "--hub-token", "abc123def456")
    assert ncclops(*command).returncode == 0  # the program gets it as it is
    for path in filter(Path.is_file, only_run().path.rglob("*")):
        assert b"abc123def456" not in path.read_bytes(), path


def test_a_worker_that_ends_well_because_we_stopped_it_has_not_finished_the_job(
    ncclops: Ncclops, script: Script
) -> None:
    source = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
        "sys.exit(3) if os.environ['RANK'] == '0' else signal.pause()\n"
    )
    options = ["--restart", "process", "--nproc-per-node", "2"]
    assert ncclops("launch", *options, script(source)).returncode == 1


def test_a_real_time_signal_has_a_name_of_a_kind(ncclops: Ncclops, script: Script) -> None:
    source = "import os; os.kill(os.getpid(), 40)"
    done = ncclops("launch", "--restart", "process", "--nproc-per-node", "1", script(source))
    assert done.returncode == 1
    assert "was killed by signal 40" in done.stderr


def test_names_that_are_no_text_are_kept(ncclops: Ncclops, script: Script, tmp_path: Path) -> None:
    path = script("import os; print(os.environb[b'ODD'])")
    options = ["--restart", "none", "--nproc-per-node", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "ncclops", "launch", *options, path, b"\xff"],
        cwd=tmp_path,
        env={**{k.encode(): v.encode() for k, v in clean_environ().items()}, b"ODD": b"\xfe"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    assert r"[rank0]: b'\xfe'" in done.stdout


@pytest.mark.extended
def test_what_lies_in_the_current_directory_shadows_nothing(
    ncclops: Ncclops, tmp_path: Path
) -> None:
    """Only what lies beside the script does, as under python."""
    for name in ("queue", "torch", "typing"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('shadowed')")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "train.py").write_text("import queue; print('fine')")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "ncclops", "launch", "--nproc-per-node", "1", "sub/train.py"],
        cwd=tmp_path,
        env=clean_environ(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    assert "[rank0]: fine" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "closed",
    [
        pytest.param(">&- 2>&-", marks=pytest.mark.extended),
        pytest.param("<&-", marks=pytest.mark.extended),
        "<&- >&- 2>&-",
    ],
)
def test_closed_streams_are_no_reason_to_fail(closed: str, script: Script, tmp_path: Path) -> None:
    source = (
        "from torch import distributed\n"
        "distributed.init_process_group('gloo')\n"
        "distributed.barrier()\n"
        "distributed.destroy_process_group()\n"
    )
    launch = f"{sys.executable} -m ncclops launch --restart none --nproc-per-node 1"
    command = f"{launch} {script(source)} {closed}"
    done = subprocess.run(command, shell=True, cwd=tmp_path, env=clean_environ(), timeout=LIMIT_S)
    assert done.returncode == 0


@pytest.mark.slow
def test_scripts_that_become_other_programs_are_judged_by_how_all_of_these_end(
    ncclops: Ncclops, script: Script, only_run: OnlyRun
) -> None:
    """As to set a variable of the loader. Restarts in place do not look after the new programs."""
    source = (
        "import os, sys\n"
        "ends = 'import os, sys, time; time.sleep(1); sys.exit(7 * int(os.environ[\"RANK\"]))'\n"
        "os.execv(sys.executable, [sys.executable, '-c', ends])\n"
    )
    done = ncclops("launch", "--nproc-per-node", "2", script(source))
    assert done.returncode == 1
    assert "rank 1 has become another program: nothing restarts it" in done.stderr
    assert only_run().verdict["reason"].startswith("rank 1 exited with code 7")


@pytest.mark.extended
def test_a_transient_fault_after_choosing_a_start_method(
    ncclops: Ncclops, script: Script, only_run: OnlyRun
) -> None:
    """Python allows the choice once a process; a second iteration makes it again."""
    source = (
        "import multiprocessing, os, sys\n"
        "if __name__ == '__main__':\n"
        "    multiprocessing.set_start_method('spawn')\n"
        "    os.environ['LEFT'] = os.environ.get('LEFT', '') + 'x'\n"
        "    print(os.environ['LEFT'], flush=True)\n"
        "    if not os.path.exists('once'):\n"
        "        open('once', 'w').close()\n"
        "        raise RuntimeError('once')\n"
    )
    done = ncclops("launch", "--nproc-per-node", "1", script(source))
    assert done.returncode == 0, done.stderr
    assert only_run().stdout(0) == "x\nx\n"


@pytest.mark.extended
def test_a_rank_that_stays_after_the_core_gave_up_is_ended(
    ncclops: Ncclops, script: Script, quick_profile: Path, only_run: OnlyRun
) -> None:
    source = (
        "import os, threading, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    threading.Thread(target=time.sleep, args=(600,)).start()\n"
        "    time.sleep(600)\n"
        "no_such_name\n"
    )
    done = ncclops("launch", "--profile", quick_profile, "--nproc-per-node", "2", script(source))
    assert done.returncode == 1
    assert only_run().verdict["first_failure"]["rank"] == 0


@pytest.mark.extended
def test_a_last_checkpoint_is_not_cut_by_another_rank_that_leaves(
    background: Callable[..., Background], script: Script, tmp_path: Path
) -> None:
    """On SIGTERM rank 0 exits at once, which is no fault; rank 1 takes its time to save."""
    source = (
        "import os, signal, sys, time\n"
        "rank = os.environ['RANK']\n"
        "def leave(*_):\n"
        "    if rank == '1':\n"
        "        time.sleep(2)\n"
        "        print('saved', flush=True)\n"
        "    sys.exit(1)\n"
        "signal.signal(signal.SIGTERM, leave)\n"
        "print('started', flush=True)\n"
        "open('ready-' + rank, 'w').close()\n"
        "while True: time.sleep(0.05)\n"
    )
    agent = background("launch", "--nproc-per-node", "2", "--run-dir", "run", script(source))
    wait_until(lambda: all((tmp_path / f"ready-{rank}").exists() for rank in "01"), "ready")
    agent.terminate()
    assert agent.wait(LIMIT_S) == 143
    assert Run(tmp_path / "run").stdout(1) == "started\nsaved\n"


def test_a_client_that_does_not_read_delays_no_other(
    background: Callable[..., Background], script: Script, tmp_path: Path
) -> None:
    """`| less`, or Ctrl-S: the verdict is written, and a signal still ends the launcher."""
    path = script("for n in range(20_000): print('line', n, 'x' * 100)")
    options = ["--restart", "none", "--nproc-per-node", "1", "--run-dir", "run"]
    launcher = background("launch", *options, path, stdout=subprocess.PIPE)
    run = Run(tmp_path / "run")
    wait_until((run.path / "verdict.json").exists, "the verdict")
    assert run.verdict["outcome"] == "completed"
    launcher.terminate()
    assert launcher.wait(LIMIT_S) == 0
    assert launcher.stdout is not None
    launcher.stdout.close()


@pytest.mark.slow
@pytest.mark.extended
def test_an_ignored_child_signal_is_no_trap(script: Script, tmp_path: Path) -> None:
    def ignore_children() -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)

    process = subprocess.Popen(
        [sys.executable, "-m", "ncclops", "launch", "--nproc-per-node", "1", script("print(1)")],
        cwd=tmp_path,
        env=clean_environ(),
        preexec_fn=ignore_children,  # noqa: PLW1509 - this process has no threads of its own
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    assert process.wait(LIMIT_S) == 0
