"""The names of a run directory's files are known to the record alone."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path

import ncclops
from ncclops.record.paths import RankPaths, RunPaths, numbered

SOURCE = Path(ncclops.__file__).parent


def names() -> set[str]:
    """What the files and directories of a run are called."""
    run, rank = RunPaths(Path("run")), RankPaths(Path("rank"))
    found = set()
    for paths in (run, rank):
        own = {field.name for field in fields(paths)}
        for name, value in vars(type(paths)).items():
            if isinstance(value, property) and name not in own:
                found.add(getattr(paths, name).name)
    return found


def joined(path: Path) -> Iterator[str]:
    """The names that a module joins to a path."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.BinOp(op=ast.Div(), right=ast.Constant(value=str(name))):
                yield from name.split("/")


def test_no_other_package_joins_them() -> None:
    assert {"ranks", "events.jsonl", "stderr.log", "http.sock", "receipt.jsonl"} <= names()
    found = [
        f"{path.relative_to(SOURCE)}: {name}"
        for path in SOURCE.rglob("*.py")
        if path.parent.name != "record"
        for name in joined(path)
        if name in names()
    ]
    assert not found


def test_every_file_of_a_run_has_a_place_of_its_own() -> None:
    run = RunPaths(Path("run"))
    both = [run.rank(0), run.rank(1)]
    paths = [getattr(rank, name) for rank in both for name in ("receipt", "progress", "stdout_log")]
    paths += [both[0].error(0), both[0].error(1), run.incident(0), run.incident(1), run.events]
    assert len(set(paths)) == len(paths)


def test_numbered_entries_are_in_order_and_others_are_left_out(tmp_path: Path) -> None:
    for name in ("10", "9", "0", "x", ".2", "-1"):
        (tmp_path / name).mkdir()
    assert numbered(tmp_path) == [0, 9, 10]
    assert numbered(tmp_path / "nowhere") == []


def test_a_directory_without_events_holds_no_run(tmp_path: Path) -> None:
    assert not RunPaths(tmp_path).holds_run()
    RunPaths(tmp_path).events.touch()
    assert RunPaths(tmp_path).holds_run()


def test_what_a_worker_puts_in_the_place_of_the_events_hides_no_run(tmp_path: Path) -> None:
    events = RunPaths(tmp_path).events
    for put in (events.mkdir, partial(os.mkfifo, events), partial(events.symlink_to, "nowhere")):
        put()
        assert RunPaths(tmp_path).holds_run()
        events.rmdir() if events.is_dir() else events.unlink()
    assert not RunPaths(tmp_path).holds_run()
