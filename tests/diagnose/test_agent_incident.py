"""The incident of a team that the agent ends: whom it blames, and what each rank has left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ncclops.diagnose.agent_incident import ProcessEnd, record_end
from ncclops.record import snapshot_files
from ncclops.record.paths import INCIDENT

FAILED, KILLED = ProcessEnd(1, None), ProcessEnd(None, "SIGKILL")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for rank in (0, 1):
        (tmp_path / "ranks" / str(rank)).mkdir(parents=True)
    return tmp_path


def record(directory: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((directory / INCIDENT).read_text())
    return document


def test_a_rank_that_left_an_exception_is_blamed_with_it(run: Path) -> None:
    """In torchelastic's form, which scripts write, too."""
    message = {"message": "ValueError: bad", "extraInfo": {"py_callstack": "Traceback: there"}}
    (run / "ranks" / "1" / "error-2.json").write_text(json.dumps({"message": message}))
    made = record(
        record_end(run, ended={1: FAILED, 0: ProcessEnd(None, "SIGTERM")}, running=[], attempt=2)
    )
    assert (made["cause"], made["summary"]) == ("exception", "ValueError: bad")
    assert (made["exception"], made["traceback"]) == ("ValueError: bad", "Traceback: there")
    assert (made["first_faulty_rank"], made["faulty_ranks"]) == (1, [1, 0])
    assert (made["world_size_before"], made["world_size"]) == (2, 0)


ABSENT = "ncclops.worker.meeting.AbsentRanksError: waited 6 s for ranks {} of 40, {}"
NOT_COME = "which had not come to the making of group mesh:dp: rank 1 on n0 is at a.py:6 in f"


@pytest.mark.parametrize(
    ("said", "absent"),
    [
        (ABSENT.format("1, 3-5", NOT_COME), [1, 3, 4, 5]),
        (ABSENT.format("0-15 and 9 more", NOT_COME), list(range(16))),
        (ABSENT.format("1-999999999", NOT_COME), list(range(1, 17))),
        (ABSENT.format("-, 5-, 3-1", NOT_COME), [5]),
        # After ranks were lost numbers do not say which rank of the job it is.
        (ABSENT.format("1", "which had not come to the making of group 3"), []),
        ("ValueError: bad", []),
    ],
)
def test_ranks_that_did_not_come_are_beside_the_one_that_waited(
    run: Path, said: str, absent: list[int]
) -> None:
    message = {"message": said, "extraInfo": {"py_callstack": "Traceback: there"}}
    (run / "ranks" / "0" / "error-0.json").write_text(json.dumps({"message": message}))
    made = record(record_end(run, ended={0: FAILED}, running=[], attempt=0))
    assert (made["first_faulty_rank"], made["absent_ranks"]) == (0, absent)


@pytest.mark.parametrize("left", [None, "", "{", "[]", '{"message": 5}', '{"message": {}}'])
def test_without_an_exception_it_is_how_the_process_ended(run: Path, left: str | None) -> None:
    if left is not None:
        (run / "ranks" / "0" / "error-0.json").write_text(left)
    made = record(record_end(run, ended={0: KILLED}, running=[], attempt=0))
    assert (made["cause"], made["exception"]) == ("died", None)
    assert made["summary"] == "rank 0: the process ended (SIGKILL)"


def test_a_rank_that_hangs_is_blamed_before_those_that_ended(run: Path) -> None:
    made = record(
        record_end(
            run,
            ended={0: ProcessEnd(None, "SIGABRT")},
            running=[],
            attempt=0,
            hung={1: "no step for 9m"},
        )
    )
    assert (made["cause"], made["first_faulty_rank"]) == ("hung", 1)
    assert made["summary"] == "rank 1 hangs: no step for 9m"
    assert made["ranks_lost"] == [0]


def test_incidents_are_numbered_and_say_why_a_snapshot_is_missing(run: Path) -> None:
    first = record_end(run, ended={0: KILLED}, running=[], attempt=0)
    second = record_end(run, ended={0: KILLED}, running=[], attempt=1)
    assert [first.name, second.name] == ["0", "1"]
    missing = json.loads((snapshot_files.rank_dir(second, 0) / snapshot_files.MISSING).read_text())
    assert missing["reason"] == "its process has ended (SIGKILL)"


@pytest.mark.parametrize(
    ("how", "fields"),
    [
        (KILLED, (True, False, "SIGKILL")),
        (FAILED, (True, False, None)),
        (ProcessEnd(0, None), (True, True, None)),
    ],
)
def test_how_a_process_ended_is_in_fields(
    run: Path, how: ProcessEnd, fields: tuple[bool, bool, str | None]
) -> None:
    """A rank that finished, while its peers wait for it, did not die."""
    made = record_end(run, ended={0: FAILED, 1: how}, running=[], attempt=0)
    missing = json.loads((snapshot_files.rank_dir(made, 1) / snapshot_files.MISSING).read_text())
    assert (missing["ended"], missing["ended_well"], missing["ended_signal"]) == fields
