"""``scripts/gpu_day`` is for real GPUs; here it runs on the fake one, in their place."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import LIMIT_S
from tests.fakegpu.host import Host
from tests.fakegpu.place import Place

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def gpu_day(
    fake_gpu_place: Place, host: Host, tmp_path: Path
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the script with these arguments and variables; the page is in ``tmp_path``."""

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [fake_gpu_place.python, SCRIPTS / "gpu_day_page.py", "--out", tmp_path, *arguments],
            env=os.environ | host.environment | variables,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )

    return run


@pytest.mark.extended
def test_the_page_compares_the_logs_of_two_ranks_on_one_gpu(
    gpu_day: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    done = gpu_day("--parts", "log", "--minutes", "40", FAKEGPU_DEVICES="1")
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "gpu-day.md").read_text()
    assert page.startswith("# 1 x NVIDIA H200, driver ")
    assert "Only the fake GPU writes:\n\n```\n\n```" in page
    assert "Only NCCL:\n\n```\n\n```" in page
    both = int(page.partition(" kinds of lines in both")[0].split()[-1])
    assert both > 5


def test_without_a_gpu_one_line_says_so(
    gpu_day: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = gpu_day(CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, done.stderr) == (3, "")
    assert done.stdout.count("\n") == 1
