"""What counts as a swing between two runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ncclops.receipts.comparing import LIMITS, Name, compare
from ncclops.receipts.judge import Receipt, judge
from ncclops.receipts.observation import RateUnit, Where
from ncclops.receipts.receipt_facts import Facts

LINE = Where("train.log", 1, "a line")
HEALTHY = Facts(
    begun=LINE, warmup=LINE, warmup_seconds=30.0, first=LINE, real=(LINE, LINE, LINE), steps=4,
    real_steps=3, steady_rate=100.0, rate_unit="tokens/s", peak=LINE, peak_gib=16.0, end=LINE,
)  # fmt: skip


def receipt(
    rate: float = 100.0,
    warmup: float | None = 30.0,
    gib: float = 16.0,
    unit: RateUnit = "tokens/s",
) -> Receipt:
    return judge(
        replace(HEALTHY, steady_rate=rate, warmup_seconds=warmup, peak_gib=gib, rate_unit=unit)
    )


def swings(a: Receipt, b: Receipt) -> list[Name]:
    return [figure.name for figure in compare(a, b) if figure.swings]


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("rate", lambda ratio: receipt(rate=100.0 * ratio)),
        ("warm-up", lambda ratio: receipt(warmup=30.0 * ratio)),
        ("peak-memory", lambda ratio: receipt(gib=16.0 * ratio)),
    ],
)
def test_a_figure_swings_from_its_limit_on_in_both_directions(name: Name, other: object) -> None:
    assert callable(other)
    limit = LIMITS[name]
    assert swings(receipt(), other(limit * 1.01)) == [name]
    assert swings(receipt(), other(1 / (limit * 1.01))) == [name]
    assert swings(receipt(), other(limit * 0.98)) == []


def test_rates_in_different_units_are_not_compared() -> None:
    rate, *_ = compare(receipt(), receipt(rate=2.0, unit="steps/s"))
    assert (rate.ratio, rate.swings) == (None, False)
    assert (rate.unit, rate.note) == ("steps/s and tokens/s", "the units differ")


def test_a_figure_that_one_run_lacks_is_not_compared() -> None:
    _, warmup, _ = compare(receipt(warmup=None), receipt())
    assert (warmup.ratio, warmup.note) == (None, "A has none")
