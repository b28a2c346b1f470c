"""What the agent tells a worker of the run's timeouts and budgets: one JSON object in a variable.

There are two windows. The first holds from the start of an iteration and is long enough for a
compile; the steady one follows when warm-up is over, where the profile names one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from fnmatch import fnmatchcase
from typing import Any

from ncclops.profiles.model import Growth
from ncclops.record.variables import LIMITS


@dataclass(frozen=True, kw_only=True)
class Window:
    """Timeouts that hold together. ``process_group`` None: as torch has it."""

    process_group: timedelta | None
    soft: timedelta
    hard: timedelta


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Every timeout that a worker applies, and what its restarts may leave behind.

    ``steady`` None: the first window holds throughout. ``groups`` are the steady timeouts of
    process groups by shell-style patterns of their description; the first match counts.
    """

    first: Window
    steady: Window | None
    groups: Mapping[str, timedelta]
    heartbeat: timedelta
    barrier: timedelta
    completion: timedelta
    growth: Growth = field(default_factory=Growth)

    def steady_group(self, description: str) -> timedelta | None:
        """The timeout of a process group once warm-up is over; None: as torch has it."""
        for pattern, limit in self.groups.items():
            if fnmatchcase(description, pattern):
                return limit
        return (self.steady or self.first).process_group

    def to_json(self) -> str:
        return json.dumps(_numbers(asdict(self)))

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Limits | None:
        """What the agent has said; None outside `launch`."""
        text = environ.get(LIMITS)
        return None if text is None else cls._from_numbers(json.loads(text))

    @classmethod
    def _from_numbers(cls, said: Mapping[str, Any]) -> Limits:
        return cls(
            first=window_from(said["first"]),
            steady=None if said["steady"] is None else window_from(said["steady"]),
            groups={name: _seconds(value) for name, value in said["groups"].items()},
            heartbeat=_seconds(said["heartbeat"]),
            barrier=_seconds(said["barrier"]),
            completion=_seconds(said["completion"]),
            growth=Growth(**said["growth"]),
        )


def window_from(said: Mapping[str, float | None]) -> Window:
    """A window from its numbers of seconds, as :func:`numbers_of` gives them."""
    group = said["process_group"]
    return Window(
        process_group=None if group is None else _seconds(group),
        soft=_seconds(said["soft"] or 0),
        hard=_seconds(said["hard"] or 0),
    )


def numbers_of(window: Window) -> dict[str, float | None]:
    """``window`` in seconds, by name."""
    numbers: dict[str, float | None] = _numbers(asdict(window))
    return numbers


def _numbers(value: Any) -> Any:
    """``value`` with each duration as a number of seconds."""
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Mapping):
        return {key: _numbers(item) for key, item in value.items()}
    return value


def _seconds(value: float) -> timedelta:
    return timedelta(seconds=value)
