"""Disks that are full or do not answer: training goes on, and the end is told truly."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import LIMIT_S, clean_environ

pytestmark = pytest.mark.slow

TRAIN = """
import os, time
from pathlib import Path
from torch import distributed
from ncclops import receipt

distributed.init_process_group("gloo")
run = Path(os.environ["NCCLOPS_RUN_DIR"])
for step in range(5):
    receipt.step(step)
    distributed.barrier()
    if step == 2 and os.environ["RANK"] == "0":
        {act}
print("trained")  # which a full disk does not take
distributed.barrier()
distributed.destroy_process_group()
"""
# Files until not one byte is left, and a directory that takes no more names.
FILL = """
        with open(run / "fill", "wb", buffering=0) as file:
            for size in (1 << 20, 1 << 12, 1):
                try:
                    while True:
                        file.write(bytes(size))
                except OSError:
                    pass
"""
PIPE = """
        (run / "events.jsonl").rename(run / "before.jsonl")
        os.mkfifo(run / "events.jsonl")
"""


@pytest.fixture
def private_mounts() -> None:
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare")
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode != 0:
        pytest.skip("no mount namespaces here")


def launch(
    directory: Path, act: str, *, size: str, limits: str = "", program: str = TRAIN
) -> tuple[subprocess.CompletedProcess[str], Path]:
    """A run of two ranks in a file system of ``size``, of which rank 0 does ``act``."""
    (directory / "train.py").write_text(program.replace("{act}", act.strip()))
    small, kept = directory / "small", directory / "kept"
    small.mkdir()
    kept.mkdir()
    command = [sys.executable, "-m", "ncclops", "launch", "--nproc-per-node", "2"]
    command += ["--run-dir", str(small / "run"), str(directory / "train.py")]
    in_namespace = f"""
        mount -t tmpfs -o size={size} none {shlex.quote(str(small))} || exit 99
        {limits} {shlex.join(command)}
        code=$?
        rm -f {small}/run/fill
        cp -r {small}/. {kept}
        exit $code
    """
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", in_namespace],
        cwd=directory,
        env=clean_environ(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    return done, kept / "run"


def test_the_verdict_has_its_place_on_a_full_disk(private_mounts: None, tmp_path: Path) -> None:
    done, run = launch(tmp_path, FILL, size="8m")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("No space left on device (no space, or no inodes") == 1
    assert json.loads((run / "verdict.json").read_text())["outcome"] == "completed"
    assert sorted(path.name for path in run.glob(".*")) == []


KILLED = """
import os, signal
from torch import distributed
from ncclops import receipt

distributed.init_process_group("gloo")
for step in range(5):
    receipt.step(step)
    distributed.barrier()
    if step == 2 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
distributed.destroy_process_group()
"""
# By another program, once the files of the ranks are made, and before a rank has begun.
FULL_EARLY = """
    (cd {small}; until [ -e run/store.log ]; do sleep 0.01; done
     dd if=/dev/zero of=run/fill bs=4k) >/dev/null 2>&1 &
"""


@pytest.mark.extended
def test_on_a_disk_that_was_full_early_the_others_go_on_without_a_rank_that_was_killed(
    private_mounts: None, tmp_path: Path
) -> None:
    """The agent has been told that the ranks had begun, and what they did is on record."""
    full_early = FULL_EARLY.format(small=shlex.quote(str(tmp_path / "small")))
    done, run = launch(tmp_path, "pass", size="8m", limits=full_early, program=KILLED)
    assert done.returncode == 0, done.stderr
    verdict = json.loads((run / "verdict.json").read_text())
    assert "the others went on" in verdict["reason"]
    assert verdict["receipt"]["verdict"] == "incomplete"
    assert list(run.glob("incidents/*/.*")) == []


def test_a_full_disk_below_standard_error_stops_nothing(tmp_path: Path) -> None:
    """As of ``2> job.log``. It was full before the first line."""
    (tmp_path / "train.py").write_text(TRAIN.format(act="pass"))
    command = [sys.executable, "-m", "ncclops", "launch", "--nproc-per-node", "2"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*command, "--restart", "process", "--run-dir", "run", "train.py"],
            cwd=tmp_path,
            env=clean_environ(),
            stdout=subprocess.PIPE,
            stderr=full,
            text=True,
            timeout=LIMIT_S,
        )
    assert (done.returncode, "trained" in done.stdout) == (0, True)
    verdict = json.loads((tmp_path / "run/verdict.json").read_text())
    assert verdict["outcome"] == "completed"


def test_a_full_disk_is_refused_at_the_start(private_mounts: None, tmp_path: Path) -> None:
    done, run = launch(tmp_path, "pass", size="100k")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "No space left on device" in done.stderr
    assert not (run / "run.json").exists()


def test_a_directory_in_which_nothing_could_be_recorded_is_not_taken(
    private_mounts: None, tmp_path: Path
) -> None:
    done, run = launch(tmp_path, "pass", size="8m", limits="ulimit -f 1;")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "raise `ulimit -f`" in done.stderr
    assert list(run.iterdir()) == []


@pytest.mark.extended
def test_a_verdict_that_cannot_be_written_is_not_pointed_to(
    private_mounts: None, tmp_path: Path
) -> None:
    done, _ = launch(
        tmp_path, '(run / "verdict.json").mkdir(); (run / "verdict.json/x").touch()', size="8m"
    )
    assert done.returncode == 0
    assert "verdict: cannot be written (" in done.stderr


def test_records_that_hang_do_not_hold_up_the_run(private_mounts: None, tmp_path: Path) -> None:
    """A pipe without a reader, as a file on a server that has gone."""
    done, run = launch(tmp_path, PIPE, size="8m")
    assert done.returncode == 0, done.stderr
    assert json.loads((run / "verdict.json").read_text())["outcome"] == "completed"


# In the first attempt, of the files named.
REPLACE = """
import os, sys
from pathlib import Path
from ncclops import receipt

run = Path(os.environ["NCCLOPS_RUN_DIR"])
for step in range(3):
    receipt.step(step)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    for name in sys.argv[1:]:
        (run / name).rename(run / "before")
        os.mkfifo(run / name)
    sys.exit(3)
"""


@pytest.mark.parametrize(
    ("replaced", "code", "said"),
    [
        (["ranks/0/worker.jsonl", "ranks/0/receipt.jsonl", "agent.log"], 0, "completed after"),
        (["store.log"], 1, "cannot start attempt 2: it is no regular file"),
        pytest.param(
            ["ranks/0/stderr.log"],
            1,
            "cannot start attempt 2: it is no regular file",
            marks=pytest.mark.extended,
        ),
    ],
)
def test_pipes_in_place_of_files_hold_up_no_decision(
    replaced: list[str], code: int, said: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(REPLACE)
    run = tmp_path / "run"
    command = [sys.executable, "-m", "ncclops", "launch", "--nproc-per-node", "1"]
    command += ["--restart", "process", "--max-restarts", "1", "--run-dir", str(run)]
    command += [str(tmp_path / "train.py"), *replaced]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=clean_environ(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert json.loads((run / "verdict.json").read_text())["exit_code"] == code


def test_without_inodes_the_end_is_explained_and_no_absent_file_named(
    private_mounts: None, tmp_path: Path
) -> None:
    done, run = launch(tmp_path, "pass", size="8m,nr_inodes=5")
    assert done.returncode == 1
    assert "df -i" in done.stderr and "agent.log)" not in done.stderr
    assert json.loads((run / "verdict.json").read_text())["outcome"] == "failed"
    assert done.stderr.splitlines()[-1].startswith("ncclops: verdict: ")


@pytest.mark.parametrize("most", [10, 20])
def test_without_descriptors_there_is_a_verdict(
    most: int, private_mounts: None, tmp_path: Path
) -> None:
    done, run = launch(tmp_path, "pass", size="8m", limits=f"ulimit -n {most};")
    assert done.returncode == 1
    reason = json.loads((run / "verdict.json").read_text())["reason"]
    assert f"open files are limited to {most}: raise `ulimit -n`" in reason
    assert "internal error" not in done.stderr and "Traceback" not in done.stderr
