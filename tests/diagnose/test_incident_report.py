"""Whom ``ncclops incident`` blames: incidents made to measure, as real ones are laid out."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from ncclops.diagnose.advice import steps
from ncclops.diagnose.incident_events import decision_on
from ncclops.diagnose.incident_report import IncidentReport, report_incident
from ncclops.diagnose.incident_text import incident_lines
from ncclops.flight.finding_kinds import FindingKind
from ncclops.record import snapshot_files
from ncclops.record.documents import read_document, write_document
from ncclops.record.events import (
    EscalationEvent,
    Event,
    RestartEvent,
    RetryEvent,
    VerdictEvent,
)
from ncclops.record.incident_record import IncidentRecord
from ncclops.record.paths import INCIDENT, RunPaths
from ncclops.stacks.frame import Frame
from tests.flight import dumps
from tests.flight.dumps import entry

# As Gloo ends a process that is sent more than its own call has room for.
OVERRUN = (
    "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n"
    "  what():  [enforce fail at pair.cc:456] op.preamble.length <= op.nbytes. 12 vs 8. Received "
    "data size doesn't match expected size. Is there a distributed collective mismatch in your "
    "code?\n"
)
STACK = ('  File "/home/user/train.py", line 96, in <module>', "    work()") * 3
Entries = Iterable[Mapping[str, Any]]
Make = Callable[..., Path]


def fault(rank: int, kind: str, summary: str, *, gone: bool = False) -> dict[str, Any]:
    return {"kind": kind, "initial_rank": rank, "summary": summary, "gone": gone}


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """``make(dumps, first_fault)`` writes a run with one incident of four ranks."""

    def write(by_rank: Mapping[int, Entries], first: dict[str, Any], **more: Any) -> Path:
        incident = RunPaths(tmp_path).incident(0)
        for rank, entries in by_rank.items():
            flight = {"rank": rank, "host": "n1", "pid": 1, "taken_at": dumps.BEGUN_S + 10_000}
            write_document(
                snapshot_files.rank_dir(incident, rank) / snapshot_files.FLIGHT,
                flight | {"dump": dumps.dump(entries, {dumps.WORLD: range(4)})},
            )
        record = {
            "iteration": 0,
            "cause": first["kind"],
            "summary": first["summary"],
            "first_faulty_rank": first["initial_rank"],
            "ranks_lost": [first["initial_rank"]] if first["gone"] else [],
            "exception": None,
            "traceback": None,
            "faults": [first],
            "world_size_before": 4,
            "world_size": 4 - first["gone"],
            "at": time.time(),
            "rank_before": 0,
            "rank": 0,
        }
        write_document(incident / INCIDENT, record | more)
        return tmp_path

    return write


def calls(**last: Any) -> list[dict[str, Any]]:
    known = [entry(seq, op="gloo:all_reduce") for seq in (1, 2)]
    return [*known, entry(3, **({"op": "gloo:all_reduce", "state": "scheduled"} | last))]


def culprit(report: IncidentReport) -> tuple[int, str | None]:
    frame = report.culprit.frame
    return report.culprit.rank, None if frame is None else f"{frame.file}:{frame.line}"


def killed(run: Path, rank: int, signal: str, said: str = "") -> None:
    log = run / "ranks" / str(rank) / "stderr.log"
    log.parent.mkdir(parents=True)
    log.write_text(said)
    event = {"ts": time.time(), "event": "worker-exited", "rank": rank, "exit_code": None}
    (run / "events.jsonl").write_text(json.dumps(event | {"signal": signal}) + "\n")
    snapshot_files.add_missing(
        snapshot_files.rank_dir(RunPaths(run).incident(0), rank),
        f"the process ended ({signal})",
        list(snapshot_files.COMPLETE),
        ended=True,
    )


@pytest.mark.slow
def test_a_rank_that_was_done_before_the_others_is_what_to_look_into(make: Make) -> None:
    """And not at the connections that it closed, of which the others have raised errors."""
    first = fault(1, "returned-early", "rank 1: ended while other ranks still needed it")
    report = report_incident(make({}, first), None)
    (step,) = report.next_steps
    assert step.startswith("find out why rank 1 was done before the others")


@pytest.mark.slow
def test_a_hang_seen_from_outside_is_blamed_on_the_rank_that_the_recorders_name(make: Make) -> None:
    """The agent's watch sees that all stand still, and knows no better than to name the first."""
    by_rank = {rank: calls() for rank in (0, 1, 3)}
    by_rank[2] = calls(op="gloo:broadcast", line=71)
    report = report_incident(
        make(by_rank, fault(0, "hung", "hang: all ranks are stuck; ranks 0-3: …")), None
    )
    assert culprit(report) == (2, "/home/user/train.py:71")
    assert "look for a branch before the call at /home/user/train.py:71" in report.next_steps[0]
    assert report.sentence.startswith("rank 2 called broadcast [4] Float in train.py:71 step as #3")


@pytest.mark.slow
def test_a_rank_that_its_monitor_process_ended_for_silence_was_a_hang(make: Make) -> None:
    """By the timeout that it exceeded; a summary in the same words alone makes none."""
    first = fault(1, "died", "rank 1: hard timeout: silent for 3.0 s", gone=True)
    limit = {"limit": "hard", "limit_s": 3.0, "silent_s": 3.0, "clock": "python"}
    hang = report_incident(make({0: calls(), 1: calls()[:2]}, first, timeout=limit), None)
    assert "its monitor process ended it" in hang.sentence
    assert any("if it hangs again" in step for step in hang.next_steps)
    death = report_incident(make({0: calls(), 1: calls()[:2]}, first), None)
    assert "if it hangs again" not in " ".join(death.next_steps)


@pytest.mark.slow
def test_the_incident_in_which_ranks_left_shows_the_fault_before(make: Make) -> None:
    """By its fields: ``raised`` and ``escalation``, whatever the summary says."""
    run = make({}, fault(1, "exception", "RuntimeError: spoiled"))
    left = fault(0, "left", "reworded", gone=True) | {"at": time.time() + 1}
    record = read_document(RunPaths(run).incident(0) / INCIDENT)
    record |= {"cause": "left", "summary": "reworded", "first_faulty_rank": 0, "faults": [left]}
    asked = {"to": "respawn", "reason": "it piles up", "failure": None}
    path = RunPaths(run).incident(1) / INCIDENT
    raised = {"name": "RestartAbort", "bases": ["BaseException"]}
    write_document(path, record | {"raised": raised, "escalation": asked})
    report = report_incident(run, None)
    assert (report.number, report.left_in) == (0, 1)
    write_document(path, record)
    assert report_incident(run, None).number == 1, (
        "a record without the fields is read as it stands"
    )


@pytest.mark.slow
def test_a_report_of_the_watch_is_no_fault_of_the_rank(make: Make) -> None:
    by_rank: dict[int, Entries] = {rank: calls() for rank in (0, 1, 3)}
    by_rank[2] = calls()[:2]
    run = make(by_rank, fault(2, "hung", "hang: rank 2: CPU time stale for more than 4s"))
    stacks = snapshot_files.rank_dir(RunPaths(run).incident(0), 2) / snapshot_files.STACKS
    stacks.write_text(
        'Thread 0x1 [MainThread] (most recent call first):\n  File "/home/user/d.py", line 3 in f\n'
    )
    report = report_incident(run, None)
    assert culprit(report) == (2, "/home/user/d.py:3")
    assert report.sentence == (
        "rank 2 never entered all_reduce #3 of group default_pg (0-3): it is in d.py:3 f"
    )


@pytest.mark.slow
def test_ranks_that_all_wait_in_one_collective_have_all_entered_it(make: Make) -> None:
    """And stacks of a rank that stood still are no traceback."""
    stack = "\n".join(["Main thread (most recent call last):", *STACK])
    run = make({}, fault(0, "soft-timeout", "rank 0: silent for 8.9 s"), traceback=stack)
    last = {"op": "all_reduce", "seq": 3, "at": 0.0, "pending": True}
    for rank in (0, 1, 2, 3):
        directory = snapshot_files.rank_dir(RunPaths(run).incident(0), rank)
        group = {"name": "0", "desc": "default_pg", "last_op": last}
        write_document(directory / snapshot_files.GROUPS, [group])
    report = report_incident(run, None)
    assert report.sentence == (
        "rank 0 made no progress in all_reduce number 3 of default_pg, in which ranks 1-3 waited"
        " too: it was at /home/user/train.py:96 in <module>"
    )
    assert report.classification is None


@pytest.mark.slow
def test_a_rank_that_gloo_ended_is_the_victim_of_the_one_that_differs(make: Make) -> None:
    by_rank = {0: calls(), 1: calls(), 2: calls(sizes=[[6]], line=60)}
    run = make(by_rank, fault(3, "died", "rank 3: the process died", gone=True))
    killed(run, 3, "SIGABRT", OVERRUN)
    report = report_incident(run, None)
    assert culprit(report) == (2, "/home/user/train.py:60")
    assert report.sentence.endswith("; rank 3 failed of it (SIGABRT)")
    assert report.classification is not None
    assert report.classification["class"] == "collective-mismatch"


@pytest.mark.slow
def test_where_gloo_ended_the_rank_that_differs_itself_the_others_line_is_shown(make: Make) -> None:
    """It asked for less than it was sent, and left neither a recorder nor stacks."""
    by_rank = {rank: calls(line=60) for rank in (0, 1, 3)}
    run = make(by_rank, fault(2, "died", "rank 2: the process died", gone=True))
    killed(run, 2, "SIGABRT", OVERRUN)
    report = report_incident(run, None)
    assert culprit(report) == (2, None)
    assert "the others called it at /home/user/train.py:60" in report.culprit.how
    crash = "Fatal Python error: Aborted\n\nThread 0x1 (most recent call first):\n"
    log = run / "ranks" / "2" / "stderr.log"
    log.write_text(OVERRUN + crash + '  File "/home/user/train.py", line 61 in step\n')
    assert culprit(report_incident(run, None)) == (2, "/home/user/train.py:61")


@pytest.mark.slow
def test_a_rank_that_was_killed_is_to_blame_whatever_the_others_ask_for(make: Make) -> None:
    by_rank = {0: calls(), 1: calls(), 2: calls(sizes=[[6]])}
    run = make(by_rank, fault(3, "died", "rank 3: the process died", gone=True))
    killed(run, 3, "SIGKILL")
    report = report_incident(run, None)
    assert report.culprit.rank == 3
    assert report.sentence.startswith("rank 3 is gone (SIGKILL)")


OVER = VerdictEvent(ts=14, outcome="failed", reason="rank 2 exited")


@pytest.mark.parametrize(
    ("events", "what", "why"),
    [
        ([], "no further restart in place, but new processes", "3 times"),
        ([RetryEvent(ts=13, attempt=2)], "new processes (attempt 2)", "3 times"),
        (
            [EscalationEvent(ts=13, to="stop", reason="no attempt left"), OVER],
            "the run ended",
            "no attempt left",
        ),
        ([OVER], "failed", "3 times"),
    ],
)
def test_an_escalation_is_what_was_decided(events: list[Event], what: str, why: str) -> None:
    """Whatever else is said afterwards, and whether or not there is more on record by now."""
    incident = IncidentRecord(
        at=10.0,
        iteration=2,
        cause="exception",
        summary="RuntimeError: no",
        first_faulty_rank=1,
        rank_before=0,
        rank=0,
        world_size=4,
    )
    before: list[Event] = [
        RestartEvent(ts=9, iteration=2),
        RestartEvent(ts=11, iteration=3),
        EscalationEvent(ts=12, to="respawn", reason="3 times in a row"),
    ]
    decision = decision_on(incident, [*before, *events], until=20.0)
    assert what in decision.what
    assert why in decision.why
    first = replace(incident, iteration=1, at=8.0)
    earlier = decision_on(first, [*before, *events], until=10.0)
    assert earlier.what.startswith("restarted in place"), "the next fault led to it"


@pytest.mark.parametrize(
    ("lost", "returned", "what", "why"),
    [
        ([], [], "on all 4 ranks", "every rank was healthy and came back"),
        ([1, 2], [], "on 4 of 5 ranks", "ranks 1, 2 cannot come back, and the others are healthy"),
        (
            *([1], [1], "on 4 ranks, rank 1 in a new process"),
            "new processes have taken the places of rank 1",
        ),
        (
            *([1, 2], [0, 2], "on 4 of 5 ranks"),
            "new processes have taken the places of ranks 0, 2;"
            " rank 1 cannot come back, and the others are healthy",
        ),
    ],
)
def test_a_restart_says_who_is_missing_and_who_is_in_a_new_process(
    lost: list[int], returned: list[int], what: str, why: str
) -> None:
    incident = IncidentRecord(
        at=10.0,
        iteration=2,
        cause="died",
        summary="rank 1: the process died",
        first_faulty_rank=1,
        ranks_lost=lost,
        ranks_returned=returned,
        rank_before=0,
        rank=0,
        world_size_before=5,
        world_size=4,
    )
    decision = decision_on(incident, [], until=20.0)
    assert (decision.what, decision.why) == (f"restarted in place, {what}", why)


@pytest.mark.slow
def test_a_file_that_an_exception_mentions_is_not_where_it_was_raised(make: Make) -> None:
    """What an exception says may look like a line of a traceback."""
    trace = (
        'Traceback (most recent call last):\n  File "/home/user/train.py", line 9, in main\n'
        'RuntimeError: gave up after KeyError (File "/home/user/other.py", line 51, in f): a bug\n'
    )
    first = fault(1, "exception", "RuntimeError: gave up")
    run = make({0: calls()}, first, exception=first["summary"], traceback=trace)
    assert report_incident(run, None).culprit.frame == Frame("/home/user/train.py", 9, "main")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("printed", "step"),
    [
        ("loading\n", "the script ends itself at /home/user/train.py:9 in main with this code"),
        ("train.py: error: the following arguments are required: --lr\n", "check the path"),
    ],
)
def test_a_script_that_ends_itself_with_a_code_is_looked_at_there(
    make: Make, printed: str, step: str
) -> None:
    """Its frames are no exception whose last line is missing; what it has printed says more."""
    trace = (
        "Traceback (most recent call last):\n"
        '  File "/opt/lib/python3.11/site-packages/ncclops/worker/script.py", line 46, in run\n'
        '  File "/home/user/train.py", line 9, in main\n'
        "SystemExit: 3\n"
    )
    first = fault(1, "left", "SystemExit: 3", gone=True)
    run = make({}, first, exception="SystemExit: 3", traceback=trace)
    log = RunPaths(run).rank(1).stderr_log
    log.parent.mkdir(parents=True)
    log.write_text(printed)
    report = report_incident(run, None)
    assert report.advice[0].startswith(step)
    assert report.sentence == "rank 1 ended: exit code 3 at /home/user/train.py:9 in main"


@pytest.mark.slow
def test_the_callers_of_the_line_are_shown_with_it(make: Make) -> None:
    """A line in a helper says little by itself."""
    files = [("train.py", "main"), ("train.py", "step"), ("/site-packages/lib.py", "apply")]
    files.append(("comm.py", "sync_gradients"))
    trace = "".join(
        f'  File "/home/user/{file}", line {line}, in {name}\n'
        for line, (file, name) in enumerate(files, 1)
    )
    run = make({0: calls()}, fault(1, "exception", "RuntimeError: no"), traceback=trace)
    who = report_incident(run, None).culprit
    assert who.frame == Frame("/home/user/comm.py", 4, "sync_gradients")
    assert [caller.function for caller in who.callers] == ["step", "main"]


@pytest.mark.parametrize("kind", sorted(set(FindingKind) - {FindingKind.RANK_DIED}))
def test_each_kind_of_hang_has_a_step_to_take(kind: FindingKind) -> None:
    first, *more = steps(kind, "rank 2", "train.py:3 in f", in_data_loader=True)
    assert "{" not in first
    assert len(more) == (kind is FindingKind.NEVER_ARRIVED)


@pytest.mark.usefixtures("starts_processes")
def test_the_page_repeats_no_frames_of_the_culprits_traceback(make: Make) -> None:
    """They stood there as symptoms, the first of them in ncclops itself."""
    trace = (
        "Traceback (most recent call last):\n"
        '  File "/x/ncclops/restart/loop.py", line 3, in run\n    function()\n'
        '  File "/home/me/train.py", line 9, in main\n    raise ValueError("x")\nValueError: x\n'
    )
    failed = fault(1, "exception", "rank 1: ValueError: x")
    run = make({}, failed, exception="ValueError: x", traceback=trace)
    report = report_incident(run, None)
    assert {line["role"] for line in report.to_json()["classification"]["evidence"]} >= {"symptom"}
    page = ["".join(text for text, _ in parts) for parts in incident_lines(report)]
    assert [line for line in page if "symptom" in line] == []
    assert any(line.startswith("  cause ") and line.endswith("ValueError: x") for line in page)


@pytest.mark.usefixtures("starts_processes")
def test_the_page_shows_a_line_once_and_ranks_that_miss_the_same_together(make: Make) -> None:
    """A log has what a rank reports, too; and thousands of ranks may miss the same file."""
    failed = fault(1, "exception", "rank 1: ValueError: x")
    said = "Traceback (most recent call last):\nValueError: x\n"
    run = make({}, failed, exception="ValueError: x", traceback=said)
    log = RunPaths(run).rank(1).stderr_log
    log.parent.mkdir(parents=True)
    frame = '  File "/home/me/a.py", line 9, in main\n'
    log.write_text(f"Traceback (most recent call last):\n{frame}ValueError: x\n")
    for rank in range(3):
        taken = snapshot_files.rank_dir(RunPaths(run).incident(0), rank)
        taken.mkdir(parents=True)
        (taken / snapshot_files.MISSING).write_text('{"reason": "no recorder", "files": []}')
        (taken / snapshot_files.STACKS).write_text(f"Thread 0x1 (most recent call first):\n{frame}")
    page = [
        "".join(text for text, _ in parts) for parts in incident_lines(report_incident(run, None))
    ]
    assert [line for line in page if "ValueError" in line][1:] == [
        f"  cause     {log}:3: ValueError: x"
    ]
    assert [line for line in page if line.endswith("no recorder")] == ["  ranks 0-2: no recorder"]
