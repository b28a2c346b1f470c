"""Lines, the order of ranks, events in words, and numbers as a table shows them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ncclops.live_view.history import History, describe
from ncclops.live_view.lines import Line, encode, line
from ncclops.live_view.order import Concern, concerns, worst_first
from ncclops.live_view.words import age, count, duration, short
from ncclops.record import events
from ncclops.record.event_values import GpuFault
from ncclops.record.events import (
    TYPES,
    ControlEvent,
    EscalationEvent,
    Event,
    FaultEvent,
    GpuFaultEvent,
    HangEvent,
    RestartEvent,
    RetryEvent,
    StepEvent,
    StopRequestedEvent,
    StragglerEvent,
    VerdictEvent,
    WorkerExitedEvent,
)
from tests.live_view.scenes import NOW, rank, status, with_trouble


def test_a_line_is_cut_and_filled_by_columns() -> None:
    wide = line("漢字").add("abc", "red")
    assert wide.columns == 7
    assert wide.fit(7) is wide
    assert wide.fit(6).text == "漢字a…"
    assert wide.fit(2).columns == 2
    assert wide.fit(0) == Line()
    assert wide.pad(9).text == "漢字abc  "
    assert wide.pad(4).columns == 4


def test_a_long_line_goes_on_below() -> None:
    rows = line("one two three four").wrapped(9, indent=2)
    assert [row.text for row in rows] == ["one two ", "  three ", "  four"]
    assert [row.text for row in line("x" * 20).wrapped(8)] == ["x" * 8, "x" * 8, "x" * 4]
    rows = line("rank 0: /home/someone/train.py:15 in f").wrapped(26)
    assert [row.text for row in rows] == ["rank 0: /home/someone/", "train.py:15 in f"]
    assert len(line("漢" * 10).wrapped(5)) == 5
    assert [row.text for row in line("abc").wrapped(1)] == ["abc"]


def test_other_character_sets_get_what_they_have() -> None:
    bar = line("█▓░×…", "green")
    assert encode(bar, colour=True, encoding="utf-8") == "\x1b[32m█▓░×…\x1b[m".encode()
    assert encode(bar, colour=False, encoding="ascii") == b"#=-x~"
    assert encode(line("漢"), colour=False, encoding="no-such-set") == b"?"


def test_who_is_looked_at_first() -> None:
    seen = with_trouble(16)
    found = concerns(seen)
    assert [each.rank for each in worst_first(seen, found)][:5] == [15, 9, 3, 0, 1]
    assert [found[number] for number in (15, 9, 3, 0)] == list(Concern)


def test_of_silent_ranks_the_one_behind_is_first() -> None:
    silent = [rank(number, step_age_s=60.0, step=100) for number in range(4)]
    silent[2] = replace(silent[2], step=99)
    seen = status(silent)
    assert [each.rank for each in worst_first(seen, concerns(seen))] == [2, 0, 1, 3]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"step_age_s": 9.0}, Concern.NONE),
        ({"step_age_s": 11.0}, Concern.SILENT),
        ({"step_age_s": 3600.0, "phase": "checkpoint"}, Concern.NONE),
        ({"step_age_s": None}, Concern.NONE),
        ({"step_ratio": 1.06}, Concern.SLOW),
    ],
)
def test_when_a_rank_is_of_concern(fields: dict[str, object], expected: Concern) -> None:
    assert concerns(status([rank(0, **fields)]))[0] is expected
    over = status([rank(0, **fields)], phase="ended")
    assert concerns(over)[0] is Concern.NONE


def test_long_steps_are_not_silence() -> None:
    slow = status([rank(0, step_age_s=60.0)], median_step_s=30.0)
    assert concerns(slow)[0] is Concern.NONE


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (FaultEvent(rank=2, cause="a\nb", on="n2"), "rank 2: a b on n2"),
        (
            FaultEvent(cause="node-lost", kind="node-lost", why="silent for 9 s", on="n2"),
            "node lost on n2: silent for 9 s",
        ),
        (
            RestartEvent(world_size=1, ranks_lost=[3, 4], phases_ms={"abort": 12.0}),
            "restart in place after 12 ms, 1 rank goes on, without ranks 3, 4",
        ),
        (
            RestartEvent(world_size=4, ranks_lost=[1, 3], ranks_returned=[1]),
            "restart in place, 4 ranks go on, without rank 3, rank 1 in a new process",
        ),
        (FaultEvent(rank=1, cause="rank 1: the process died"), "rank 1: the process died"),
        (HangEvent(rank=1, culprits=[1], cause="rank 1: stale"), "rank 1: hangs: stale"),
        (HangEvent(rank=1, culprits=[1, 2], cause="stale"), "rank 1: ranks 1, 2 hang: stale"),
        (RestartEvent(cause="x", instead="stop"), "no restart in place (stop follows): x"),
        (RetryEvent(attempt=2, reason="why", cooldown_s=90.0), "attempt 2 in 1m30s: why"),
        (EscalationEvent(to="respawn", reason="why"), "new processes: why"),
        (WorkerExitedEvent(rank=1, signal="SIGKILL"), "rank 1: process ended: SIGKILL"),
        (VerdictEvent(outcome="failed", exit_code=1, reason="failed: x"), "failed: x"),
        (ControlEvent(action="stop", reason="drain", by="me"), "stop was requested by me: drain"),
        (StopRequestedEvent(signal="SIGKILL", ranks=[1, 2]), "killed ranks 1, 2"),
        (
            StragglerEvent(rank=3, ratio=1.07, kind="chronic", since_step=1, since=NOW),
            "rank 3: chronic straggler, 1.07 of the median",
        ),
        (
            GpuFaultEvent(rank=0, fault=GpuFault(rank=0, node="n1", what="Xid 79")),
            "rank 0: GPU on node n1: Xid 79; replace node n1",
        ),
    ],
)
def test_events_in_words(event: Event, text: str) -> None:
    found = describe(event)
    assert found is not None
    assert found.text == text


def test_what_is_usual_is_no_happening() -> None:
    assert describe(StepEvent(rank=0, step=1)) is None
    assert describe(WorkerExitedEvent(rank=0, exit_code=0)) is None


def test_the_same_of_many_ranks_is_one_line() -> None:
    history = History()
    for number in range(100):
        history.take(WorkerExitedEvent(ts=NOW + number / 100, rank=number, exit_code=1))
    history.take(WorkerExitedEvent(ts=NOW + 60, rank=5, exit_code=1))
    seen = [each.text for each in history.until(NOW + 60).happenings]
    assert seen == ["ranks 0-99: process ended: exit code 1", "rank 5: process ended: exit code 1"]


def test_any_event_of_any_version_can_be_taken() -> None:
    """With nothing but what it must have, as a damaged line may decode."""
    history = History()
    for kind in TYPES:
        for text in (b"{}", b'{"x": 1}'):
            decoded = events.decode(
                b'{"ts": 1.0, "event": "%b", "rank": null, %b'
                % (events.name_of(kind).encode(), text[1:])
            )
            if decoded is not None:
                history.take(decoded)
    assert history.until(2.0).began == 1.0


def test_numbers_that_are_read_at_a_glance() -> None:
    assert [short(each) for each in (0.0004, 0.412, 1.25)] == ["0 ms", "412 ms", "1.25 s"]
    assert [duration(each) for each in (9, 59.9, 728, 11100)] == ["9s", "1m00s", "12m08s", "3h05m"]
    assert [age(each) for each in (0.44, 9.96, 99, 120, 7200, 400_000, 1e12)] == [
        *("0.4s", "10s", "99s", "2m", "2h", "5d", "9999d")
    ]
    assert all(len(age(10.0**power)) <= 5 for power in range(-3, 12))
    assert (count(1, "rank"), count(0, "rank")) == ("1 rank", "0 ranks")
