"""The records of ``receipt.jsonl``: one type for each, as a worker's recorder writes them.

``receipts.recorder`` writes plain dictionaries, since scripts import it and it must stay light; a
test holds that all it writes has a type here. Readers take no notice of unknown fields and kinds.
"""

from __future__ import annotations

import functools
from typing import Annotated, Union

import msgspec

from ncclops.moments import LATEST_S

Seconds = Annotated[float, msgspec.Meta(ge=0)]


class ReceiptRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """What every record has."""

    ts: float
    """when it was noted, in seconds since the epoch"""
    iteration: int = 0
    """the iteration of the script, from 0"""


class StartRecord(ReceiptRecord, tag="start", frozen=True, kw_only=True):
    """The worker process begins."""

    pid: int | None = None
    rank: int | None = None
    attempt: str | int | None = None


class IterationRecord(ReceiptRecord, tag="iteration", frozen=True, kw_only=True):
    """The script is entered again, in the same process."""


class WarmupBeginRecord(ReceiptRecord, tag="warmup-begin", frozen=True, kw_only=True):
    """Compile warm-up begins."""


class WarmupFailedRecord(ReceiptRecord, tag="warmup-failed", frozen=True, kw_only=True):
    """Compile warm-up ended with an exception."""


class CompileWarmupRecord(ReceiptRecord, tag="compile-warmup", frozen=True, kw_only=True):
    """Compile warm-up is over."""

    seconds: Seconds | None = None
    """how long it took, where the script says so"""


class StepRecord(ReceiptRecord, tag="step", frozen=True, kw_only=True):
    """A step has ended."""

    step: int
    """as the script counts"""
    seconds: Seconds | None = None
    """since the step before, or the end of warm-up; null where neither was seen"""
    first: bool = False
    """the first since the start or restart: it contains the compile"""
    tokens: float | None = None
    loss: float | str | None = None
    """text where it is not finite"""
    busy_s: Seconds | None = None
    """without waiting for other ranks, where the script reports it"""
    phase_s: Seconds | None = None
    """of this step spent in declared phases; null without one"""

    @property
    def disturbed(self) -> bool:
        """Whether its time says nothing of a usual step: a compile or a declared phase is in it."""
        return self.first or self.phase_s is not None


class PaceRecord(ReceiptRecord, tag="pace", frozen=True, kw_only=True):
    """How much of its last units of work the rank has waited for others in collectives."""

    unit: str
    """step; update of an optimizer, where the script reports no steps; or stretch of time"""
    number: int
    """of the last unit"""
    first: int
    """of the first unit"""
    since: float
    """when the first one ended, in seconds since the epoch"""
    units: int
    """how many were looked at"""
    fresh: int
    """how many of them have come since the last such record"""
    seconds: Seconds
    """the median unit's length"""
    waited: float
    """the median share of waiting"""
    error: float
    """its standard error"""
    peers: list[int] | None = None
    """ranks that do the same work; null: all"""


class PhaseBeginRecord(ReceiptRecord, tag="phase-begin", frozen=True, kw_only=True):
    """A declared phase begins."""

    phase: str
    limit_s: Seconds


class PhaseEndRecord(ReceiptRecord, tag="phase-end", frozen=True, kw_only=True):
    """A declared phase is over."""

    phase: str
    seconds: Seconds


class PeakMemoryRecord(ReceiptRecord, tag="peak-memory", frozen=True, kw_only=True):
    """The peak memory of the process so far."""

    gib: float
    source: str = ""
    """device or host"""


class StopRecord(ReceiptRecord, tag="stop", frozen=True, kw_only=True):
    """The agreed stop takes effect here."""

    step: int | None = None
    update: int | None = None


class EndRecord(ReceiptRecord, tag="end", frozen=True, kw_only=True):
    """Training is complete, or was stopped."""

    how: str = ""


TYPES: tuple[type[ReceiptRecord], ...] = tuple(ReceiptRecord.__subclasses__())


@functools.cache
def _decoder() -> msgspec.json.Decoder[ReceiptRecord]:
    return msgspec.json.Decoder(Union[TYPES])  # noqa: UP007


def decode(line: bytes | str) -> ReceiptRecord | None:
    """The record in ``line``; None for what is not whole, not known or not well-formed."""
    try:
        record = _decoder().decode(line)
    except (ValueError, RecursionError):  # of msgspec and of Unicode
        return None
    return record if 0 <= record.ts <= LATEST_S else None
