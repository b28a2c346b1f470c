"""What the page shows of the check before the start: hosts against checks, edges, remedies."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ncclops.preflight import hand_over
from ncclops.preflight.edges import shown
from ncclops.preflight.edges.model import Cause, Facts, Verdict
from ncclops.preflight.model import Finding, NodeReport, Status
from ncclops.record.preflight_record import PREFLIGHT
from ncclops.report.page import render, render_preflight
from ncclops.report.records import read

EVIL = "</title><script>alert(1)</script>"


def finding(check: str, status: Status, subject: str, read: str = "2 errors") -> Finding:
    return Finding(
        check=check,
        status=status,
        subject=subject,
        read=read,
        wanted="none",
        remedy=f"mend {check}",
    )


ECC = finding("gpu.ecc", Status.FAIL, "GPU 3")
LIMIT = finding("host.nofile", Status.WARN, "host", EVIL)


def verdict(count: int = 3) -> Verdict:
    """Of hosts of which the second lets nobody in and has bad memory, and all have a warning."""
    hosts = tuple(
        Facts(name=f"n{number}", uid=f"{number:032x}", findings=(LIMIT, *([ECC] * (number == 1))))
        for number in range(count)
    )
    cause = Cause(
        kind="unreachable",
        severity="FAIL",
        shape="host-in",
        symptom="dead",
        a=(1,),
        edges=2,
        how="timeout",
        hosts=(1,),
    )
    return Verdict(
        hosts=hosts,
        causes=(cause,),
        expected=3,
        edges=6,
        failed_edges=2,
        matrix=("-x.", ".-.", ".x-"),
    )


def page(run: Path, document: object) -> str:
    run.mkdir(parents=True, exist_ok=True)
    (run / "events.jsonl").write_text(
        json.dumps({"ts": 1.0, "event": "run-started", "run_id": "r", "world_size": 1}) + "\n"
    )
    (run / "preflight.json").write_text(json.dumps(document))
    return render(read(run))


@pytest.mark.usefixtures("starts_processes")
def test_the_page_shows_hosts_against_checks_the_edges_and_what_to_do(tmp_path: Path) -> None:
    own = NodeReport(host="n0", time=5.0, findings=(LIMIT, finding("gpu.xid", Status.OK, "GPU 0")))
    text = page(tmp_path / "run", hand_over.document([own], verdict()))
    assert "<h2>Preflight: FAIL</h2>" in text
    assert "3 hosts, 6 edges between them: 2 fail" in text
    assert "<th>host</th><th>gpu.ecc</th><th>host.nofile</th>" in text
    assert "<td>n1</td><td>FAIL</td><td>WARN</td>" in text
    assert "<td>n2</td><td></td><td>WARN</td>" in text
    assert re.findall(r'class="edge".*?<title>(.*?)</title>', text) == [
        "n0 to n1: dead",
        "n2 to n1: dead",
    ]
    assert "no connection passes to n1 from every other host" in text
    assert "mend gpu.ecc" in text
    assert "leave the host out" in text
    assert EVIL not in text
    assert "default-src 'none'" in text


def test_a_check_outside_a_run_has_a_page_of_its_own(tmp_path: Path) -> None:
    document = hand_over.document([NodeReport(host="n0", time=5.0, findings=(LIMIT,))], verdict())
    text = render_preflight(PREFLIGHT.parse(document, tmp_path))
    assert "<title>ncclops preflight</title>" in text
    assert len(re.findall(r'class="edge"', text)) == 2
    assert EVIL not in text


@pytest.mark.usefixtures("starts_processes")
def test_a_single_node_has_no_edges(tmp_path: Path) -> None:
    own = NodeReport(host="n0", time=5.0, findings=(ECC, finding("gpu.ecc", Status.FAIL, "GPU 4")))
    text = page(tmp_path / "run", hand_over.document([own]))
    assert "<td>n0</td><td>FAIL (2)</td>" in text
    assert 'class="edges"' not in text


@pytest.mark.usefixtures("starts_processes")
def test_a_damaged_or_foreign_document_is_left_out(tmp_path: Path) -> None:
    documents: tuple[object, ...] = (
        {"schema": "other/1"},
        [],
        {"schema": "ncclops.preflight/1", "hosts": 3},
    )
    for document in documents:
        assert "Preflight" not in page(tmp_path / "run", document)


@pytest.mark.parametrize("matrix", [("x",), ("-x.", "", "."), ("x" * 99,) * 99])
def test_a_matrix_of_another_size_than_the_hosts_is_drawn_as_far_as_it_goes(
    matrix: tuple[str, ...], tmp_path: Path
) -> None:
    document = hand_over.document([], verdict(40))
    document["edges"]["matrix"] = matrix
    assert 'class="edges"' in render_preflight(PREFLIGHT.parse(document, tmp_path))


def test_edges_without_end_do_not_make_a_page_without_end(tmp_path: Path) -> None:
    document = hand_over.document([], verdict(400))
    document["edges"]["matrix"] = ("x" * 400,) * 400
    text = render_preflight(PREFLIGHT.parse(document, tmp_path))
    assert text.count('class="edge"') == 10_000
    assert "Only the first 10,000 edges that do not pass are drawn" in text


def test_the_terminal_shows_hosts_against_checks_and_each_remedy_once() -> None:
    lines = shown.lines(verdict())
    start = next(number for number, line in enumerate(lines) if "gpu.ecc  host.nofile" in line)
    assert [line.split() for line in lines[start : start + 4]] == [
        ["gpu.ecc", "host.nofile"],
        ["n0", ".", "WARN"],
        ["n1", "FAIL", "WARN"],
        ["n2", ".", "WARN"],
    ]
    assert lines[-2:] == ["FAIL  n1  gpu.ecc GPU 3: 2 errors", "      -> mend gpu.ecc"]


def test_the_terminals_table_stays_small_for_many_hosts_and_checks() -> None:
    many = tuple(finding(f"host.check-number-{number}", Status.FAIL, "host") for number in range(9))
    hosts = tuple(Facts(name=f"n{n}", uid=f"{n:032x}", findings=many) for n in range(30))
    lines = shown.lines(Verdict(hosts=hosts, expected=30))
    (rest,) = (line for line in lines if "more" in line)
    assert rest == "  and 6 more hosts and 4 more checks: --json has all"
    assert max(len(line) for line in lines if line.startswith("  n")) <= 110
