"""``events.jsonl``: the one place that writes it, and the one that reads it."""

from __future__ import annotations

import time
from pathlib import Path

from ncclops.record import events, line_writer
from ncclops.record.events import Event
from ncclops.record.lines import RecordReader, encode_line, read_records

EventReader = RecordReader[Event]


def append(path: Path, event: Event, node: str = "") -> None:
    """Write one line, of now if the event has no time. Raises ``OSError``."""
    line_writer.append(path, encode(event, node))


def encode(event: Event, node: str = "") -> bytes:
    """The line of ``event``, of now if it has no time, and of ``node`` if it names none."""
    fields = events.fields_of(event)
    if event.ts == events.UNSTAMPED:
        fields["ts"] = time.time()
    fields["node"] = event.node or node
    return encode_line(fields)


def follow(path: Path) -> EventReader:
    """Reads each event once, also those still to come. Raises ``OSError``."""
    return RecordReader(path, events.decode)


def read(path: Path) -> list[Event]:
    """All events, in the order of the file; none if there is no file."""
    return read_records(path, events.decode)
