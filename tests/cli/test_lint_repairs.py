"""`ncclops env lint --fix`, `--sarif`, and the hook for repositories."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

WRONG = "export NCCL_IB_TIMOUT=22\nexport NCCL_NTHREADS=fast\npython t.py\n"


def test_fix_writes_the_safe_repairs_and_shows_them(
    ncclops_in_process: Callable[..., Any], tmp_path: Path
) -> None:
    script = tmp_path / "job.sh"
    script.write_bytes(WRONG.replace("\n", "\r\n").encode())
    script.chmod(0o755)
    shown = ncclops_in_process("env", "lint", "--fix", "--dry-run", str(script))
    assert "-export NCCL_IB_TIMOUT=22" in shown.stdout
    assert "+export NCCL_IB_TIMEOUT=22" in shown.stdout
    assert script.read_bytes() == WRONG.replace("\n", "\r\n").encode()
    made = ncclops_in_process("env", "lint", "--fix", str(script))
    assert made.returncode == 1  # what is left is an error
    assert "[unknown-name]" not in made.stdout
    assert "[bad-value]" in made.stdout
    mended = WRONG.replace("TIMOUT", "TIMEOUT").replace("\n", "\r\n").encode()
    assert script.read_bytes() == mended
    assert script.stat().st_mode & 0o777 == 0o755
    again = ncclops_in_process("env", "lint", "--fix", str(script))
    assert "+export" not in again.stdout
    assert script.read_bytes() == mended


def test_sarif_is_one_document(ncclops_in_process: Callable[..., Any], tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(WRONG, encoding="utf-8")
    ran = ncclops_in_process("env", "lint", "--sarif", str(script))
    assert ran.returncode == 1
    (run,) = json.loads(ran.stdout)["runs"]
    assert {result["ruleId"] for result in run["results"]} == {"unknown-name", "bad-value"}
    clean = ncclops_in_process("env", "lint", "--sarif", "--fix", "--dry-run", str(script))
    assert json.loads(clean.stdout)["version"] == "2.1.0"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dry-run", "x.sh"], "say --fix too"),
        (["--fix"], "--fix repairs files: name them"),
        (["--fix", "-"], "--fix repairs files: name them"),
        (["--json", "--sarif"], "choose one"),
    ],
)
def test_wrong_usage(
    ncclops_in_process: Callable[..., Any], arguments: list[str], message: str
) -> None:
    ran = ncclops_in_process("env", "lint", *arguments)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert message in ran.stderr


def test_the_hook_takes_launch_files() -> None:
    top = Path(__file__).parents[2]
    (hook,) = yaml.safe_load((top / ".pre-commit-hooks.yaml").read_text("utf-8"))
    assert hook["entry"] == "ncclops env lint"
    for name in (
        "run.sh",
        "run.csh",
        "a/job.sbatch",
        "a/x.job",
        "k8s/pod.yaml",
        "Dockerfile.gpu",
        "a/.env",
        "nccl.conf",
    ):
        assert re.search(hook["files"], name), name
    assert not re.search(hook["files"], "README.md")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A new git repository with a right and a wrong launch file, and one that is none."""
    top = tmp_path / "launch-files"
    (top / "k8s").mkdir(parents=True)
    (top / "right.sh").write_text("export NCCL_DEBUG=WARN\npython t.py\n", encoding="utf-8")
    (top / "k8s" / "pod.yaml").write_text(
        "env:\n- {name: NCCL_NTHREADS, value: fast}\n", encoding="utf-8"
    )
    (top / "README.md").write_text("export NCCL_NTHREADS=slow\n", encoding="utf-8")
    _git(top, "init", "--quiet")
    _git(top, "add", ".")
    return top


def _git(top: Path, *arguments: str) -> None:
    who = ["-c", "user.name=t", "-c", "user.email=t@localhost", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *who, *arguments], cwd=top, check=True, capture_output=True)


@pytest.fixture
def hooks(tmp_path: Path) -> Path:
    """A git repository with this project's hooks, as pre-commit clones it."""
    top = tmp_path / "hooks"
    top.mkdir()
    shutil.copy(Path(__file__).parents[2] / ".pre-commit-hooks.yaml", top)
    _git(top, "init", "--quiet")
    _git(top, "add", ".")
    _git(top, "commit", "--quiet", "-m", "hooks")
    return top


def _pre_commit(repository: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = shutil.which("ncclops", path=Path(sys.executable).parent)
    assert command, "ncclops is installed beside this Python"
    path = f"{Path(command).parent}{os.pathsep}{os.environ['PATH']}"
    home = repository.parent / "pre-commit-home"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    return subprocess.run(
        [sys.executable, "-m", "pre_commit", *arguments],
        cwd=repository,
        env={**environment, "PATH": path, "PRE_COMMIT_HOME": str(home), "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_pre_commit_runs_the_hook_on_launch_files(repository: Path, hooks: Path) -> None:
    ran = _pre_commit(repository, "try-repo", str(hooks), "ncclops-env-lint", "--all-files")
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "k8s/pod.yaml:2: error: NCCL_NTHREADS" in ran.stdout
    assert "README.md" not in ran.stdout
    assert "right.sh:" not in ran.stdout
    (repository / "k8s" / "pod.yaml").write_text("env: []\n", encoding="utf-8")
    mended = _pre_commit(repository, "try-repo", str(hooks), "ncclops-env-lint", "--all-files")
    assert mended.returncode == 0, mended.stdout + mended.stderr


@pytest.mark.slow
def test_pre_commit_with_the_configuration_of_the_documentation(
    repository: Path, hooks: Path
) -> None:
    """With ``--no-exit-code`` it tells, in verbose runs, and stops nothing."""
    page = (Path(__file__).parents[2] / "docs" / "environment.md").read_text("utf-8")
    (example,) = re.findall(r"```yaml\n(- repo:.*?)```", page, re.DOTALL)
    entries = yaml.safe_load(example)
    entries[0]["repo"] = str(hooks)
    entries[0]["rev"] = "HEAD"
    config = repository / ".pre-commit-config.yaml"
    config.write_text(yaml.safe_dump({"repos": entries}), encoding="utf-8")
    _git(repository, "add", config.name)
    ran = _pre_commit(repository, "run", "--all-files", "--verbose")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "k8s/pod.yaml:2: error: NCCL_NTHREADS" in ran.stdout
