"""What takes longer than it should, and nothing else tells of: start-up, a compile, a restart.

Start-up and compile have windows: raised when one passes without the progress it waits for. A
restart in place is one that waits for ranks which are still in the script.

Pure: times are seconds of whatever clock the caller uses. One watch is for one rank, or for a
whole job when fed with what any of its ranks shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from ncclops.durations import format_duration
from ncclops.health.evidence import Reading
from ncclops.rank_lists import ranks_named
from ncclops.receipts.observation import Observation
from ncclops.record.events import CompileStallEvent, RestartStallEvent, StartupStallEvent
from ncclops.record.progress import RESTART_PHASE

StallName = Literal["startup-stall", "compile-stall"]


@dataclass(frozen=True, kw_only=True)
class StallLimits:
    """How long start-up may take until the first sign of training, and then compile warm-up."""

    startup: timedelta
    compile: timedelta


@dataclass(frozen=True)
class Stall:
    """A window that has passed; ``began`` is when it opened, by the caller's clock."""

    event: StallName
    window_name: Literal["startup", "compile"]
    window: timedelta
    began: float

    def as_event(self) -> StartupStallEvent | CompileStallEvent:
        """The same as an event of the run."""
        message = (
            f"the {self.window_name} window of {format_duration(self.window)} has"
            f" passed without {_AWAITED[self.window_name]}"
        )
        kind = StartupStallEvent if self.window_name == "startup" else CompileStallEvent
        return kind(window_s=self.window.total_seconds(), message=message)


# Ranks leave a script within seconds, but for what it shields or waits for in C.
_RESTART_TAKES = timedelta(seconds=30)
_AWAITED = {"startup": "a sign of training", "compile": "the end of compile warm-up"}


class StallWatch:
    """Which window is open, when it closes, and the stall if it has closed."""

    def __init__(self, limits: StallLimits, now: float) -> None:
        self._limits = limits
        self.restart(now)

    def restart(self, now: float) -> None:
        """The worker begins again, as a new process or iteration: so do its windows."""
        self._open: Literal["startup", "compile"] | None = "startup"
        self._began = now
        self._raised = False

    def saw(self, seen: Observation, now: float) -> None:
        """Take what was seen into account; a stall already raised is not taken back."""
        if seen.kind == "start":
            self.restart(now)
        elif seen.kind == "begun" and self._open == "startup":
            self._open, self._began, self._raised = "compile", now, False
        elif seen.kind in ("warmup", "step", "end"):
            self._open = None

    @property
    def deadline(self) -> float | None:
        """When :meth:`check` is to be called next, if nothing is seen before."""
        if self._open is None or self._raised:
            return None
        return self._began + self._window().total_seconds()

    def check(self, now: float) -> Stall | None:
        """The stall, once, if the open window has passed."""
        deadline = self.deadline
        if deadline is None or now < deadline or self._open is None:
            return None
        self._raised = True
        name: StallName = "startup-stall" if self._open == "startup" else "compile-stall"
        return Stall(name, self._open, self._window(), self._began)

    def _window(self) -> timedelta:
        return self._limits.startup if self._open == "startup" else self._limits.compile


class RestartWatch:
    """Whether a restart in place waits for ranks of this node; each restart is told of once."""

    def __init__(self) -> None:
        self._told: int | None = None  # the latest iteration

    def look(self, readings: Sequence[Reading]) -> RestartStallEvent | None:
        """What ``readings``, of the ranks of this node whose processes run, show now."""
        for each in readings:
            begun = each.phase_age if each.phase == RESTART_PHASE else None
            if begun is None or begun < _RESTART_TAKES or each.iteration == self._told:
                continue
            here = [reading for reading in readings if reading.iteration == each.iteration]
            late = [reading.rank for reading in here if not reading.left and not reading.ended]
            if late:
                self._told = each.iteration
                return _waiting_for(late, begun.total_seconds())
        return None


def _waiting_for(late: list[int], after_s: float) -> RestartStallEvent:
    has, them = ("has", "it") if len(late) == 1 else ("have", "them")
    message = (
        f"{ranks_named(late)} {has} not left the script {after_s:.0f} s after a fault, and the"
        f" restart in place waits for {them}"
    )
    return RestartStallEvent(ranks=late, after_s=after_s, message=message)
