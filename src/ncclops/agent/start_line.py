"""What a job that makes no steps is doing, in a line: while nodes meet, and until the first step
after a start, a restart or a failure. Pure: its clock is handed in.
"""

from __future__ import annotations

from ncclops.record.events import (
    STORE_LOST,
    BootstrappedEvent,
    CompileStallEvent,
    CompileWarmupEvent,
    Event,
    FaultEvent,
    NodesEvent,
    RestartEvent,
    RetryEvent,
    StartupStallEvent,
    StepEvent,
    StopRequestedEvent,
    VerdictEvent,
    WorkerExitedEvent,
    WorkerStartedEvent,
)

# What is over sooner, as most restarts in place, needs no line.
_SHOWN_AFTER_S = 1.5
# Of a program that shows nothing of its steps, the line would never end.
_LONGEST_S = 1800.0


class StartLine:
    """Takes what happens on this node; :meth:`text` is the line. Times are of any steady clock."""

    def __init__(self) -> None:
        self._since: float | None = None  # None: there is nothing to wait for
        self._doing = self._said = ""
        self._until: float | None = None  # of a pause
        self._ranks: set[int] = set()
        self._grouped: set[int] = set()

    @property
    def is_waiting(self) -> bool:
        """Whether there may be a line by and by."""
        return self._since is not None

    def start(self, now: float) -> None:
        """Workers are to be started: what they are forked from may have to import torch first."""
        self._begin("start", now)

    def meet(self, said: str, now: float) -> None:
        """The nodes meet; ``said`` is who is there, and who is missing."""
        if self._doing != "meet":
            self._begin("meet", now)
        self._said = said

    def take(self, event: Event, now: float) -> None:
        """An event of this node's."""
        match event:
            case NodesEvent():
                self.start(now)
            case WorkerStartedEvent() if event.rank is not None:
                self._on_start(event.rank, now)
            case BootstrappedEvent() if event.rank is not None:
                self._grouped.add(event.rank)
            case StepEvent() | CompileWarmupEvent() | VerdictEvent():
                self._end()
            case StartupStallEvent() | CompileStallEvent():
                self._end()  # it has been said in a line of its own
            case FaultEvent() if event.loss != STORE_LOST and self._doing != "restarted":
                self._said = (
                    "a node was lost" if event.rank is None else f"rank {event.rank} failed"
                )
                self._begin("failed", now)
            case RestartEvent(instead=None):
                self._begin("restarted", now)
            case RetryEvent():
                self._ranks, self._grouped = set(), set()
                number = "another attempt" if event.attempt is None else f"attempt {event.attempt}"
                self._said, self._until = number, now + event.cooldown_s
                self._begin("pause", now)
            case StopRequestedEvent(asks_the_run=True):
                self._end()
            case WorkerExitedEvent(exit_code=0):
                self._end()

    def text(self, now: float) -> str | None:
        """The line, without a name in front; None where there is nothing to say."""
        if self._since is None:
            return None
        lasts_s = now - self._since
        if lasts_s < _SHOWN_AFTER_S or lasts_s > _LONGEST_S:
            return None
        if self._doing == "pause" and self._until is not None and now < self._until:
            return f"{self._said} in {_whole(self._until - now)}"
        return f"{self._words()} ({_whole(lasts_s)})"

    def _words(self) -> str:
        ranks, grouped = len(self._ranks), len(self._grouped & self._ranks)
        workers = f"{ranks} worker{'s' * (ranks != 1)}"
        match self._doing:
            case "meet":
                return self._said
            case "pause":
                return f"{self._said}: starting"
            case "failed":
                return f"{self._said}, no step since"
            case "restarted":
                return "restarted in place, no step since"
        if not ranks:
            return "starting the workers"
        if not grouped:
            return f"{workers} started, no process group yet"
        if grouped < ranks:
            return f"{grouped} of {workers} have a process group"
        return f"{workers} with a process group, no step seen yet"

    def _on_start(self, rank: int, now: float) -> None:
        self._ranks.add(rank)
        if self._doing in ("restarted", "failed"):
            return  # it takes the place of one that was lost
        if self._doing != "start" or len(self._ranks) == 1:
            self._grouped.clear()
            self._begin("start", now)

    def _begin(self, doing: str, now: float) -> None:
        self._doing, self._since = doing, now

    def _end(self) -> None:
        self._doing, self._since = "", None


def _whole(seconds: float) -> str:
    """In whole seconds, or minutes and seconds."""
    whole = max(0, round(seconds))
    minutes, rest = divmod(whole, 60)
    return f"{minutes}m{rest:02}s" if minutes else f"{rest}s"
