"""Every timeout of a run in one object, in the order in which they have to fire.

    soft < hard < process_group      the restart core acts first; torch's watchdog, which can only
                                     end the process, is the last resort
    hard < barrier                   a rank that is being ended is still waited for

A profile as a rule names ``process_group`` alone (a compile window, say), and the rest follows.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import timedelta

from ncclops.durations import format_duration
from ncclops.errors import UsageError
from ncclops.profiles import Timeouts

# torch's default for NCCL groups (Gloo's is 30 min): where the ladder hangs if nobody says more.
_TORCH_DEFAULT = timedelta(minutes=10)
# Fractions of the group timeout: room for the hard timeout's signals before the watchdog acts.
_SOFT, _HARD, _BARRIER = 0.8, 0.9, 1.2
# A rank that has finished waits for the others, who may be writing a last checkpoint or still
# training on more data. Nothing is wrong with that, and those who hang are found by `soft`; so
# this is only there because no wait is without an end.
_COMPLETION = timedelta(days=7)

# A host that nothing is heard of for so long is lost; a dead process is seen at once.
_HEARTBEAT = timedelta(seconds=30)

_ORDER = (
    ("soft", "hard"),
    ("hard", "process_group"),
    ("hard", "barrier"),
    ("heartbeat", "barrier"),
)


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """Timeouts of the restart core and of process groups. Raises ``UsageError`` out of order."""

    soft: timedelta
    hard: timedelta
    process_group: timedelta
    heartbeat: timedelta
    barrier: timedelta
    completion: timedelta

    def __post_init__(self) -> None:
        for low, high in _ORDER:
            lower, higher = getattr(self, low), getattr(self, high)
            if lower >= higher:
                raise UsageError(
                    f"timeouts: {low} ({format_duration(lower)}) must be shorter than {high}"
                    f" ({format_duration(higher)}): change one of them in the profile's [timeouts]"
                )

    def seconds(self) -> dict[str, float]:
        """By name, in seconds."""
        return {name: value.total_seconds() for name, value in asdict(self).items()}


def build_ladder(timeouts: Timeouts) -> Ladder:
    """The ladder of a profile: what it names, and the rest in proportion to the group timeout."""
    group = timeouts.process_group or _TORCH_DEFAULT
    return Ladder(
        soft=timeouts.soft or group * _SOFT,
        hard=timeouts.hard or group * _HARD,
        process_group=group,
        heartbeat=timeouts.heartbeat or min(_HEARTBEAT, group / 2),
        barrier=timeouts.barrier or group * _BARRIER,
        completion=timeouts.completion or max(_COMPLETION, group),
    )
