"""What a scan found: the hits, and signs that the job ran."""

from __future__ import annotations

from ncclops.classify.model import Hit, Stamp
from ncclops.classify.stamps import comparable

COLLECTIVES_DONE = "context-collectives-completed"
# Ranks that have lost a peer may print a few more steps; they do not print this many.
_RUN_OF_STEPS = 10


class SourceLife:
    """What one source showed of the job being alive; lines are 1-based, None is never.

    ``last_step_is_bar``: whether the last step is one that a progress bar shows. ``attempt``: the
    number in torchrun's ``attempt_<n>`` folder.
    """

    def __init__(self, attempt: int) -> None:
        self.attempt = attempt
        self.steps = 0
        self.first_step_line: int | None = None
        self.last_step_line: int | None = None
        self.last_step_stamp: Stamp | None = None
        self.last_step_is_bar = False
        self.last_init_line: int | None = None
        self.begun = False
        self.ended_line: int | None = None


class Observations:
    """All that a scan saw, in no particular order.

    ``starting_up``: whether the first collective is still to come, where the caller knows (None:
    the log says). ``is_empty``: neither a byte was read nor a fact given.
    """

    def __init__(
        self,
        hits: list[Hit],
        lives: list[SourceLife],
        first_failed_rank: int | None,
        starting_up: bool | None,
        is_empty: bool,
    ) -> None:
        self.hits, self.lives = hits, lives
        self.first_failed_rank = first_failed_rank
        self.starting_up, self.is_empty = starting_up, is_empty
        stamps = [hit.stamp for hit in hits] + [life.last_step_stamp for life in lives]
        # For stamps that name no year: the latest one that any line names.
        self.year = max((stamp[0] for stamp in stamps if stamp and stamp[0]), default=2000)
        self._when = {hit.order: (self._at(hit.stamp), hit.order) for hit in hits}
        self._last_steps_at = [self._at(life.last_step_stamp) for life in lives]

    def _at(self, stamp: Stamp | None) -> float:
        return comparable(stamp, self.year) if stamp else float("-inf")

    def when(self, hit: Hit) -> tuple[float, int]:
        """Sort key: time where it is known; a line that nothing dates comes first."""
        return self._when[hit.order]

    def step_follows(self, hit: Hit) -> bool:
        """Whether the job was seen to take a step after this line."""
        life = self.lives[hit.source]
        # A bar that is drawn once proves nothing: a process that ends draws its bar once more.
        if (life.last_step_line or 0) > hit.line and not (
            life.last_step_is_bar and life.steps - hit.steps_before == 1
        ):
            return True
        # In one log the order of lines is what counts: its writers may have different zones.
        others = (at for number, at in enumerate(self._last_steps_at) if number != hit.source)
        return hit.stamp is not None and max(others, default=float("-inf")) > self._at(hit.stamp)

    def run_follows(self, hit: Hit) -> bool:
        """Whether so many steps followed in the same log that nothing there can have died."""
        return self.lives[hit.source].steps - hit.steps_before >= _RUN_OF_STEPS

    def init_follows(self, hit: Hit) -> bool:
        return (self.lives[hit.source].last_init_line or 0) > hit.line

    def follows_the_end(self, hit: Hit) -> bool:
        """Whether the training of this source had come to its orderly end before this line."""
        ended = self.lives[hit.source].ended_line
        return ended is not None and ended < hit.line

    def steps_were_seen(self, hit: Hit) -> bool:
        """Whether this log, or another one of the job, shows steps before the line."""
        others = (life for number, life in enumerate(self.lives) if number != hit.source)
        return hit.steps_before > 0 or any(life.steps for life in others)

    def step_precedes(self, hit: Hit) -> bool:
        """Whether the job may have run collectives before this line: yes when in doubt."""
        if self.starting_up is not None:
            return not self.starting_up
        return self.steps_were_seen(hit) or any(
            other.signature.id == COLLECTIVES_DONE for other in self.hits
        )
