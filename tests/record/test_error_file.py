"""The error file of a worker: read whatever has become of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ncclops.record.error_file import RecordedError, parse_error, read_error


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ({"message": "boom\n  at 3"}, RecordedError("boom\n  at 3", "boom\n  at 3")),
        (
            {"message": {"message": "E: x", "extraInfo": {"py_callstack": "Traceback"}}},
            RecordedError("E: x", "Traceback"),
        ),
        ({"message": {"message": "E: x"}}, RecordedError("E: x", None)),
        ({"message": {"extraInfo": {}}}, None),
        ({"message": None}, None),
        ({}, None),
        ([1], None),
    ],
)
def test_forms_of_the_file(content: Any, error: RecordedError | None, tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    path.write_text(json.dumps(content))
    assert read_error(path) == error


@pytest.mark.parametrize(
    ("timestamp", "at"),
    [
        *[("1760000000", 1.76e9), (1.76e9, 1.76e9), ("soon", None), (None, None), ([], None)],
        *[(0, None), (-5, None), (1e300, None), (10**400, None), ("nan", None), ("inf", None)],
    ],
)
def test_a_time_that_is_none_is_left_out(timestamp: Any, at: float | None) -> None:
    document = {"message": {"message": "E: x", "extraInfo": {"timestamp": timestamp}}}
    assert parse_error(json.dumps(document).encode()) == RecordedError("E: x", None, at)


@pytest.mark.parametrize("raw", ["", "{", "[" * 200_000, '{"message": "' + "x" * (1 << 20) + '"}'])
def test_damaged_nested_and_huge_files_are_none(raw: str, tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    path.write_text(raw)
    assert read_error(path) is None
    assert read_error(tmp_path / "missing.json") is None
    assert read_error(tmp_path) is None


@pytest.mark.parametrize(
    ("message", "headline"), [("", None), ("\n \n", None), ("\n E: x \n", "E: x")]
)
def test_the_headline_is_the_first_line_with_text(message: str, headline: str | None) -> None:
    assert RecordedError(message, None).headline == headline
