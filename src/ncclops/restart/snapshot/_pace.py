"""How many steps lie between two snapshots: a rule over measured times. Pure.

All ranks have to take the same steps, so no rank decides alone. Each reports what its last
snapshot cost; whoever reports last decides from the reports of all, and publishes that
(``_rounds``). So a decision is about the next interval but one, and known in time.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

# Steps between the first snapshots, before anything is measured. The first one allocates memory,
# and its transfer to a partner may take as long as several steps.
FIRST_INTERVAL = 8
LONGEST_INTERVAL = 10_000
# An ordinary step is the median of so many: a few slow ones (a checkpoint, a validation) change
# nothing.
_REMEMBERED_STEPS = 32
# One snapshot that something else has slowed down does not make the next interval a long one.
_REMEMBERED_COSTS = 3


# How often, whatever the script says; ``ncclops launch --snapshot-every`` sets it.
VARIABLE = "NCCLOPS_SNAPSHOT_EVERY"


@dataclass(frozen=True)
class Often:
    """Every so many steps, ``None``: as often as ``budget``, a share of the time, allows."""

    every: int | None
    budget: float

    def as_asked(self, text: str | None) -> Often:
        """This, unless ``text`` says otherwise: ``10`` steps, ``auto`` or ``5%`` of the time.

        Raises ``ValueError`` where it says something else.
        """
        if text is None:
            return self
        if text == "auto":
            return replace(self, every=None)
        try:
            if text.endswith("%"):
                asked = Often(None, float(text.removesuffix("%")) / 100)
            else:
                asked = replace(self, every=int(text))
        except ValueError:
            asked = Often(0, 0)
        if (asked.every is not None and asked.every < 1) or not 0 < asked.budget <= 1:
            raise ValueError(
                f"{VARIABLE}={text}: not a number of steps, auto, or a share such as 2%"
            )
        return asked


@dataclass(frozen=True)
class Cost:
    """What one snapshot has cost one rank, in seconds.

    ``step_s``: an ordinary step, in which no snapshot was under way; 0 where none was seen.
    ``cost_s``: what ``take`` took, and by how much the steps were slower while the rest went on in
    the background; the median of the last few. ``busy_s``: from its begin until the copies were
    complete.
    """

    step_s: float
    cost_s: float
    busy_s: float


def interval(costs: Sequence[Cost], budget: float, before: int = FIRST_INTERVAL) -> int:
    """The steps from one snapshot to the next so that its cost is no more than ``budget`` of them.

    The costs are those of all ranks: the dearest counts, as the others wait for it. Not shorter
    than a snapshot takes in the background, which the next one would have to wait for. ``before``
    is the present interval, which stays where no ordinary step was seen.
    """
    steps = [each.step_s for each in costs if each.step_s > 0]
    if not steps:
        return before
    step_s = statistics.median(steps)
    cost_s = max(each.cost_s for each in costs)
    busy_s = max(each.busy_s for each in costs)
    needed = max(cost_s / (budget * step_s), busy_s / step_s)
    return max(1, min(LONGEST_INTERVAL, math.ceil(needed - 1e-9)))


class Meter:
    """Measures the steps of one rank. The main thread's; times are handed in, in seconds."""

    def __init__(self) -> None:
        self._ordinary: deque[float] = deque(maxlen=_REMEMBERED_STEPS)
        self._last: float | None = None  # when the last call returned
        self._began = 0.0
        self._cost_s = 0.0  # of the snapshot that is under way
        self._costs: deque[float] = deque(maxlen=_REMEMBERED_COSTS)
        self.total_cost_s = 0.0
        self.total_s = 0.0  # of all steps, with what snapshots cost
        self.steps = 0

    @property
    def step_s(self) -> float:
        """An ordinary step; 0 as long as none was seen."""
        return statistics.median(self._ordinary) if self._ordinary else 0.0

    def step_ended(self, now: float, *, busy: bool) -> None:
        """Training calls ``take`` again. ``busy``: a snapshot was under way since the last call."""
        if self._last is None:
            return
        took_s = now - self._last
        self.steps += 1
        self.total_s += took_s
        if not busy:
            self._ordinary.append(took_s)
        elif self._ordinary:
            self._cost_s += took_s - self.step_s

    def began(self, now: float) -> None:
        """A snapshot begins."""
        self._began = now

    def call_ended(self, entered: float, now: float) -> None:
        """``take``, entered then, returns now."""
        self._last = now
        self._cost_s += now - entered
        self.total_s += now - entered

    def comes_once(self, seconds: float) -> None:
        """So much of the present call was for what no later snapshot needs again."""
        self._cost_s -= seconds
        self.total_cost_s += seconds

    def cost(self, complete: float) -> Cost:
        """Of the latest snapshots; the last one was complete at ``complete``. Once for each."""
        cost_s, self._cost_s = max(0.0, self._cost_s), 0.0
        self.total_cost_s += cost_s
        self._costs.append(cost_s)
        usual_s = statistics.median_low(self._costs)
        return Cost(self.step_s, usual_s, max(0.0, complete - self._began))
