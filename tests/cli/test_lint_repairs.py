"""`ncclops env lint --fix`, `--sarif`, and the hook for repositories."""

from __future__ import annotations

import json
import re
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
    for name in ("run.sh", "a/job.sbatch", "k8s/pod.yaml", "Dockerfile.gpu", "a/.env", "nccl.conf"):
        assert re.search(hook["files"], name), name
    assert not re.search(hook["files"], "README.md")
