"""The screen at any size: what it shows first, and that nothing goes beyond its edges."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from ncclops.live_view.composing import Content, Scene, compose
from ncclops.live_view.history import Past
from ncclops.live_view.lines import encode, line
from ncclops.live_view.view import Page, View, pressed
from ncclops.status.model import FaultStatus, LastEvent, RunStatus
from tests.live_view.scenes import NOW, past, rank, scene, status, with_trouble

HOSTILE = "\x1b]0;owned\x07\x1b[2J\r\nrm\u202e\u2028漢字\udc80" + "a\u0301" * 3000 + "\x9b31m"


def shown(seen: Scene, columns: int = 80, rows: int = 24) -> list[str]:
    """The text of the frame; what holds for each is looked at here."""
    frame = compose(seen, columns, rows)
    assert len(frame.lines) == rows
    assert all(each.columns <= columns for each in frame.lines)
    return [each.text for each in frame.lines]


def ranks_in(lines: list[str]) -> list[int]:
    """Those in the table, from the top."""
    head = next(number for number, text in enumerate(lines) if text.startswith("  rank"))
    rows = (text[2:].split() for text in lines[head + 1 : -1])
    return [int(row[0]) for row in rows if row and row[0].isdecimal()]


@pytest.mark.parametrize("size", [(80, 24), (40, 10), (200, 60), (20, 5), (7, 3), (1, 1)])
@pytest.mark.parametrize("ranks", [0, 1, 8, 4096])
def test_any_size_holds_any_run(ranks: int, size: tuple[int, int]) -> None:
    seen = with_trouble(ranks) if ranks > 3 else status(ranks)
    content = Content(title="x" * 300, lines=lambda _: [line("word " * 100)] * 20)
    for page in get_args(Page):
        shown(scene(seen, view=View(page=page), content=content), *size)
    shown(scene(seen, view=View(page="log")), *size)


def test_eight_ranks_in_their_order_at_80_columns() -> None:
    lines = shown(scene(with_trouble(8)))
    assert lines[0] == "training · step 1412 · 412 ms a step · 1h06m · goodput 88.4%"
    assert lines[1:4] == [
        "failed: 7",
        "no step: rank 5 for 45s (at 1399)",
        "slow: rank 3 +7% (chronic)",
    ]
    assert ranks_in(lines) == list(range(8))
    head = next(text for text in lines if text.startswith("  rank"))
    for name in ("phase", "step", "step time", "ratio", "seen", "memory", "GPU", "restarts"):
        assert name in head
    assert [text[0] for text in lines if text.startswith(">")] == [">"]
    assert next(text for text in lines if text.startswith(">")).split()[1] == "7"  # it has failed
    assert lines[-1].startswith("j k rank")


def test_the_worst_of_4096_are_first_and_all_can_be_reached() -> None:
    seen = scene(with_trouble(4096))
    lines = shown(seen)
    assert ranks_in(lines)[:4] == [4095, 2049, 3, 0]
    assert "of 4096 ranks, worst first" in lines[-1]
    assert lines[-1].rstrip().startswith("j k rank")
    frame = compose(seen, 80, 24)
    last = compose(replace(seen, view=pressed(frame.view, "G", frame.extent)), 80, 24)
    assert ranks_in([each.text for each in last.lines])[-1] == 4094
    view = frame.view
    for digit in "1234":
        view = pressed(view, digit, frame.extent)
    found = shown(replace(seen, view=view))
    assert next(text for text in found if text.startswith(">")).split()[1] == "1234"
    assert found[-1].endswith("rank 1234_")


def test_a_narrow_screen_keeps_what_matters() -> None:
    lines = shown(scene(with_trouble(8)), 40, 10)
    assert lines[0] == "training · step 1412 · 412 ms a step"
    assert lines[1] == "failed: 7"
    assert ranks_in(lines) == [7, 5, 3]
    assert "q quit" in lines[-1]


def test_rows_that_ranks_leave_show_what_happened_last() -> None:
    lines = shown(scene(status(2)))
    at = lines.index("")
    assert "restart in place after 104 ms, 8 ranks go on" in lines[at + 1]
    assert "rank 5: RuntimeError: illegal access" in lines[at + 2]
    assert "ranks 0-3: warmed up after 1m00s" in lines[at + 3]


def test_an_ended_run_says_why() -> None:
    seen = status(
        2, phase="ended", outcome="failed", exit_code=1, reason="failed: rank 1 exited with code 1"
    )
    lines = shown(scene(seen))
    assert lines[0].startswith("failed · exit code 1 · step 1412")
    assert lines[1] == "rank 1 exited with code 1"


def test_a_status_that_does_not_come_is_said_to_be_old() -> None:
    assert shown(scene(status(2), silent_s=3.0))[1] != "no answer for 3s: this is what was known"
    assert shown(scene(status(2), silent_s=42.0))[1].startswith("no answer for 42s")


def test_a_look_that_has_failed_is_told() -> None:
    lines = shown(scene(status(2), trouble="internal error: KeyError: 3"))
    assert lines[1] == "the run cannot be looked at: internal error: KeyError: 3"


def hostile() -> RunStatus:
    ranks = tuple(
        rank(
            number,
            host=HOSTILE,
            phase=HOSTILE,
            last_event=LastEvent(ts=NOW, event=HOSTILE, text=HOSTILE),
        )
        for number in range(8)
    )
    return status(
        ranks,
        run_id=HOSTILE,
        profile=HOSTILE,
        notes=(HOSTILE,),
        reason=HOSTILE,
        outcome=HOSTILE,
        last_fault=FaultStatus(ts=NOW, rank=1, kind=HOSTILE, cause=HOSTILE),
    )


@pytest.mark.parametrize("columns", [40, 80, 300])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
def test_nothing_from_outside_acts_on_the_terminal(columns: int, encoding: str) -> None:
    content = Content(title=HOSTILE, lines=lambda _: [line(HOSTILE)])
    for view in (View(), View(page="log")):
        frame = compose(scene(hostile(), view=view, content=content), columns, 24)
        for each in frame.lines:
            assert each.columns <= columns
            plain = encode(each, colour=False, encoding=encoding).decode(encoding)
            for sequence in ("\x1b[1m", "\x1b[2m", "\x1b[7m", "\x1b[m"):
                plain = plain.replace(sequence, "")
            assert plain.isprintable()
            assert "\u202e" not in plain


def test_no_colour_keeps_the_text_and_weight() -> None:
    frame = compose(scene(with_trouble(8)), 80, 24)
    written = b"".join(encode(each, colour=False, encoding="utf-8") for each in frame.lines)
    assert b"\x1b[3" not in written
    assert b";3" not in written
    assert b"\x1b[7m" in written  # the chosen rank
    assert b"\x1b[32m" in encode(frame.lines[0], colour=True, encoding="utf-8")


def test_the_last_hour_as_a_bar() -> None:
    frame = compose(scene(status(2)), 80, 24)
    bar = next(each.text for each in frame.lines if each.text.startswith("last 1h00m"))
    assert len(bar) == 80
    assert bar.count("×") == 1
    at = bar.index("×") / 68
    assert 0.8 < at < 1.0  # ten of sixty minutes ago, after the label
    assert bar.endswith("█│")


def test_a_run_that_begins_has_an_empty_bar_before_it() -> None:
    young = scene(status(2), past=past(610.0))
    bar = next(each.text for each in compose(young, 80, 24).lines if "last 10m" in each.text)
    assert bar.startswith("last 10m10s │░")
    nothing = shown(scene(status(2), past=Past()))
    assert not any("last " in text and "│" in text for text in nothing[:6])


def test_the_timeline_says_what_the_hour_was_spent_on() -> None:
    lines = shown(scene(status(2), view=View(page="timeline")))
    assert any(text.startswith("██ steps ") for text in lines)
    assert any(text.startswith("▓▓ steps done again ") for text in lines)
    assert any(text.split() == ["×", "faults", "1"] for text in lines)
    assert lines[-1].startswith("q back")


def test_a_long_line_of_a_page_goes_on_below_its_text() -> None:
    lines = [line("  class     ", "dim").add("word " * 10), line("    cause " + "word " * 10)]
    content = Content(title="incident", lines=lambda _: lines)
    seen = shown(scene(status(2), view=View(page="incident"), content=content), columns=40)
    assert [len(text) - len(text.lstrip(" ")) for text in seen[1:5]] == [2, 12, 4, 6]
