"""What a scan found: the hits, and signs that the job ran."""

from __future__ import annotations

from bisect import bisect_left
from copy import copy

from ncclops.classify.activity import Marks
from ncclops.classify.model import Hit, Stamp
from ncclops.classify.stamps import comparable, last_stamp

COLLECTIVES_DONE = "context-collectives-completed"
# Ranks that have lost a peer may print a few more steps; they do not print this many.
_RUN_OF_STEPS = 10
# So many steps are a run's where its beginning, or its end, is seen as well.
_STEPS_OF_A_RUN = 2
# How far before a step its time is looked for.
_STEP_LOOK_BACK = 1024


class SourceLife:
    """What one source showed of the job being alive; lines are 1-based, None is never.

    ``last_step_is_bar``: whether the last step is one that a progress bar shows. ``attempt``: the
    number in torchrun's ``attempt_<n>`` folder.
    """

    def __init__(self, attempt: int) -> None:
        self.attempt = attempt
        self.steps = 0
        self.last_step_line: int | None = None
        self.last_step_stamp: Stamp | None = None
        self.last_step_is_bar = False
        self.last_init_line: int | None = None
        self.begun = False
        self.ended_line: int | None = None
        # The last line with which a run may begin, and how many steps came before it.
        self.begin_line, self.steps_at_begin = 0, 0
        # Where the last of several runs begins, and how many steps were of those before it.
        self.run_line: int | None = None
        self.steps_of_earlier_runs = 0

    def note(self, marks: Marks, block: bytes, first_line: int) -> None:
        """Add what a block has shown, whose first line has this number."""
        if marks.restart is not None:
            line = first_line + block.count(b"\n", 0, marks.restart)
            if line > self.begin_line:
                before = bisect_left(marks.steps, marks.restart)
                self.begin_line, self.steps_at_begin = line, self.steps + before
        if marks.steps:
            self.steps += len(marks.steps)
            self.last_step_line = first_line + block.count(b"\n", 0, marks.steps[-1])
            text = block[max(0, marks.steps[-1] - _STEP_LOOK_BACK) : marks.steps[-1]]
            self.last_step_is_bar = marks.last_is_bar
            self.last_step_stamp = last_stamp(text.decode("utf-8", "replace"))
        if marks.init >= 0:
            self.last_init_line = first_line + block.count(b"\n", 0, marks.init)
        self.begun = self.begun or marks.begun
        if marks.ended >= 0:
            self.ended_line = first_line + block.count(b"\n", 0, marks.ended)

    @property
    def has_come_up(self) -> bool:
        return bool(self.steps or self.last_init_line or self.ended_line)

    def begin_run(self, line: int, steps: int) -> None:
        self.run_line, self.steps_of_earlier_runs = line, steps

    def of_last_run(self) -> SourceLife:
        """What the last run alone has shown, where the source shows several."""
        if self.run_line is None:
            return self
        life, first = copy(self), self.run_line
        life.steps -= self.steps_of_earlier_runs
        life.steps_at_begin -= self.steps_of_earlier_runs
        for name in ("last_step_line", "last_init_line", "ended_line"):
            if (getattr(self, name) or 0) < first:
                setattr(life, name, None)
        if life.last_step_line is None:
            life.last_step_stamp = None
        return life


class Observations:
    """All that a scan saw, in no particular order.

    ``starting_up``: whether the first collective is still to come, where the caller knows (None:
    the log says), ``has_stepped``: it knows of steps before the failure. ``is_empty``: neither a
    byte was read nor a fact given.
    """

    def __init__(
        self,
        hits: list[Hit],
        lives: list[SourceLife],
        first_failed_rank: int | None,
        starting_up: bool | None,
        has_stepped: bool,
        is_empty: bool,
    ) -> None:
        self.hits, self.lives = hits, lives
        self.first_failed_rank = first_failed_rank
        self.starting_up, self.has_stepped, self.is_empty = starting_up, has_stepped, is_empty
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

    def begun_again_after(self, hit: Hit) -> bool:
        """Whether a run of the job began after this line, in the same log, and took steps."""
        life = self.lives[hit.source]
        return life.begin_line > hit.line and life.steps - life.steps_at_begin >= _STEPS_OF_A_RUN

    def went_on_to_its_end(self, hit: Hit, last_line: int) -> bool:
        """Whether steps followed, and the end of the training after the last failure's line."""
        life = self.lives[hit.source]
        return (
            (life.ended_line or 0) > last_line
            and (life.last_step_line or 0) > last_line
            and life.steps - hit.steps_before >= _STEPS_OF_A_RUN
        )

    def init_follows(self, hit: Hit) -> bool:
        return (self.lives[hit.source].last_init_line or 0) > hit.line

    def follows_the_end(self, hit: Hit) -> bool:
        """Whether the training of this source had come to its orderly end before this line."""
        ended = self.lives[hit.source].ended_line
        return ended is not None and ended < hit.line

    def steps_were_seen(self, hit: Hit) -> bool:
        """Whether this log, or another one of the job, shows steps before the line, or the launcher
        knows of some."""
        others = (life for number, life in enumerate(self.lives) if number != hit.source)
        return self.has_stepped or hit.steps_before > 0 or any(life.steps for life in others)

    def step_precedes(self, hit: Hit) -> bool:
        """Whether the job may have run collectives before this line: yes when in doubt."""
        if self.starting_up is not None:
            return not self.starting_up
        return self.steps_were_seen(hit) or any(
            other.signature.id == COLLECTIVES_DONE for other in self.hits
        )
