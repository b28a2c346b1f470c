"""A failure of 512 ranks takes as many lines as one of two."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ncclops.agent.worker_messages import restart_line
from ncclops.diagnose import story_text
from ncclops.diagnose.incident_report import report_incident
from ncclops.diagnose.story import tell
from ncclops.record.documents import write_document
from ncclops.record.events import RestartEvent
from ncclops.record.paths import INCIDENT, RunPaths

TRACEBACK = (
    "Traceback (most recent call last):\n"
    '  File "/home/me/train.py", line 64, in <module>\n    main()\n'
    '  File "/home/me/train.py", line 61, in main\n    assert loss == loss\n'
)


def lines_of(run: Path, ranks: int) -> list[str]:
    """What the terminal shows of the same assertion on all ranks, each with its own batch."""
    faults = [
        {
            "kind": "exception",
            "initial_rank": rank,
            "summary": f"AssertionError: NaN in batch {rank}",
            "traceback": TRACEBACK,
        }
        for rank in range(ranks)
    ]
    record = {
        "iteration": 1,
        "cause": "exception",
        "summary": faults[0]["summary"],
        "exception": faults[0]["summary"],
        "traceback": TRACEBACK,
        "first_faulty_rank": 0,
        "faulty_ranks": list(range(ranks)),
        "faults": faults,
        "at": 1.0,
    }
    write_document(RunPaths(run).incident(0) / INCIDENT, record)
    told = tell(run, report_incident(run, None), None, None, node="n1", attempt=0)
    assert told is not None
    return [told.what, *(f"{label} {text}" for label, text in story_text.rows(told))]


@pytest.mark.slow
def test_the_story_of_512_ranks_is_as_long_as_that_of_two(tmp_path: Path) -> None:
    few, many = lines_of(tmp_path / "few", 2), lines_of(tmp_path / "many", 512)
    assert len(few) == len(many)
    assert few[0] == (
        "rank 0 raised AssertionError: NaN in batch 0 at /home/me/train.py:61 in main;"
        " 1 more rank raised the same"
    )
    assert many[0] == few[0].replace("1 more rank raised", "511 more ranks raised")
    assert many[1:-1] == few[1:-1]
    assert sum(map(len, many)) < 600


@pytest.mark.slow
def test_ranks_that_waited_for_the_culprit_have_not_raised_the_same(tmp_path: Path) -> None:
    """Two ranks gave up waiting, with the same words, for one that did not come."""
    gave_up = "DistStoreError: Timed out waiting for rank 1 to join 'default_pg'"
    faults = [
        {"kind": "exception", "initial_rank": rank, "summary": gave_up, "traceback": TRACEBACK}
        for rank in (0, 2)
    ]
    record = {
        "iteration": 1,
        "cause": "exception",
        "summary": gave_up,
        "exception": gave_up,
        "traceback": TRACEBACK,
        "first_faulty_rank": 0,
        "faulty_ranks": [0, 2],
        "faults": faults,
        "at": 1.0,
    }
    write_document(RunPaths(tmp_path).incident(0) / INCIDENT, record)
    report = report_incident(tmp_path, None)
    absent = replace(report, culprit=replace(report.culprit, rank=1))
    told = tell(tmp_path, absent, None, None, node="n1", attempt=0)
    assert told is not None
    assert "raised the same" not in told.what


def test_a_restart_is_one_line_that_counts_those_who_raised_the_same() -> None:
    event = RestartEvent(
        iteration=1,
        cause="AssertionError: NaN",
        faulty_ranks=list(range(512)),
        ranks_lost=[7, 8, 9],
        place="/home/me/train.py:61",
        alike=508,
    )
    assert restart_line(event) == (
        "rank 0 and 508 more ranks: AssertionError: NaN (/home/me/train.py:61):"
        " restart 1 in place without ranks 7-9"
    )
    died = RestartEvent(iteration=2, cause="rank 3: the process died", faulty_ranks=[3])
    assert restart_line(died) == "rank 3: the process died: restart 2 in place"
    hung = RestartEvent(iteration=3, cause="hang: rank 3: CPU time stale", faulty_ranks=[3])
    assert restart_line(hung) == "rank 3 hangs: restart 3 in place"
