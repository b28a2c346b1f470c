"""Start-up and compile windows: raised when one passes without the progress it waits for.

Pure: times are seconds of whatever clock the caller uses. One watch is for one rank, or for a
whole job when fed with what any of its ranks shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from ncclops.durations import format_duration
from ncclops.receipts.observation import Observation
from ncclops.record.events import CompileStallEvent, StartupStallEvent

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
