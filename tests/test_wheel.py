"""Wheel and sdist: the same bytes wherever they are built, and all that the commands need."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.conftest import LIMIT_S, REPOSITORY

pytestmark = pytest.mark.slow


MOMENT = 1700000000  # 2023-11-14 22:13:20 UTC; a zip has even seconds


def build(
    source: Path,
    directory: Path,
    umask: int = 0o022,
    targets: Sequence[str] = (),
    **more: str,
) -> dict[str, Path]:
    """Wheel and sdist of ``source``, by the end of their names."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(directory), *targets],
        cwd=source,
        env={**os.environ, "SOURCE_DATE_EPOCH": str(MOMENT), **more},
        umask=umask,
        check=True,
        capture_output=True,
        timeout=LIMIT_S,
    )
    return {path.suffix: path for path in directory.iterdir()}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return build(REPOSITORY, tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="module")
def site(built: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the wheel's content, as an installer would lay it out."""
    wheel = built[".whl"]
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index"]
    target = tmp_path_factory.mktemp("wheel") / "site"
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


@pytest.mark.extended
def test_the_sdist_builds_the_same_bytes_elsewhere(built: dict[str, Path], tmp_path: Path) -> None:
    """In another folder, at another time, with another umask, zone and order of hashes."""
    with tarfile.open(built[".gz"]) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    for path in source.rglob("*"):
        os.utime(path, (1e9, 1e9))
    out = tmp_path / "out"
    again = build(source, out, 0o077, TZ="Asia/Tokyo", LC_ALL="C", PYTHONHASHSEED="7")
    assert again.keys() == {".whl", ".gz"}
    for kind, path in built.items():
        assert again[kind].name == path.name
        assert again[kind].read_bytes() == path.read_bytes(), kind


def test_what_the_container_file_copies_is_enough_for_the_same_wheel(
    built: dict[str, Path], tmp_path: Path
) -> None:
    """Its first stage, without a container: what .dockerignore lets through, copied and built."""
    let_through = tuple(
        line[1:]
        for line in (REPOSITORY / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    )
    first, last = (REPOSITORY / "Containerfile").read_text().split("\nFROM ")[1:]
    for line in re.findall(r"^COPY (?!--from)(.*)$", first + last, re.MULTILINE):
        *sources, target = line.split()
        for each in sources:
            assert each in let_through
            if line not in first:
                assert (REPOSITORY / each).is_file()
            elif (REPOSITORY / each).is_dir():
                shutil.copytree(REPOSITORY / each, tmp_path / target)
            else:
                shutil.copy(REPOSITORY / each, tmp_path / target)
    again = build(tmp_path, tmp_path / "out", targets=["-t", "wheel"])
    assert again[".whl"].read_bytes() == built[".whl"].read_bytes()


def test_the_container_runs_as_somebody_who_is_not_root() -> None:
    text = (REPOSITORY / "Containerfile").read_text()
    (user,) = re.findall(r"^USER (.*)$", text.rpartition("\nFROM ")[2], re.MULTILINE)
    uid = re.search(r"useradd .*--uid (\d+)", text)
    assert uid is not None
    assert user == f"{uid[1]}:{uid[1]}"
    assert int(uid[1]) > 1000


def test_files_have_the_time_that_was_asked_for(built: dict[str, Path]) -> None:
    with zipfile.ZipFile(built[".whl"]) as wheel:
        assert {each.date_time for each in wheel.infolist()} == {(2023, 11, 14, 22, 13, 20)}
    with tarfile.open(built[".gz"]) as sdist:
        assert {(each.mtime, each.uid, each.uname) for each in sdist} == {(MOMENT, 0, "")}


def test_they_hold_every_file_of_the_package(built: dict[str, Path]) -> None:
    def files(folder: str) -> set[str]:
        found = (REPOSITORY / folder).rglob("*")
        kept = (each for each in found if each.is_file() and "__pycache__" not in each.parts)
        return {str(each.relative_to(REPOSITORY)) for each in kept}

    with zipfile.ZipFile(built[".whl"]) as wheel:
        inside = set(wheel.namelist())
    assert {each.removeprefix("src/") for each in files("src")} <= inside
    assert {
        each.replace("profiles/", "ncclops/profiles/shipped/") for each in files("profiles")
    } <= (inside)
    with tarfile.open(built[".gz"]) as archive:
        inside = {each.name.partition("/")[2] for each in archive}
    assert {
        each for folder in ("src", "profiles", "scripts", "docs") for each in files(folder)
    } <= (inside)
    assert inside >= {
        "README.md",
        "CHANGELOG.md",
        "constraints.txt",
        "mkdocs.yml",
        "tests/lanes.py",
    }


def test_the_man_page_is_where_man_looks(site: Path) -> None:
    assert (site / "share/man/man1/ncclops.1").read_bytes() == (
        REPOSITORY / "docs/man/ncclops.1"
    ).read_bytes()


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
