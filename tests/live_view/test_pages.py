"""Logs and incidents as pages: which file, its end, and which incident is a rank's."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from ncclops.capture.run_snapshots import Collected
from ncclops.diagnose.culprit import Culprit
from ncclops.diagnose.incident_events import DecisionTaken
from ncclops.diagnose.incident_report import IncidentReport
from ncclops.diagnose.incident_text import incident_lines
from ncclops.diagnose.places import Cluster, RankView
from ncclops.diagnose.stacks_text import stack_lines
from ncclops.diagnose.where import Look
from ncclops.live_view import pages
from ncclops.live_view.composing import Content
from ncclops.live_view.page_reader import PageReader
from ncclops.live_view.view import Page, Request
from ncclops.record import incident_record
from ncclops.record.incident_record import IncidentRecord
from ncclops.record.paths import RunPaths
from tests.live_view.scenes import rank, status

LIMIT_S = 60


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    paths = RunPaths(tmp_path)
    for number in range(2):
        paths.rank(number).root.mkdir(parents=True)
    return paths


def wanted(page: Page, which: int = 0, number: int = 1) -> Request:
    return Request(page=page, rank=number, which=which, times=1)


def texts(content: Content) -> list[str]:
    return [each.text for each in content.lines(1)]


def test_the_stream_that_was_written_last_is_first_then_the_others(run: RunPaths) -> None:
    log = run.rank(1)
    log.stdout_log.write_text("out\n")
    log.stderr_log.write_text("err\n")
    log.worker_log.write_text("own\n")
    log.nccl_log.touch()
    os.utime(log.stdout_log, (1000, 1000))
    os.utime(log.stderr_log, (2000, 2000))
    shown, seen = None, []
    for which in range(4):
        shown = pages.read(run.root, wanted("log", which), status(2), shown)
        seen += texts(shown)
    assert seen == ["err", "own", "out", "err"]
    assert shown is not None
    assert shown.title.startswith("rank 1: stderr.log, 2 of 3 files: ")
    log.stderr_log.write_text("err\nmore\n")
    assert texts(pages.read_again(shown)) == ["err", "more"]
    log.stderr_log.unlink()
    assert texts(pages.read_again(shown)) == ["err"]


def test_of_a_long_log_the_end_and_of_a_bar_its_last_state(run: RunPaths) -> None:
    begin = b"x" * 99 + b"\n"
    bar = b"\r 1%|\r\x1b[A 2%|\r"
    run.rank(1).stdout_log.write_bytes(begin * 10_000 + b"\xff\x1b[31mred\x1b[m\n" + bar)
    seen = texts(pages.read(run.root, wanted("log"), status(2)))
    assert seen[0] == "… 720 KiB before"
    assert len(seen) < 2700
    assert seen[-2:] == ["\ufffdred", "\\x1b[A 2%|"]


def test_no_log_says_where_it_may_be(run: RunPaths) -> None:
    far = status([rank(1, host="n17")])
    assert "n17" in texts(pages.read(run.root, wanted("log"), far))[0]
    assert "nothing yet" in texts(pages.read(run.root, wanted("log"), status([])))[0]
    no_rank = Request(page="log", rank=None, which=0, times=1)
    nobody = pages.read(run.root, no_rank, status([]))
    assert (nobody.title, texts(nobody)) == ("log", ["no rank has started yet"])
    run.rank(1).stdout_log.symlink_to("/dev/zero")
    assert "nothing yet" in texts(pages.read(run.root, wanted("log"), status([])))[0]


def incident(run: RunPaths, number: int, faulty: int) -> None:
    run.incident(number).mkdir(parents=True)
    record = IncidentRecord(
        iteration=number,
        cause="exception",
        summary=f"rank {faulty}: ValueError: x",
        first_faulty_rank=faulty,
        at=1000.0,
        faulty_ranks=[faulty],
        absent_ranks=[faulty + 5],
        exception="ValueError: x",
        traceback="Traceback\n\x1b[31mValueError: x",
    )
    incident_record.write(run.incident(number), record)


def test_the_incident_of_a_rank_else_the_latest(run: RunPaths, starts_processes: None) -> None:
    assert "no incidents" in texts(pages.read(run.root, wanted("incident"), status(2)))[0]
    for number, faulty in enumerate((0, 1, 0)):
        incident(run, number, faulty)
    found = pages.read(run.root, wanted("incident"), status(2))
    assert found.title == "incident 1, of 0-2"
    assert texts(found)[0].startswith("rank 1")
    assert any(text.startswith("incident 1: ") for text in texts(found))
    beside = pages.read(run.root, wanted("incident", which=-5), status(2))
    assert beside.title == "incident 0, of 0-2"
    awaited = pages.read(run.root, wanted("incident", number=6), status(2))
    assert awaited.title == "incident 1, of 0-2"
    nobody = pages.read(run.root, wanted("incident", number=7), status(2))
    assert nobody.title == "incident 2, of 0-2"
    assert texts(nobody)[0] == "no incident of rank 7; this is the latest of all"


def test_a_damaged_incident_is_a_line(run: RunPaths) -> None:
    run.incident(0).mkdir(parents=True)
    (run.incident(0) / "incident.json").write_text("{")
    assert len(texts(pages.read(run.root, wanted("incident"), status(2)))) == 1


def test_an_incident_says_who_why_and_what_to_do() -> None:
    record = IncidentRecord(
        iteration=2, cause="exception", summary="x", first_faulty_rank=1, at=1000.0
    )
    report = IncidentReport(
        number=4,
        directory=Path("incidents/4"),
        record=record,
        sentence="rank 1 raised ValueError",
        culprit=Culprit(1, "n1", None, "its fault was first"),
        classification={
            "class": "user-error",
            "confidence": 0.9,
            "summary": "a mistake",
            "evidence": [{"role": "cause", "file": "stderr.log", "line": 3, "text": "ValueError"}],
        },
        recorded=None,
        decision=DecisionTaken("stop", "it came twice"),
        advice=("correct the script",),
        log=None,
        views=(),
        clusters=tuple(Cluster((each,), f"place {each}", None, None, ()) for each in range(8)),
        left_in=5,
    )
    seen = ["".join(text for text, _ in parts) for parts in incident_lines(report)]
    assert seen[0] == "rank 1 raised ValueError"
    assert "  culprit   rank 1 on n1: its fault was first" in seen
    assert "  class     user-error (0.9): a mistake" in seen
    assert "  decided   stop, because it came twice" in seen
    assert "  cause     stderr.log:3: ValueError" in seen
    assert "  1 rank (5): place 5" in seen
    assert "  and 2 more places (--json)" in seen
    assert seen[-3:] == [
        "what to do next",
        "  - correct the script",
        "incident 4: incidents/4; the ranks left in incident 5",
    ]


def test_stacks_begin_with_the_chosen_rank() -> None:
    def view(number: int, place: str) -> RankView:
        return RankView(number, "n1", 1, None, (), None, place, None, None)

    clusters = (
        Cluster((0, 1, 2), "all_reduce", None, None, ()),
        Cluster((3,), "load", None, None, ()),
    )
    views = tuple(view(number, "x") for number in range(4))
    look = Look(
        Path("run"), 1000.0, Collected(Path("where/0"), (0, 1, 2, 3), (), (), {}), views, clusters
    )
    usual = ["".join(text for text, _ in parts) for parts in stack_lines(look)]
    assert usual == ["3 ranks (0-2): all_reduce", "rank 3: load", "snapshots: where/0"]
    chosen = [parts[0] for parts in stack_lines(look, first=3)]
    assert chosen[:2] == [("rank 3: load", "bold red"), ("3 ranks (0-2): all_reduce", "bold")]


def test_a_log_is_read_again_when_it_grows(run: RunPaths) -> None:
    log, woken = run.rank(1).stdout_log, threading.Event()
    reader = PageReader(run.root, woken.set)

    def until(*expected: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while reader.content is None or texts(reader.content) != list(expected):
            assert time.monotonic() < deadline
            woken.wait(0.05)
            reader.take()
            reader.want(wanted("log"), status([]), follow=True)

    until("rank 1 has written nothing yet")
    log.write_text("one\n")
    until("one")
    with log.open("a") as file:
        file.write("two\n")
    until("one", "two")
    assert len(reader.files) <= 1
    reader.want(None, status([]), follow=False)
    assert (reader.content, reader.files, reader.due_s) == (None, (), None)
    reader.close()


def test_a_page_that_could_not_be_read_says_so_and_is_read_anew(
    run: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a fault of ours: the thread is over, and the page no longer awaited."""

    def fails(*_: object) -> Content:
        raise TypeError("no such field")

    woken = threading.Event()
    reader = PageReader(run.root, woken.set)

    def read() -> list[str]:
        deadline = time.monotonic() + LIMIT_S
        while reader.content is None:
            assert time.monotonic() < deadline
            woken.wait(0.05)
            reader.take()
            reader.want(wanted("log"), status([]), follow=False)
        return texts(reader.content)

    with monkeypatch.context() as broken:
        broken.setattr(pages, "read", fails)
        assert read() == ["cannot be read: internal error: TypeError: no such field"]
    reader.want(None, status([]), follow=False)
    assert read() == ["rank 1 has written nothing yet"]
    reader.close()
