"""Damage that chance seldom does, in all files of a run at once: every command still answers."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.hostile.commands import Commands

pytestmark = pytest.mark.slow

_NUMBER = re.compile(r"(?<=: )-?\d+(?:\.\d+)?(?=[,\n}\]])|(?<=:)-?\d+(?:\.\d+)?(?=[,\n}\]])")
# Names that are digits for str.isdigit, and none for int().
_NAMES = ("²", "1e3", "-1", "a\nb", "\x1b[2J", "\u202egol", "<b>", "9" * 200)


def _records(run: Path) -> list[Path]:
    return [path for path in run.rglob("*.json*") if path.is_file()]


def _all_numbers(value: str, run: Path) -> None:
    """Of all documents and lines, but for what says of which kind they are."""
    for path in _records(run):
        path.write_text(_NUMBER.sub(value, path.read_text()))


def _nested(field: str, run: Path) -> None:
    """Every second field of each document and line holds ``field``."""
    for path in _records(run):
        lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        path.write_text("".join(_with_every_second(line, field) + "\n" for line in lines))


def _with_every_second(text: str, field: str) -> str:
    document = json.loads(text)
    if not isinstance(document, dict):
        return field
    parts = [
        f"{json.dumps(name)}: {field if number % 2 else json.dumps(value)}"
        for number, (name, value) in enumerate(document.items())
    ]
    return f"{{{', '.join(parts)}}}"


def _names(run: Path) -> None:
    for folder in ("ranks", "incidents", "nodes"):
        for name in _NAMES:
            made = run / folder / name
            made.mkdir(parents=True, exist_ok=True)
            (made / "stderr.log").write_text("RuntimeError: on purpose\n")


def _pipes(run: Path) -> None:
    """In the place of every file."""
    for path in run.rglob("*"):
        if path.is_file():
            path.unlink()
            os.mkfifo(path)
    os.mkfifo(run / "ras.json")
    os.mkfifo(run / "ras.txt")


WAYS: dict[str, Callable[[Path], None]] = {
    "numbers beyond all": partial(_all_numbers, "1e400"),
    "dates of the year 10^9": partial(_all_numbers, "31556889864403200"),
    "dates of the year 10000": partial(_all_numbers, "253402300800.5"),
    "objects for texts": partial(_nested, '{"a": [1]}'),
    "400 levels": partial(_nested, '{"a":' * 400 + "1" + "}" * 400),
    "900 levels": partial(_nested, "[" * 900 + "]" * 900),
    "names": _names,
    "pipes": _pipes,
}


# The others are repetitions, in the form of other values.
_FIRST = ("objects for texts", "900 levels", "names", "pipes")


@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=() if way in _FIRST else pytest.mark.extended) for way in WAYS],
)
def test_every_command_answers(way: str, run: Path, commands: Commands, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run", symlinks=True)
    WAYS[way](tmp_path / "run")
    assert commands.complaints(tmp_path) == []
