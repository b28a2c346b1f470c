"""What a scan saw: the hits, and the job being alive."""

from __future__ import annotations

from dataclasses import dataclass, field

from ncclops.classify.model import Hit, Stamp
from ncclops.classify.stamps import comparable

COLLECTIVES_DONE = "context-collectives-completed"
# Ranks that have lost a peer may print a few more steps; they do not print this many.
_RUN_OF_STEPS = 10


@dataclass(slots=True)
class SourceLife:
    """What one source showed of the job being alive; lines are 1-based, None is never."""

    steps: int = 0
    first_step_line: int | None = None
    last_step_line: int | None = None
    last_step_stamp: Stamp | None = None
    last_init_line: int | None = None
    begun: bool = False
    ended: bool = False
    attempt: int = 0
    """The number in torchrun's ``attempt_<n>`` folder."""


@dataclass(slots=True)
class Observations:
    """All that a scan saw, in no particular order."""

    hits: list[Hit]
    lives: list[SourceLife]
    first_failed_rank: int | None = None
    # For stamps that name no year: the latest one that any line names.
    year: int = field(init=False)
    _axis: dict[int, tuple[float, int, int]] = field(init=False, default_factory=dict)

    def when(self, hit: Hit) -> tuple[float, int, int]:
        """Sort key: time where it is known; a line that nothing dates comes first."""
        return self._axis[hit.order]

    def __post_init__(self) -> None:
        years = [hit.stamp[0] for hit in self.hits if hit.stamp and hit.stamp[0]]
        self.year = max(years, default=2000)
        for hit in self.hits:
            at = comparable(hit.stamp, self.year) if hit.stamp else float("-inf")
            self._axis[hit.order] = (at, hit.source, hit.line)

    def step_follows(self, hit: Hit) -> bool:
        """Whether the job was seen to take a step after this line."""
        life = self.lives[hit.source]
        if (life.last_step_line or 0) > hit.line:
            return True
        if hit.stamp is None:
            return False
        at = comparable(hit.stamp, self.year)
        return any(
            comparable(other.last_step_stamp, self.year) > at
            for number, other in enumerate(self.lives)
            if number != hit.source and other.last_step_stamp
        )

    def run_follows(self, hit: Hit) -> bool:
        """Whether so many steps followed in the same log that nothing there can have died."""
        return self.lives[hit.source].steps - hit.steps_before >= _RUN_OF_STEPS

    def init_follows(self, hit: Hit) -> bool:
        return (self.lives[hit.source].last_init_line or 0) > hit.line

    def steps_were_seen(self, hit: Hit) -> bool:
        """Whether this log, or another one of the job, shows steps before the line."""
        others = (life for number, life in enumerate(self.lives) if number != hit.source)
        return hit.steps_before > 0 or any(life.steps for life in others)

    def step_precedes(self, hit: Hit) -> bool:
        """Whether the job may have run collectives before this line: yes when in doubt."""
        return self.steps_were_seen(hit) or any(
            other.signature.id == COLLECTIVES_DONE for other in self.hits
        )
