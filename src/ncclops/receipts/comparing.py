"""Two runs compared by their receipts: rate, warm-up, peak memory, and what swings. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from ncclops.receipts.judge import Receipt

Name = Literal["rate", "warm-up", "peak-memory"]

# From which ratio on a difference is a swing. A rate differs by less between equal runs, except on
# a shared network; memory is the same to a few per cent unless something is sharded differently;
# warm-up depends on caches that one run has and the other fills.
LIMITS: dict[Name, float] = {"rate": 1.1, "warm-up": 2.0, "peak-memory": 1.25}


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure of both runs in ``unit``, None where a run does not show it.

    ``ratio`` is b to a, None unless both show it in one unit; ``swings``: it is beyond the limit.
    ``note`` says why a figure is missing, or what a swing means.
    """

    name: Name
    a: float | None
    b: float | None
    unit: str
    ratio: float | None
    swings: bool
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        return vars(self) | {"limit": LIMITS[self.name]}


def compare(a: Receipt, b: Receipt) -> tuple[Figure, ...]:
    """The figures of both, in the order in which people ask for them."""
    units = {receipt.rate_unit for receipt in (a, b) if receipt.rate_unit is not None}
    return (
        _figure(
            "rate",
            a,
            b,
            lambda receipt: receipt.steady_rate,
            unit=" and ".join(sorted(units)),
            alike=len(units) < 2,
        ),
        _figure("warm-up", a, b, lambda receipt: receipt.facts.warmup_seconds, unit="s"),
        _figure("peak-memory", a, b, lambda receipt: receipt.facts.peak_gib, unit="GiB"),
    )


def _figure(
    name: Name,
    a: Receipt,
    b: Receipt,
    value: Callable[[Receipt], float | None],
    *,
    unit: str,
    alike: bool = True,
) -> Figure:
    first, second = value(a), value(b)
    ratio = second / first if alike and first and second is not None else None
    limit = LIMITS[name]
    swings = ratio is not None and (ratio >= limit or ratio <= 1 / limit)
    notes = [*_missing(name, a, b, first, second)]
    if not alike:
        notes.append("the units differ")
    if swings and name == "peak-memory":
        notes.append("the rate says nothing of it: look for what is sharded or kept differently")
    return Figure(
        name=name,
        a=first,
        b=second,
        unit=unit,
        ratio=ratio,
        swings=swings,
        note="; ".join(notes),
    )


def _missing(
    name: Name, a: Receipt, b: Receipt, first: float | None, second: float | None
) -> Iterator[str]:
    for letter, receipt, value in (("A", a, first), ("B", b, second)):
        if value is not None:
            continue
        broken = next((rule.rule for rule in receipt.rules if not rule.ok), None)
        why = "" if broken is None or name != "rate" else f": {receipt.verdict}, {broken}"
        yield f"{letter} has none{why}"
