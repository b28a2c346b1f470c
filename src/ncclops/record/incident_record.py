"""``incident.json``: why workers failed or stood still, and what followed.

Two write it: the restart core, which is usable alone and has a writer of its own
(``restart.incident``), and the agent, where no restart core runs. Both are read here.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import msgspec

from ncclops.record.documents import write_document
from ncclops.record.paths import INCIDENT
from ncclops.record.regular_file import read_regular
from ncclops.whole_numbers import whole_number

SCHEMA = "ncclops.incident/1"
# The cause on a node of which no rank has failed: one of another node has.
ELSEWHERE = "elsewhere"
_MOST_ABSENT = 16  # as many as a rank names
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+")


# What a rank says that has waited for others before a process group was made (worker.meeting).
_ABSENT = re.compile(
    r"waited \d+ s for ranks? (?P<ranks>[\d, -]{1,200})(?: and \d+ more)? of \d+,"
    r" which had not come to [^\n]{1,500}?: rank \d+ on "
)


def absent_ranks(said: str) -> list[int]:
    """The ranks that did not come to where the rank waited that ``said`` this; none: not known."""
    found = _ABSENT.search(said)
    ranks: list[int] = []
    for each in found["ranks"].split(", ") if found else ():
        first, _, last = each.partition("-")
        if (begin := whole_number(first)) is not None:
            end = whole_number(last or first)
            ranks += range(begin, begin if end is None else end + 1)[:_MOST_ABSENT]
    return ranks[:_MOST_ABSENT]


def same_words(one: str, other: str) -> bool:
    """Whether two texts of errors differ in numbers at most (of a batch, a port, an object)."""
    return _NUMBER.sub("", one) == _NUMBER.sub("", other)


class RaisedRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The type of an exception: its name, and those of its base classes."""

    name: str
    bases: list[str] = []


class TimeoutRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The limit that a silent rank has exceeded; seconds."""

    limit: str = ""
    limit_s: float | None = None
    silent_s: float | None = None
    clock: str | None = None


class EscalationRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank asks for that left to end restarting."""

    to: str
    reason: str = ""
    failure: tuple[str, str] | None = None


class FaultRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's fault, as ``restart.attribution.Fault``."""

    kind: str
    initial_rank: int
    rank: int | None = None
    iteration: int = 0
    at: float = 0.0
    summary: str = ""
    traceback: str | None = None
    gone: bool = False
    secondary: bool = False
    detail: str | None = None
    raised: RaisedRecord | None = None
    timeout: TimeoutRecord | None = None
    escalation: EscalationRecord | None = None
    device: str | None = None


class GroupRecord(msgspec.Struct, frozen=True, kw_only=True):
    """How a process group has come to its members after it, as ``restart.regroup.Regrouped``."""

    group: str
    rung: str
    why: str | None = None
    ms: float = 0.0


class IncidentRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One incident, as ``restart.incident.Incident`` describes it. Ranks are initial ranks.

    The agent's own has an ``attempt`` and no ``initial_rank``, ``rank_before`` and ``rank``;
    ``silent`` are the ranks that gave no snapshot. ``at`` is in seconds since the epoch.
    ``absent_ranks`` have raised nothing: ``first_faulty_rank`` has, which had waited for them.
    """

    schema: str = SCHEMA
    iteration: int
    cause: str
    summary: str
    first_faulty_rank: int
    at: float
    faulty_ranks: list[int] = []
    ranks_lost: list[int] = []
    ranks_returned: list[int] = []
    absent_ranks: list[int] = []
    exception: str | None = None
    traceback: str | None = None
    faults: list[FaultRecord] = []
    world_size_before: int | None = None
    world_size: int | None = None
    initial_rank: int | None = None
    rank_before: int | None = None
    rank: int | None = None
    phases_ms: dict[str, float] = {}
    detail: str | None = None
    raised: RaisedRecord | None = None
    timeout: TimeoutRecord | None = None
    escalation: EscalationRecord | None = None
    attempt: int | None = None
    silent: list[int] = []
    groups: list[GroupRecord] = []

    def to_json(self) -> dict[str, Any]:
        """As in the file."""
        document: dict[str, Any] = msgspec.to_builtins(self)
        return document


@functools.cache
def _decoder() -> msgspec.json.Decoder[IncidentRecord]:
    return msgspec.json.Decoder(IncidentRecord)


def read(directory: Path) -> IncidentRecord | None:
    """The incident in ``directory``, or what a rank that left wrote where none went on.

    None without either, or where they are damaged.
    """
    for path in (directory / INCIDENT, *sorted(directory.glob("left-rank*.json"))):
        try:
            return _decoder().decode(read_regular(path))
        except (OSError, ValueError, RecursionError):
            continue
    return None


def write(directory: Path, incident: IncidentRecord) -> None:
    """Write it, whole or not at all. Raises ``OSError``."""
    write_document(directory / INCIDENT, incident.to_json())
