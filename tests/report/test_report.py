"""`ncclops report`: what the page holds, and that a real browser draws it without a network."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from ncclops.redaction.marks import mark_of
from ncclops.report.heat import COLUMNS, heat_of, slowest
from ncclops.report.page import render
from ncclops.report.records import StepTime, read
from tests.conftest import LIMIT_S, CompletedText

Ncclops = Callable[..., CompletedText]

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
EVIL = "</script><script>document.title='taken over'</script><img src=x onerror=alert(1)>"

HOSTILE = f"x);position:fixed;x:(\"'>--></style></title>{EVIL}\u202e\x1b[2J\0"


def write(path: Path, *records: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def steps_of(slow: float, count: int = 30) -> list[dict[str, Any]]:
    return [
        {"ts": 110.0 + n, "kind": "step", "iteration": 0, "step": n, "seconds": slow}
        | ({"first": True} if n == 0 else {})
        for n in range(count)
    ]


@pytest.fixture
def run_dir(starts_processes: None, tmp_path: Path) -> Path:
    """A run of four ranks with a restart, rank 2 half again as slow as the others."""
    run = tmp_path / "run"
    for rank in range(4):
        write(run / "ranks" / str(rank) / "receipt.jsonl", *steps_of(1.5 if rank == 2 else 1.0))
    event = {"rank": None, "node": "n01"}
    write(
        run / "events.jsonl",
        {"ts": 100.0, "event": "run-started", **event, "run_id": "20260101-abc", "world_size": 4},
        {"ts": 101.0, "event": "worker-started", **event},
        {"ts": 110.0, "event": "compile-warmup", **event, "seconds": 5.0},
        {"ts": 120.0, "event": "fault", **event, "cause": EVIL},
        {
            "ts": 121.0,
            "event": "restart",
            **event,
            "iteration": 1,
            "cause": EVIL,
            "faulty_ranks": [1],
            "ranks_lost": [3],
            "world_size": 3,
            "phases_ms": {"detect": 1.0, "abort": 40.0},
        },
        {"ts": 125.0, "event": "step", **event, "step": 12},
        {"ts": 140.0, "event": "verdict", **event, "outcome": "completed"},
    )
    fault = {"kind": "exception", "initial_rank": 1, "summary": f"RuntimeError: {EVIL}"}
    incident = {
        "iteration": 0,
        "cause": fault["kind"],
        "summary": fault["summary"],
        "first_faulty_rank": 1,
        "ranks_lost": [],
        "exception": fault["summary"],
        "traceback": 'Traceback:\n  File "/home/user/train.py", line 7, in step\n',
        "faults": [fault],
        "world_size_before": 3,
        "world_size": 3,
        "at": 119.9,
        "rank_before": 0,
        "rank": 0,
    }
    left = incident | {
        "at": 122.0,
        "raised": {"name": "RestartAbort", "bases": ["BaseException"]},
        "escalation": {"to": "stop", "reason": "it goes on", "failure": None},
    }
    for number, record in (("0", incident), ("1", left), ("2", {"cause": "unknown"})):
        write(run / "incidents" / number / "incident.json", record)
    verdict = {
        "schema": "ncclops.verdict/1",
        "run_id": "20260101-abc",
        "outcome": "completed",
        "exit_code": 0,
        "reason": "3 workers exited 0; token=abc123def, with correct.horse",
        "seconds": 40.0,
        "attempts": 1,
        "workers": [],
    }
    (run / "run.json").write_text(
        json.dumps({"schema": "ncclops.run/1", "run_id": "20260101-abc", "world_size": 4})
    )
    (run / "verdict.json").write_text(json.dumps(verdict))
    environment = {
        "schema": "ncclops.env-snapshot/1",
        "label": "rank 0",
        "variables": {"STORE_PASSWORD": "<redacted>"},
        "marks": [mark_of("correct.horse")],
    }
    (run / "ranks/0/environment.json").write_text(json.dumps(environment))
    return run


def page_of(ncclops_in_process: Ncclops, run: Path) -> str:
    result = ncclops_in_process("report", run, "-o", "page.html")
    assert result.returncode == 0, result.stderr
    return (run.parent / "page.html").read_text()


def test_the_page_shows_what_happened(ncclops_in_process: Ncclops, run_dir: Path) -> None:
    page = page_of(ncclops_in_process, run_dir)
    assert "20260101-abc" in page
    assert "3 workers exited 0" in page
    for kind in ("start-up", "compile", "steps", "restart"):
        assert f'data-kind="{kind}"' in page
    assert "41 ms (detect 1, abort 40)" in page
    assert "<td>restart in place: abort</td><td>0.04s</td>" in page
    assert "without faults it would have been" in page
    assert "rank 2 1.50" in page


def test_the_page_describes_faults_as_incident_does(
    ncclops_in_process: Ncclops, run_dir: Path
) -> None:
    """And leaves out those that are none, or that are damaged."""
    page = page_of(ncclops_in_process, run_dir)
    (sentence,) = re.findall(r"<h3>(.*?)</h3>", page)
    assert sentence.startswith("rank 1 raised RuntimeError: &lt;/script&gt;")
    assert "<td>at</td><td>/home/user/train.py:7 in step</td>" in page
    assert "restarted in place, on all 3 ranks" in page


def test_the_page_holds_no_secret_and_nothing_that_runs(
    ncclops_in_process: Ncclops, run_dir: Path
) -> None:
    page = page_of(ncclops_in_process, run_dir)
    assert "abc123def" not in page
    assert "correct.horse" not in page, "the value of a rank's variable with such a name"
    assert "<img" not in page
    assert page.count("<script") == 2  # the data and the drawing
    assert "script-src 'sha256-" in page, "and the browser runs no other"


class Attributes(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen |= {name for name, _ in attrs}


def test_the_page_loads_nothing(ncclops_in_process: Ncclops, run_dir: Path) -> None:
    page = page_of(ncclops_in_process, run_dir)
    assert "default-src 'none'" in page
    assert not re.findall(r"url\(|@import|https?://", page)
    attributes = Attributes()
    attributes.feed(page)
    assert "class" in attributes.seen
    assert not attributes.seen & {"src", "href", "srcset", "data", "action", "background"}


def spoiled(value: Any, key: str = "") -> Any:
    """``value`` with hostile text in the place of each string that types do not settle."""
    if isinstance(value, dict):
        return {name: spoiled(each, name) for name, each in value.items()}
    if isinstance(value, list):
        return [spoiled(each, key) for each in value]
    settled = ("schema", "event", "kind", "outcome")
    return HOSTILE if isinstance(value, str) and key not in settled else value


def test_no_string_of_any_record_becomes_a_part_of_the_page(run_dir: Path) -> None:
    before, after = Elements(), Elements()
    before.feed(render(read(run_dir)))
    for path in run_dir.rglob("*.json*"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(spoiled(line)) + "\n" for line in lines))
    page = render(read(run_dir))
    after.feed(page)
    assert page.count("&lt;script&gt;document") > 10  # shown as text
    assert after.seen <= before.seen
    assert not any("position" in style for style in after.styles)
    assert not re.search("[\u202e\x1b\x00]", page)


class Elements(HTMLParser):
    """Which elements a page has, with which attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[str, str]] = set()
        self.styles: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen |= {(tag, name) for name, _ in [*attrs, ("", None)]}
        self.styles |= {value or "" for name, value in attrs if name in ("style", "fill")}


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine to open the page in")
def test_a_browser_draws_every_cell(
    ncclops_in_process: Ncclops, run_dir: Path, tmp_path: Path
) -> None:
    page_of(ncclops_in_process, run_dir)
    dom, log = browse(tmp_path / "page.html", tmp_path)
    painted = re.search(r'data-painted="(\d+)"', dom)
    assert painted, log
    assert int(painted[1]) == 4 * 29  # the first step of each rank does not count
    assert "<title>ncclops report: 20260101-abc</title>" in dom
    assert "CONSOLE" not in log


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine to open the page in")
def test_a_browser_shows_a_run_without_receipts(
    ncclops_in_process: Ncclops, tmp_path: Path
) -> None:
    write(
        tmp_path / "bare" / "events.jsonl",
        {"ts": 1.0, "event": "run-started", "run_id": "bare", "world_size": 1},
    )
    page_of(ncclops_in_process, tmp_path / "bare")
    dom, log = browse(tmp_path / "page.html", tmp_path)
    assert "No step was timed" in dom
    assert "CONSOLE" not in log


def browse(page: Path, home: Path) -> tuple[str, str]:
    """The page's document after its script has run, and what the browser said."""
    assert BROWSER is not None
    done = subprocess.run(
        [
            *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *("--enable-logging=stderr", "--virtual-time-budget=2000", "--dump-dom"),
            *(f"--user-data-dir={home / 'browser'}", page.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    return done.stdout, done.stderr


def test_the_page_goes_to_standard_output(ncclops_in_process: Ncclops, run_dir: Path) -> None:
    result = ncclops_in_process("report", run_dir, "-o", "-")
    assert result.stdout.startswith("<!doctype html>")
    assert result.stderr == ""


def test_what_cannot_be_reported_is_one_line(ncclops_in_process: Ncclops, run_dir: Path) -> None:
    for arguments, words in (
        ((run_dir.parent,), "holds no run"),
        (("nothing",), "no run 'nothing'"),
        ((run_dir, "-o", "nowhere/page.html"), "cannot write nowhere/page.html"),
    ):
        result = ncclops_in_process("report", *arguments)
        assert result.returncode == 2
        assert words in result.stderr
        assert result.stderr.count("\n") == 1


def test_a_file_that_is_there_is_replaced_only_by_force(
    ncclops_in_process: Ncclops, run_dir: Path
) -> None:
    page = run_dir.parent / "page.html"
    page.write_text("of another run")
    refused = ncclops_in_process("report", run_dir, "-o", page)
    assert refused.returncode == 2 and f"{page} exists: name another" in refused.stderr
    assert page.read_text() == "of another run"
    # A run that is not there comes first: with another page it would not be there either.
    assert "exists" not in ncclops_in_process("report", run_dir / "no", "-o", page).stderr
    assert ncclops_in_process("report", run_dir, "-o", page, "--force").returncode == 0
    assert "20260101-abc" in page.read_text()
    assert ncclops_in_process("report", run_dir, "-o", "/dev/null").returncode == 0


def test_broken_records_are_passed_over(run_dir: Path) -> None:
    for path in run_dir.rglob("*.json*"):
        with path.open("ab") as file:
            file.write(b'{"half": \xff')
    page = render(read(run_dir))
    assert "rank 2 1.50" in page


def test_half_of_a_character_is_no_reason_to_fail(
    ncclops_in_process: Ncclops, run_dir: Path
) -> None:
    path = run_dir / "verdict.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"reason": "\udc80"}))
    result = ncclops_in_process("report", run_dir, "-o", run_dir / "page.html")
    assert result.returncode == 0, result.stderr
    assert "\\udc80" in (run_dir / "page.html").read_text()


def test_a_heat_map_stays_small() -> None:
    steps = {
        rank: [StepTime(step=n, seconds=1.0, at=0.0, counts=True) for n in range(100, 5000)]
        for rank in range(3)
    }
    heat = heat_of(steps)
    assert heat is not None
    assert len(heat.medians) <= COLUMNS
    assert heat.first_step == 100
    assert heat.first_step + heat.width * len(heat.medians) > 4999
    assert all(cell == 1.0 for row in heat.cells for cell in row)


def test_a_step_done_again_counts_as_it_was_done_last() -> None:
    def step(seconds: float, counts: bool = True) -> StepTime:
        return StepTime(step=5, seconds=seconds, at=0.0, counts=counts)

    heat = heat_of({0: [step(9.0), step(2.0)], 1: [step(1.0)], 2: [step(1.0, counts=False)]})
    assert heat is not None
    assert heat.cells == [[2.0], [1.0], [None]]
    [(rank, ratio), *_] = slowest(heat)
    assert rank == 0
    assert ratio == pytest.approx(2.0 / 1.5)


def test_no_timed_step_no_heat_map() -> None:
    assert heat_of({0: [], 1: []}) is None
