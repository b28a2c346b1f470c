"""Durations and sizes as a table shows them: short, and read at a glance."""

from __future__ import annotations


def short(seconds: float) -> str:
    """A step's time: ``412 ms``, ``1.25 s``."""
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def duration(seconds: float) -> str:
    """``9s``, ``12m08s``, ``3h05m``."""
    if seconds < 59.5:
        return f"{seconds:.0f}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02}s"


def age(seconds: float) -> str:
    """How long ago, in five columns at most: ``0.4s``, ``12s``, ``9m``, ``26h``, ``12d``."""
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    for limit, size, unit in ((99.5, 1, "s"), (5970, 60, "m"), (356_400, 3600, "h")):
        if seconds < limit:
            return f"{seconds / size:.0f}{unit}"
    return f"{min(seconds / 86400, 9999):.0f}d"


def count(number: int, noun: str) -> str:
    """``1 rank``, ``8 ranks``."""
    return f"{number} {noun}{'s' * (number != 1)}"
