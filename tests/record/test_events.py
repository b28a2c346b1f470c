"""Events as lines of a file: what is written is read back, and nothing in a file is a fault."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ncclops.record import event_log, events
from ncclops.record.events import Event, FaultEvent, StepEvent, WorkerExitedEvent
from ncclops.record.lines import encode_line
from tests.record.strategies import EVENTS

STEP = {"ts": 5.0, "event": "step", "rank": 0, "node": "n0", "step": 7}


def line(**changes: Any) -> bytes:
    return json.dumps(STEP | changes).encode()


def read_back(content: bytes) -> tuple[list[Event], int]:
    """The events in a file with ``content``, and how many lines were skipped."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "events.jsonl"
        path.write_bytes(content)
        reader = event_log.follow(path)
        found = [*reader.new(), *reader.rest()]
        reader.close()
        return found, reader.skipped


@given(EVENTS)
def test_every_event_is_read_back_as_it_was_written(event: Event) -> None:
    written = encode_line(events.fields_of(event))
    assert written.count(b"\n") == 1
    assert events.decode(written) == event


@given(EVENTS)
def test_a_line_begins_with_what_every_event_has(event: Event) -> None:
    fields = json.loads(encode_line(events.fields_of(event)))
    assert list(fields)[:4] == ["ts", "event", "rank", "node"]
    assert fields["event"] == events.name_of(event)


@given(st.lists(EVENTS, max_size=4), st.data())
def test_a_file_that_is_cut_off_anywhere_loses_only_what_was_cut(
    written: list[Event], data: st.DataObject
) -> None:
    lines = [encode_line(events.fields_of(event)) for event in written]
    content = b"".join(lines)
    cut = data.draw(st.integers(0, len(content)))
    found, _ = read_back(content[:cut])
    whole = content[:cut].count(b"\n")
    assert found[:whole] == written[:whole]
    assert len(found) <= whole + 1  # the newline alone was cut


@given(st.lists(EVENTS, min_size=1, max_size=3), st.data())
def test_damage_in_one_line_is_no_fault_and_leaves_the_others(
    written: list[Event], data: st.DataObject
) -> None:
    lines = [bytearray(encode_line(events.fields_of(event))) for event in written]
    broken = data.draw(st.integers(0, len(lines) - 1))
    for _ in range(data.draw(st.integers(1, 5))):
        at = data.draw(st.integers(0, len(lines[broken]) - 2))
        lines[broken][at] = data.draw(st.integers(0, 255).filter(lambda byte: byte != 10))
    found, skipped = read_back(b"".join(lines))
    assert found[:broken] == written[:broken]
    assert found[len(found) - (len(written) - broken - 1) :] == written[broken + 1 :]
    assert len(found) + skipped == len(written)


@given(st.binary())
def test_anything_may_stand_in_the_file(content: bytes) -> None:
    read_back(content)


@pytest.mark.parametrize(
    "written",
    [
        line(event="something-new"),
        line(event=3),
        line(ts="now"),
        line(ts=None),
        line(ts=-2.0),
        line(ts=1e300),
        json.dumps({"event": "step", "step": 1}).encode(),
        line(ts=float("nan")),
        line(ts=float("inf")),
        line(step_s=float("nan")),
        line(step="seven"),
        line(step=None),
        line(step=True),
        line(rank="0"),
        line(rank=-1),
        line(node={"name": "n0"}),
        b"[1, 2]",
        b"null",
        b"7",
        b'"step"',
        b"not JSON",
        b'{"ts": 5.0, "event": "st',
        b"\xff\xfe\x00",
        b'{"ts": 5, "event": "fault", "cause": "\\ud800"}',
        b'{"ts": 5, "event": "step", "step": 1, "other": ' + b"[" * 100_000,
        b'{"a":' * 100_000,
    ],
)
def test_what_is_no_event_is_skipped_and_counted(written: bytes) -> None:
    good = line()
    found, skipped = read_back(good + b"\n" + written + b"\n" + good + b"\n")
    assert [event.ts for event in found] == [5.0, 5.0]
    assert skipped == 1


def test_fields_of_a_later_version_are_passed_over() -> None:
    event = events.decode(line(new_field=[1, {"a": None}]))
    assert event == StepEvent(ts=5.0, rank=0, node="n0", step=7)


def test_fields_that_an_older_version_did_not_write_have_their_default() -> None:
    assert events.decode(b'{"ts": 1, "event": "worker-exited"}') == WorkerExitedEvent(ts=1.0)


def test_an_empty_line_is_not_counted() -> None:
    assert read_back(b"\n\n" + line() + b"\n\n") == ([StepEvent(**_fields())], 0)


def _fields() -> dict[str, Any]:
    return {name: value for name, value in STEP.items() if name != "event"}


def test_an_event_without_a_time_gets_that_of_its_writing(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    event_log.append(path, StepEvent(step=1), "n0")
    event_log.append(path, StepEvent(step=2, ts=7.0, node="n1"), "n0")
    first, second = event_log.read(path)
    assert first.ts > 7e8
    assert (first.node, second.node, second.ts) == ("n0", "n1", 7.0)


def test_half_a_character_in_a_text_does_not_keep_the_event_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    event_log.append(path, FaultEvent(cause="cannot open \udcff.bin"))
    (event,) = event_log.read(path)
    assert isinstance(event, FaultEvent)
    assert event.cause == "cannot open ?.bin"


def test_a_number_that_is_not_finite_becomes_null(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    event_log.append(path, StepEvent(step=1, step_s=float("inf")))
    assert json.loads(path.read_text())["step_s"] is None


def test_a_reader_reads_each_event_once_and_those_still_to_come(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.touch()
    reader = event_log.follow(path)
    assert list(reader.new()) == []
    for step in (1, 2):
        event_log.append(path, StepEvent(step=step))
        assert [event.step for event in reader.new() if isinstance(event, StepEvent)] == [step]
    with path.open("ab") as file:
        file.write(line(step=3)[:-4])
    assert list(reader.new()) == []
    with path.open("ab") as file:
        file.write(line(step=3)[-4:] + b"\n")
    assert len(list(reader.new())) == 1
    reader.close()


def test_a_file_that_is_not_there_holds_no_events(tmp_path: Path) -> None:
    assert event_log.read(tmp_path / "events.jsonl") == []


def test_names_of_events_are_given_once() -> None:
    names = [events.name_of(kind) for kind in events.TYPES]
    assert len(set(names)) == len(names)
