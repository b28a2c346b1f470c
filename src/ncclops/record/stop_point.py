"""A stop at one point for all ranks, agreed through a page of shared memory.

No rank may end while others still wait for it in a collective, so all end after the same step, and
that must be a step which none has passed. The agent proposes one, looks whether a rank was
faster than the proposal, and confirms it or proposes a later one:

    agent:  propose S -> read every rank's step -> all before S?  confirm S : propose a later one
    rank:   publish its step n -> read the page -> n >= S?  hold until confirmed or replaced

A rank publishes before it reads and the agent proposes before it reads, so a rank that did not
see S is seen by the agent. Ranks on several nodes: each node's agent does both of its steps when
the one that coordinates says so.

Ranks count on two clocks: the steps that a script reports, and the updates of its optimizers, which
the worker entry counts for scripts that report none. Either will do as long as all ranks do the
same in the same order: where all have counted to S, all have issued the same collectives before it
and none after it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import timedelta
from enum import IntEnum
from pathlib import Path

from ncclops.record import progress, shared_page
from ncclops.record.paths import RunPaths
from ncclops.record.progress import Progress

# A coordinator needs milliseconds, over several nodes a round trip. One that died in between
# must not hold the job for ever.
HOLD_LIMIT = timedelta(seconds=60)
_LOOK_EVERY_S = 0.001
_CONFIRMED = 1


class Clock(IntEnum):
    """What a stop is counted by; the value is its place in the page."""

    STEPS = 0
    UPDATES = 1

    def reading(self, seen: Progress) -> int | None:
        """Where the clock of a rank stands; None if it has not ticked."""
        if self is Clock.STEPS:
            return seen.step
        return seen.updates or None


class StopPage:
    """Both sides of the page, for one clock. One agent writes; the ranks of its node read."""

    def __init__(self, numbers: memoryview, clock: Clock = Clock.STEPS) -> None:
        self._numbers = numbers
        self._clock = clock

    @classmethod
    def create(cls, run_dir: Path) -> StopPage:
        """Make the page, with no stop requested; before the workers start."""
        return cls(memoryview(shared_page.create(RunPaths(run_dir).stop_page)).cast("q"))

    @classmethod
    def attach(cls, run_dir: Path) -> StopPage | None:
        """The page that the agent made, or None where it made none."""
        try:
            return cls(memoryview(shared_page.attach(RunPaths(run_dir).stop_page)).cast("q"))
        except OSError:
            return None

    def by(self, clock: Clock) -> StopPage:
        """The same page, by ``clock``."""
        return StopPage(self._numbers, clock)

    # --- the agent's side -------------------------------------------------------------------

    def propose(self, step: int) -> None:
        """Have ranks that reach ``step`` hold there."""
        self._numbers[self._clock] = (step + 1) << 1

    def confirm(self) -> None:
        """Make the proposed step the one at which all ranks end."""
        self._numbers[self._clock] |= _CONFIRMED

    def withdraw(self) -> None:
        """Let all ranks go on."""
        self._numbers[self._clock] = 0

    def agree(self, ranks: Iterable[Path]) -> int:
        """Choose, propose and confirm a step for the progress pages ``ranks``, and return it.

        For the ranks of one node. Those that have not reported a step yet count as before their
        first, so they run at least to that.
        """
        paths, margin = list(ranks), 1
        highest = highest_reading(paths, self._clock)
        while True:
            target = highest + margin
            self.propose(target)
            highest = highest_reading(paths, self._clock)
            if highest < target:
                self.confirm()
                return target
            margin *= 2  # steps that are shorter than one round of this loop

    # --- a rank's side ----------------------------------------------------------------------

    def requested(self) -> bool:
        """Whether a stop is proposed or confirmed; costs one memory read."""
        return self._numbers[self._clock] != 0

    def ends_here(self, step: int) -> bool:
        """Whether the rank that has just published ``step`` shall end now.

        Holds the caller while the proposal is open and ``step`` has reached it, at most
        :data:`HOLD_LIMIT`; after that the rank goes on, as if nothing had been proposed.
        """
        deadline = time.monotonic() + HOLD_LIMIT.total_seconds()
        while True:
            value = self._numbers[self._clock]
            if value == 0 or step < (value >> 1) - 1:
                return False
            if value & _CONFIRMED:
                return True
            if time.monotonic() > deadline:
                return False
            # Shared memory has no event that Python can wait on, and the answer is due at once.
            time.sleep(_LOOK_EVERY_S)


def highest_reading(paths: Iterable[Path], clock: Clock = Clock.STEPS) -> int:
    """The highest step that any of the ranks' pages reports; -1 if none does."""
    found = [clock.reading(page) for page in map(progress.read, paths) if page is not None]
    return max((value for value in found if value is not None), default=-1)
