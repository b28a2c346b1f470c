"""docs/examples/slurm.sbatch, with stand-ins for Slurm's programs: what follows which exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import LIMIT_S, REPOSITORY, clean_environ

SCRIPT = REPOSITORY / "docs" / "examples" / "slurm.sbatch"
pytestmark = pytest.mark.slow

# Each writes down how it was called. srun ends as the test says, or runs what it is given, and a
# check of the nodes excludes those that the test names.
STUB = """#!{python}
import json, os, pathlib, subprocess, sys
name, arguments = pathlib.Path(sys.argv[0]).name, sys.argv[1:]
with open("calls.jsonl", "a") as file:
    file.write(json.dumps([name, *arguments]) + "\\n")
if name == "srun":
    command = arguments[arguments.index("ncclops"):]
    if "preflight" in command:
        excluded = os.environ.get("STUB_EXCLUDES", "")
        if excluded:
            pathlib.Path(command[command.index("--exclude-file") + 1]).write_text(excluded)
    elif "STUB_CODE" in os.environ:
        sys.exit(int(os.environ["STUB_CODE"]))
    else:
        sys.exit(subprocess.run([sys.executable, "-m", *command]).returncode)
"""

Submit = Callable[..., tuple[int, list[list[str]]]]


@pytest.fixture
def submit(tmp_path: Path) -> Submit:
    """``submit("train.py", STUB_CODE="75")``: the script's exit code, and each call of Slurm."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("srun", "scontrol", "sbatch"):
        (programs / name).write_text(STUB.format(python=sys.executable))
        (programs / name).chmod(0o755)
    spooled = tmp_path / "slurm_script"  # where slurmd has put it
    spooled.write_bytes(SCRIPT.read_bytes())

    def run(*arguments: str, **variables: str) -> tuple[int, list[list[str]]]:
        calls = tmp_path / "calls.jsonl"
        calls.unlink(missing_ok=True)
        environ = clean_environ({"SLURM_JOB_ID": "4711", **variables})
        environ["PATH"] = f"{programs}:{environ['PATH']}"
        done = subprocess.run(
            ["bash", spooled, *arguments],
            cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=LIMIT_S,
        )  # fmt: skip
        assert "unbound variable" not in done.stderr
        return done.returncode, [json.loads(line) for line in calls.read_text().splitlines()]

    return run


def test_the_script_is_one_that_bash_can_read() -> None:
    subprocess.run(["bash", "-n", SCRIPT], check=True, timeout=LIMIT_S)


@pytest.mark.parametrize(
    ("code", "after"),
    [
        (0, []),
        (1, []),
        (2, []),
        (78, []),
        (75, [["scontrol", "requeue", "4711"]]),
        (143, [["scontrol", "requeue", "4711"]]),
    ],
)
def test_another_start_follows_where_it_may_help(
    code: int, after: list[list[str]], submit: Submit
) -> None:
    done, (launch, *rest) = submit("train.py", "--lr", "3e-4", STUB_CODE=str(code))
    assert (done, rest) == (code, after)
    assert launch[:4] == ["srun", "--kill-on-bad-exit=0", "--cpus-per-task=1", "ncclops"]
    assert launch[-5:] == ["--run-dir", "runs/4711.0", "train.py", "--lr", "3e-4"]


def test_a_node_that_is_not_fit_is_excluded_from_the_next_job(
    submit: Submit, tmp_path: Path
) -> None:
    code, (_, check, again) = submit("train.py", STUB_CODE="76", STUB_EXCLUDES="gpu07\n")
    assert code == 76
    assert check[2:] == [
        "ncclops", "preflight", "--no-exit-code", "--exclude-file", "runs/slurm-4711.exclude",
    ]  # fmt: skip
    assert again == [
        "sbatch", "--exclude=./runs/slurm-4711.exclude", "runs/slurm-4711.sbatch", "train.py",
    ]  # fmt: skip
    assert (tmp_path / again[2]).read_bytes() == SCRIPT.read_bytes()


def test_the_next_job_is_the_same_one_and_keeps_the_list(submit: Submit) -> None:
    submit(STUB_CODE="76", STUB_EXCLUDES="gpu07\n")
    name = {"NCCLOPS_JOB_ID": "slurm-4711", "SLURM_JOB_ID": "4800"}  # sbatch hands on the first
    _, (launch, again) = submit(STUB_CODE="75", **name)
    assert "runs/4800.0" in launch
    assert again[:2] == ["sbatch", "--exclude=./runs/slurm-4711.exclude"]


def test_where_all_nodes_are_fit_the_job_is_requeued(submit: Submit) -> None:
    code, calls = submit(STUB_CODE="76")
    assert (code, calls[-1]) == (76, ["scontrol", "requeue", "4711"])


def test_it_does_not_start_for_ever(submit: Submit) -> None:
    for _ in range(5):
        _, calls = submit(STUB_CODE="75")
        assert calls[-1][0] == "scontrol"
    code, calls = submit(STUB_CODE="75")
    assert (code, [call[0] for call in calls]) == (75, ["srun"])


def test_a_mistake_of_the_script_starts_nothing_again(submit: Submit, tmp_path: Path) -> None:
    """With the real `ncclops launch`, whose exit code it is."""
    (tmp_path / "train.py").write_text("raise KeyError('no such column')\n")
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "here.toml").write_text(
        'description = "here"\nextends = "local-cpu"\n[preflight]\nignore = ["host.nofile",'
        ' "host.shm", "host.space", "host.pids", "host.name", "host.readable"]\n'
    )
    given = ("--profile", "here", "--restart", "none", "train.py")
    code, calls = submit(*given, SLURM_RESTART_COUNT="2")
    verdict = json.loads((tmp_path / "runs" / "4711.2" / "verdict.json").read_text())
    assert (code, len(calls)) == (78, 1)
    assert (verdict["exit_code"], verdict["next_action"]) == (78, "fix")
