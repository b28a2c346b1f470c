"""How much of a run's time went into training that lasted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from ncclops.goodput.spans import KINDS, Span
from ncclops.record.verdict_record import GoodputFigures


@dataclass(frozen=True)
class Goodput:
    """``seconds`` in each kind of span; ``ratio`` of steps (not of redone ones) to all of it.

    ``ratio`` is None where no training was seen: without receipts, and without lines that show
    steps, there is nothing to say.
    """

    seconds: Mapping[str, float]
    ratio: float | None

    @property
    def total(self) -> float:
        """Seconds from the start to the verdict."""
        return sum(self.seconds.values())

    def to_record(self) -> GoodputFigures:
        """As in ``verdict.json``, rounded."""
        return GoodputFigures(
            ratio=None if self.ratio is None else round(self.ratio, 4),
            total_s=round(self.total, 3),
            seconds={kind: round(seconds, 3) for kind, seconds in self.seconds.items()},
        )

    def to_json(self) -> dict[str, Any]:
        """The same as JSON: ``{ratio, total_s, seconds: {kind: s}}``."""
        document: dict[str, Any] = msgspec.to_builtins(self.to_record())
        return document


def describe(figures: GoodputFigures) -> str | None:
    """The figures in one line, None where no training was seen."""
    if figures.ratio is None:
        return None
    parts = [f"{kind} {seconds:.1f}s" for kind, seconds in figures.seconds.items() if seconds]
    return f"goodput: {figures.ratio:.1%} ({', '.join(parts)})"


def measure(spans: Iterable[Span]) -> Goodput:
    """Add up ``spans``; every kind is there, in the order of ``KINDS``."""
    seconds = dict.fromkeys(map(str, KINDS), 0.0)
    for span in spans:
        seconds[span.kind] += span.seconds
    total = sum(seconds.values())
    trained = seconds["steps"] + seconds["redone"] > 0
    return Goodput(seconds, seconds["steps"] / total if trained and total else None)
