"""Documents of a run directory: whole when written, and no fault when read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ncclops.record import incident_record
from ncclops.record.documents import read_document, read_list, write_document
from ncclops.record.incident_record import IncidentRecord
from tests.conftest import clean_environ
from tests.record.strategies import of_struct

PER_FILE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[1", b"7", b"null", b"\xff\xfe", b'{"a":' * 100_000, b"[" * 100_000, b'["a"]'],
)
def test_what_is_no_object_is_read_as_an_empty_one(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "document.json"
    path.write_bytes(content)
    assert read_document(path) == {}
    assert read_list(path) == []


def test_a_document_that_is_not_there_is_empty(tmp_path: Path) -> None:
    assert read_document(tmp_path / "document.json") == {}


def test_numbers_that_are_not_finite_are_read_as_null(tmp_path: Path) -> None:
    path = tmp_path / "document.json"
    path.write_text('{"a": NaN, "b": -Infinity, "c": 1e999, "d": 1.5}')
    assert read_document(path) == {"a": None, "b": None, "c": None, "d": 1.5}


def test_a_link_that_waits_for_the_draft_is_not_followed(tmp_path: Path) -> None:
    """In a directory of another user's, who knows our process's number."""
    kept = tmp_path / "kept"
    kept.write_text("kept")
    (tmp_path / f".document.json.{os.getpid()}.partial").symlink_to(kept)
    write_document(tmp_path / "document.json", {"a": 1})
    assert read_document(tmp_path / "document.json") == {"a": 1}
    assert kept.read_text() == "kept"


@PER_FILE
@given(st.binary(max_size=200))
def test_no_content_is_a_fault(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "incident.json"
    path.write_bytes(content)
    read_document(path)
    read_list(path)
    incident_record.read(tmp_path)


@PER_FILE
@given(of_struct(IncidentRecord))
def test_an_incident_is_read_back_as_it_was_written(
    tmp_path: Path, incident: IncidentRecord
) -> None:
    incident_record.write(tmp_path, incident)
    assert incident_record.read(tmp_path) == incident


def test_an_incident_of_which_all_ranks_left_is_read_from_their_files(tmp_path: Path) -> None:
    incident = IncidentRecord(
        iteration=1, cause="left", summary="it left", first_faulty_rank=2, at=5.0
    )
    write_document(tmp_path / "left-rank0.json", {"cause": "damaged"})
    write_document(tmp_path / "left-rank2.json", incident.to_json() | {"of_a_later": "version"})
    assert incident_record.read(tmp_path) == incident


@pytest.mark.slow
def test_the_monitor_process_can_write_snapshots_without_any_package() -> None:
    """It starts without site packages, which takes a fifth of the time."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); import ncclops.capture.outside_view"
    source = str(Path(incident_record.__file__).parents[2])
    command = [sys.executable, "-I", "-S", "-c", code, source]
    done = subprocess.run(command, env=clean_environ(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
