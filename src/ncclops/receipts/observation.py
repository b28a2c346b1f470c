"""One observation of a run: the common form of records and of printed lines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ncclops.record import receipt_records
from ncclops.record.receipt_records import ReceiptRecord, StepRecord

# start       a worker process began, or began again
# begun       a first sign of training: set-up is behind it and steps, or their compile, come next
# warmup      compile warm-up is over, as the script or trainer says itself
# step        a step ended
# memory      peak memory so far
# end         the end marker
Kind = Literal["start", "begun", "warmup", "step", "memory", "end"]
RateUnit = Literal["tokens/s", "samples/s", "steps/s"]

LONGEST_EVIDENCE = 300


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
    """One observation. ``step`` is None where a trainer prints no number; then the order counts.

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


def parse_record(line: bytes, file: str, number: int) -> Observation | None:
    """The observation that a line of ``receipt.jsonl`` stands for; None if for none.

    Lines that are not whole (a process was killed while it wrote) count as none.
    """
    record = receipt_records.decode(line)
    if record is None:
        return None
    text = line.decode(errors="replace").strip()[:LONGEST_EVIDENCE]
    return observe_record(record, Where(file, number, text))


def observe_record(record: ReceiptRecord, where: Where) -> Observation | None:
    """The observation that a record of ``receipt.jsonl`` stands for; None if for none."""
    match record:
        case receipt_records.StartRecord() | receipt_records.IterationRecord():
            return Observation(kind="start", where=where)
        case receipt_records.WarmupBeginRecord():
            return Observation(kind="begun", where=where)
        case receipt_records.CompileWarmupRecord():
            return Observation(kind="warmup", where=where, seconds=record.seconds)
        case receipt_records.StepRecord():
            return _observe_step(record, where)
        case receipt_records.PeakMemoryRecord():
            return Observation(kind="memory", where=where, gib=record.gib)
        case receipt_records.EndRecord():
            return Observation(kind="end", where=where)
    return None


def _observe_step(record: StepRecord, where: Where) -> Observation:
    seconds, tokens = record.seconds, record.tokens
    rate = tokens / seconds if seconds and tokens is not None else None
    return Observation(
        kind="step",
        where=where,
        step=record.step,
        seconds=seconds,
        rate=rate,
        unit=None if rate is None else "tokens/s",
        undisturbed=record.phase_s is None,
    )
