"""What comes from outside is shown so that it cannot act on whoever looks at it."""

from __future__ import annotations

import json
import re
import socket
import unicodedata
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ncclops.host_name import host_name
from ncclops.plain_text import plain, plain_line
from ncclops.preflight import table
from ncclops.preflight.edges.model import Facts
from ncclops.preflight.machine.host_reader import read_name
from ncclops.preflight.model import Finding, NodeReport, Status
from tests.flight import dumps

Run = Callable[..., CompletedProcess[str]]

CLEAR, TITLE, TURNED = "\x1b[2J", "\x1b]0;owned\x07", "\u202egnp.exe"
HOSTILE = f"one{CLEAR}two{TITLE}three{TURNED}\x9b31m\rfour"


def acts(text: str) -> str:
    """The characters of ``text`` that a terminal or a page acts on."""
    kinds = ("LRE", "LRO", "RLE", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
    return "".join(
        each
        for each in text
        if (unicodedata.category(each) == "Cc" and each not in "\n\t")
        or unicodedata.bidirectional(each) in kinds
        or each in "\u200e\u200f\u061c\u2028\u2029"
    )


@given(st.text())
def test_nothing_acts_and_nothing_else_is_lost(text: str) -> None:
    shown = plain(text)
    assert acts(shown) == ""
    # Without what acts it is the same, but for the escapes that stand in its place.
    if not acts(text):
        assert shown == text


@given(st.text(), st.integers(min_value=1, max_value=50))
def test_a_line_is_one_and_has_its_length(text: str, most: int) -> None:
    line = plain_line(text, most)
    assert len(line) <= most
    assert acts(line) == "" and "\n" not in line and "\t" not in line


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[1;31mred\x1b[0m and plain", "red and plain"),
        ("a\x1b[2Jb", r"a\x1b[2Jb"),
        ("é ✓ 日本\ttab\nline", "é ✓ 日本\ttab\nline"),
        ("\u202egnp", r"\u202egnp"),
        ("10%\r20%", r"10%\r20%"),
    ],
)
def test_what_is_shown(text: str, shown: str) -> None:
    assert plain(text) == shown


def test_a_line_that_is_cut_says_so() -> None:
    assert plain_line("a  b\n c", 10) == "a b c"
    assert plain_line("x" * 10, 10) == "x" * 10
    assert plain_line("x" * 11, 10) == "x" * 9 + "…"
    assert plain_line("x" + " " * 1000 + "y", 10) == "x…"


def without_colours(shown: CompletedProcess[str]) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", shown.stdout + shown.stderr)


def test_a_dump_does_not_act_on_the_terminal(
    starts_processes: None, ncclops_in_process: Run, tmp_path: Path
) -> None:
    frames = dumps.frames(file=f"/home/{HOSTILE}.py")
    group = ("0", HOSTILE)
    entries = {
        rank: [dumps.entry(1, group=group, state=state, frames=frames)]
        for rank, state in ((0, "started"), (1, "completed"))
    }
    made = {rank: dumps.dump(each, {group: [0, 1, 2]}) for rank, each in entries.items()}
    dumps.write_pickles(tmp_path / "d", made, "trace_")
    shown = ncclops_in_process("flight", "analyze", "d", env={"FORCE_COLOR": "1"})
    assert "one" in shown.stdout and acts(without_colours(shown)) == ""


def test_a_log_does_not_act_on_the_terminal(ncclops_in_process: Run, tmp_path: Path) -> None:
    (tmp_path / "log").write_text(
        f"RuntimeError: {HOSTILE} CUDA error: out of memory{CLEAR}\n"
        f"torch.OutOfMemoryError: CUDA out of memory. {TITLE}{TURNED}\n"
    )
    shown = ncclops_in_process("classify", "log")
    assert "out of memory" in shown.stdout and acts(shown.stdout + shown.stderr) == ""


def test_an_error_is_one_clean_line_of_a_bearable_length(
    ncclops_in_process: Run, tmp_path: Path
) -> None:
    (tmp_path / "p.toml").write_text(f'[profile]\nname = "p"\n"{"x" * 100_000}\\u001b[2J" = 1\n')
    shown = ncclops_in_process("profile", "validate", "p.toml")
    assert shown.returncode == 2
    lines = shown.stderr.splitlines()
    assert len(lines) == 2, "one for each mistake: an unknown key, and a missing one"
    assert all(line.startswith("ncclops: error: ") and len(line) < 3000 for line in lines)
    assert acts(shown.stderr) == ""


def test_a_report_holds_nothing_that_acts(ncclops_in_process: Run, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text(
        json.dumps({"schema": "ncclops.run/1", "run_id": HOSTILE, "argv": [HOSTILE]})
    )
    shown = ncclops_in_process("report", "run", "-o", "page.html")
    page = tmp_path / "page.html"
    text = page.read_text() if page.exists() else ""
    assert acts(text + shown.stderr + shown.stdout) == ""
    assert shown.returncode == 2 or r"one\x1b[2J" in text


def test_a_host_name_is_one_clean_line_wherever_it_comes_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The kernel takes any bytes for it, and so does another host's message."""
    named = "node\n\x1b[2J\udcff1" + "x" * 300
    monkeypatch.setattr(socket, "gethostname", lambda: named)
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/hostname").write_text("node\n\x1b]0;owned\x07two\u202e\n")
    finding = Finding(check="kernel", status=Status.FAIL, subject="a\nb", read=HOSTILE, wanted="")
    report = NodeReport(host=named, time=0.0, findings=(finding,))
    other = msgspec.json.decode(msgspec.json.encode({"name": HOSTILE, "uid": "1"}), type=Facts)
    for name in (host_name(), report.host, other.name, read_name(tmp_path).host or "\n"):
        assert acts(name) == "" and "\n" not in name and len(name) <= 255
        name.encode()  # as records are written
    assert host_name().startswith(r"node \x1b[2J\udcff1x")
    shown = "\n".join(table.lines(report))
    assert acts(shown) == "" and len(shown.splitlines()) == 2
