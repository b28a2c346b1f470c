"""Step times of all ranks as one matrix of bounded size. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ncclops.report.records import StepTime

# More columns than pixels show nothing more, and cost a page that is slow to open.
COLUMNS = 480


@dataclass(frozen=True)
class Heat:
    """``cells[row][column]`` is the mean step time in seconds, None where there was none.

    Rows are ``ranks``; column ``c`` covers the steps from ``first_step + c * width`` on, ``width``
    of them. ``medians`` has the median over the ranks of each column: what a cell is compared to.
    """

    ranks: Sequence[int]
    first_step: int
    width: int
    cells: Sequence[Sequence[float | None]]
    medians: Sequence[float | None]

    def to_json(self) -> dict[str, Any]:
        """What the page's script draws."""
        return asdict(self)


def heat_of(steps: Mapping[int, Sequence[StepTime]], columns: int = COLUMNS) -> Heat | None:
    """The heat map, or None if no step was timed.

    A step that was done again after a restart counts as it was done last. Steps that do not
    count (see :class:`StepTime`) leave their cell empty.
    """
    timed = {rank: _last_times(done) for rank, done in steps.items()}
    numbers = [number for times in timed.values() for number in times]
    if not numbers:
        return None
    first, last = min(numbers), max(numbers)
    width = -(-(last - first + 1) // columns)
    count = (last - first) // width + 1
    cells = [_row(times, first, width, count) for times in timed.values()]
    medians = [_median([row[column] for row in cells]) for column in range(count)]
    return Heat(list(timed), first, width, cells, medians)


def slowest(heat: Heat) -> list[tuple[int, float]]:
    """Ranks with their mean time as a ratio to the columns' medians, slowest first."""
    ratios = []
    for rank, row in zip(heat.ranks, heat.cells, strict=True):
        pairs = zip(row, heat.medians, strict=True)
        own = [cell / median for cell, median in pairs if cell is not None and median]
        if own:
            ratios.append((rank, statistics.fmean(own)))
    return sorted(ratios, key=lambda pair: -pair[1])


def _last_times(done: Sequence[StepTime]) -> dict[int, float]:
    times: dict[int, float] = {}
    for step in done:
        if step.counts:
            times[step.step] = step.seconds
    return times


def _row(times: Mapping[int, float], first: int, width: int, count: int) -> list[float | None]:
    sums, sizes = [0.0] * count, [0] * count
    for number, seconds in times.items():
        column = (number - first) // width
        sums[column] += seconds
        sizes[column] += 1
    # Four digits are more than a colour can show; the page holds a million cells at 4,096 ranks.
    return [
        float(f"{total / size:.4g}") if size else None
        for total, size in zip(sums, sizes, strict=True)
    ]


def _median(cells: Sequence[float | None]) -> float | None:
    found = [cell for cell in cells if cell is not None]
    return statistics.median(found) if found else None
