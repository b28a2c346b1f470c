"""A run directory that is moved is followed by a link in its old place, as far as that can be."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from queue import Queue

import pytest

from ncclops.agent.moved import MoveWatch
from ncclops.record import runs
from ncclops.record.paths import EVENTS
from tests.conftest import LIMIT_S

Said = Callable[[], str]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "runs" / "run"
    path.mkdir(parents=True)
    (path / EVENTS).touch()
    return path


@pytest.fixture
def said(run: Path) -> Said:
    """The next line of a watch of ``run``."""
    lines: Queue[str] = Queue()
    MoveWatch(run, lines.put).start()
    return lambda: lines.get(timeout=LIMIT_S)


def test_it_is_found_at_its_old_path_however_often_it_is_moved(run: Path, said: Said) -> None:
    (run.parent / "first").mkdir()
    for number, moved in enumerate((run.parent / "first" / "run", run.parent / "second")):
        if number == 0:
            run.rename(moved)
        else:
            (run.parent / "first" / "run").rename(moved)
        assert said() == (
            f"the run directory was moved to {moved}: the run goes on by {run}, where a link leads"
            " to it from now on"
        )
        assert run.samefile(moved)
    assert runs.find(None, parent=run.parent).path == run.parent / "second"
    for text in ("run", "second", "ru"):
        assert runs.find(text, parent=run.parent).path == run.parent / "second"


def test_with_a_directory_above_it_it_is_found_as_well(
    run: Path, said: Said, tmp_path: Path
) -> None:
    for before, after in (("runs", "old-runs"), ("old-runs", "older-runs")):
        (tmp_path / before).rename(tmp_path / after)
        assert "goes on by" in said()
        assert run.samefile(tmp_path / after / "run")
    assert run.parent.is_symlink()


def test_where_something_else_is_in_its_place_that_is_said(
    run: Path, said: Said, tmp_path: Path
) -> None:
    shutil.copytree(run, tmp_path / "copy")
    run.rename(tmp_path / "moved")
    said()
    run.unlink()
    (tmp_path / "copy").rename(run)
    (tmp_path / "moved").rename(tmp_path / "again")
    assert f"{run} cannot be made a link to it (File exists)" in said()
    assert not run.is_symlink()
