"""Every timeout of a run as one value, and the one form in which it is written and passed on.

A profile and ``--timeout`` name some of them, ``ncclops.timeouts.settle`` derives the rest, and
``Timeouts.to_json`` is what run.json holds and workers are given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import timedelta
from fnmatch import fnmatchcase
from typing import Any

from ncclops.durations import format_duration, parse_duration

# Before the pattern of a group timeout, in a profile, on the command line and in JSON.
GROUPS = "groups."
# Where a person may stop a rank in a debugger: longer than a working day.
ATTENDED = timedelta(hours=24)


@dataclass(frozen=True, kw_only=True)
class Window:
    """Timeouts that hold together, for as long as a rank may be compiling or afterwards.

    ``soft`` and ``hard`` None: nothing restarts in place.
    """

    process_group: timedelta
    soft: timedelta | None
    hard: timedelta | None

    def to_json(self) -> dict[str, str | None]:
        """By name, as text."""
        return {name: _text(limit) for name, limit in asdict(self).items()}

    @classmethod
    def from_json(cls, document: Mapping[str, str | None]) -> Window:
        """What ``to_json`` has written."""
        limits = {entry.name: _limit(document[entry.name]) for entry in fields(cls)}
        return cls(**limits)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """All timeouts of a run, in order (``ncclops.timeouts.order``).

    None: it does not exist, since workers do not restart in place, or it is not known.

    ``process_group`` holds until compile warm-up is over, ``steady_...`` hold afterwards (None: as
    before), and ``groups`` then for process groups whose description matches a shell-style
    pattern, the first match first. ``compile`` is how long warm-up may take. ``soft``, ``hard``,
    ``abort``, ``heartbeat``, ``barrier``, ``grow`` and ``completion`` are the restart core's
    (``ncclops.restart.Wrapper``), which keeps ``soft`` and ``hard`` for the whole run: hangs are
    found before. ``stop_grace`` is what workers have between a stop and SIGKILL. ``nccl_watchdog``
    and ``nccl_heartbeat`` are torch's own, and ``scheduler`` is what was left until the scheduler
    ends the job.
    """

    process_group: timedelta
    steady_process_group: timedelta | None = None
    compile: timedelta
    soft: timedelta | None = None
    hard: timedelta | None = None
    abort: timedelta | None = None
    steady_soft: timedelta | None = None
    steady_hard: timedelta | None = None
    heartbeat: timedelta | None = None
    barrier: timedelta | None = None
    grow: timedelta | None = None
    completion: timedelta | None = None
    stop_grace: timedelta
    nccl_watchdog: timedelta | None = None
    nccl_heartbeat: timedelta | None = None
    scheduler: timedelta | None = None
    groups: Mapping[str, timedelta] = field(default_factory=dict)

    @property
    def first(self) -> Window:
        """What holds from the start of an iteration."""
        return Window(process_group=self.process_group, soft=self.soft, hard=self.hard)

    @property
    def steady(self) -> Window | None:
        """What holds once compile warm-up is over; None: the first window holds throughout."""
        if self.steady_process_group is None:
            return None
        return Window(
            process_group=self.steady_process_group, soft=self.steady_soft, hard=self.steady_hard
        )

    def steady_group(self, description: str) -> timedelta:
        """The timeout of a process group once warm-up is over."""
        for pattern, limit in self.groups.items():
            if fnmatchcase(description, pattern):
                return limit
        return (self.steady or self.first).process_group

    def tightened(self, window: Window) -> Timeouts:
        """With ``window`` as the steady one, and no group longer than it."""
        most = window.process_group
        return replace(
            self,
            steady_process_group=most,
            steady_soft=window.soft,
            steady_hard=window.hard,
            groups={pattern: min(limit, most) for pattern, limit in self.groups.items()},
        )

    def to_json(self) -> dict[str, str | None]:
        """Each by name as text, those of groups as ``groups.PATTERN``."""
        single = {
            entry.name: _text(getattr(self, entry.name))
            for entry in fields(self)
            if entry.name != "groups"
        }
        return single | {f"{GROUPS}{name}": _text(limit) for name, limit in self.groups.items()}

    @classmethod
    def from_json(cls, document: Mapping[str, str | None]) -> Timeouts:
        """What ``to_json`` has written."""
        limits = {name: _limit(text) for name, text in document.items()}
        single: dict[str, Any] = {
            name: limit for name, limit in limits.items() if not name.startswith(GROUPS)
        }
        groups = {
            name.removeprefix(GROUPS): limit
            for name, limit in limits.items()
            if name.startswith(GROUPS) and limit is not None
        }
        return cls(**single, groups=groups)


def _text(limit: timedelta | None) -> str | None:
    return None if limit is None else format_duration(limit)


def _limit(text: str | None) -> timedelta | None:
    return None if text is None else parse_duration(text)
