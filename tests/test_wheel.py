"""The wheel holds all that the commands need: they run from it alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import LIMIT_S, REPOSITORY

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the wheel's content, as an installer would lay it out."""
    directory = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory)]
    subprocess.run(build, cwd=REPOSITORY, check=True, capture_output=True, timeout=LIMIT_S)
    (wheel,) = directory.glob("*.whl")
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index"]
    target = directory / "site"
    subprocess.run([*install, "--target", str(target), str(wheel)], check=True, timeout=LIMIT_S)
    return target


def run(site: Path, cwd: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_shipped_profiles_are_found_in_it(site: Path, tmp_path: Path) -> None:
    where = run(site, tmp_path, "-c", "import ncclops; print(ncclops.__file__)")
    assert where.startswith(str(site))
    listed = run(site, tmp_path, "-m", "ncclops", "profile", "list")
    shipped = {path.stem for path in (REPOSITORY / "profiles").glob("*.toml")}
    assert shipped >= {"single-node-h200", "multi-host-h200", "local-cpu", "regional-compile"}
    assert shipped <= set(listed.split())
    assert "NCCL_NVLS_ENABLE" in run(
        site, tmp_path, "-m", "ncclops", "env", "diff", "--profile", "single-node-h200"
    )


def test_it_launches(site: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('trained')")
    arguments = ("launch", "--profile", "local-cpu", "--nproc-per-node", "1", "train.py")
    assert "[rank0]: trained" in run(site, tmp_path, "-m", "ncclops", *arguments)
