"""The stack line has the versions of what is installed, and a dash for what is not."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from ncclops.host.gpus import Gpus
from ncclops.launch.stack import find_stack
from tests.conftest import clean_environ

pytestmark = pytest.mark.slow


def test_versions_are_those_that_torch_itself_would_report(tmp_path: Path) -> None:
    asked = "import torch; print(torch.__version__, torch.version.cuda)"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    version, cuda = done.stdout.split()
    stack = find_stack(Gpus(("NVIDIA H200",) * 8, "570.86"), tmp_path)
    assert (stack.torch, stack.cuda or "None") == (version, cuda)
    assert stack.python == platform.python_version()
    assert (stack.gpu, stack.driver) == ("8 × NVIDIA H200", "570.86")


def test_a_missing_part_reads_as_a_dash(tmp_path: Path) -> None:
    line = find_stack(Gpus(), tmp_path).line()
    for part in ("GPU -", "driver -", "commit -"):
        assert part in line
    try:
        importlib.metadata.version("flash-attn")
    except importlib.metadata.PackageNotFoundError:
        assert "flash-attn -" in line


def test_the_commit_is_the_scripts_own(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=t", "-c", "user.email=t@t"]
        return subprocess.run(
            ["git", "-C", str(tmp_path), *identity, *arguments],
            env=clean_environ(),
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()

    git("init", "-q")
    (tmp_path / "train.py").write_text("1")
    git("add", ".")
    git("commit", "-qm", "one")
    assert find_stack(Gpus(), tmp_path).commit == git("rev-parse", "--short=12", "HEAD")
    (tmp_path / "train.py").write_text("2")
    assert str(find_stack(Gpus(), tmp_path).commit).endswith("+changes")
