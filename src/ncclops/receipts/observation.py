"""What is seen of a run, one sight at a time: the common form of records and of printed lines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

# start       a worker process began, or began again
# begun       a first sign of training: set-up is behind it and steps, or their compile, come next
# warmup      compile warm-up is over, as the script or trainer says itself
# step        a step ended
# memory      peak memory so far
# end         the end marker
Kind = Literal["start", "begun", "warmup", "step", "memory", "end"]
RateUnit = Literal["tokens/s", "samples/s", "steps/s"]


@dataclass(frozen=True)
class Where:
    """The line that an observation was made in: ``line`` counts from 1, ``text`` is trimmed."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One sight. ``step`` is None where a trainer prints no number; then the order counts.

    ``seconds`` is the time that warm-up or the step took, ``rate`` is per second in ``unit``,
    ``undisturbed`` is False for a step with a declared phase in it.
    """

    kind: Kind
    where: Where
    step: int | None = None
    seconds: float | None = None
    rate: float | None = None
    unit: RateUnit | None = None
    gib: float | None = None
    undisturbed: bool = True


def parse_record(line: bytes | str, file: str, number: int) -> Observation | None:
    """The observation that a line of ``receipt.jsonl`` stands for; None if for none.

    Lines that are not whole (a process was killed while it wrote) count as none.
    """
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict):
        return None
    text = line.decode(errors="replace") if isinstance(line, bytes) else line
    return observe_record(record, Where(file, number, text.strip()))


def observe_record(record: Mapping[str, Any], where: Where) -> Observation | None:
    """The observation that a record of ``receipt.jsonl`` stands for; None if for none."""
    match record.get("kind"):
        case "start" | "iteration":
            return Observation(kind="start", where=where)
        case "warmup-begin":
            return Observation(kind="begun", where=where)
        case "compile-warmup":
            return Observation(kind="warmup", where=where, seconds=record.get("seconds"))
        case "step":
            return _observe_step(record, where)
        case "peak-memory":
            return Observation(kind="memory", where=where, gib=record.get("gib"))
        case "end":
            return Observation(kind="end", where=where)
    return None


def _observe_step(record: Mapping[str, Any], where: Where) -> Observation:
    seconds, tokens = record.get("seconds"), record.get("tokens")
    rate = tokens / seconds if seconds and tokens is not None else None
    return Observation(
        kind="step",
        where=where,
        step=record.get("step"),
        seconds=seconds,
        rate=rate,
        unit=None if rate is None else "tokens/s",
        undisturbed="phase_s" not in record,
    )
