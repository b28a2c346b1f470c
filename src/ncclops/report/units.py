"""Times as the page spells them."""

from __future__ import annotations

from typing import Any

from ncclops.moments import format_moment


def spell(seconds: Any) -> str:
    """A length of time (seconds) in two units at most; ``?`` for what is no number."""
    if not isinstance(seconds, int | float):
        return "?"
    if seconds < 60:
        return f"{seconds:.2f}s" if seconds else "0s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02}m" if hours else f"{minutes}m {rest:02}s"


def moment(seconds: Any) -> str:
    """A point in time (seconds since the epoch) in the reader's zone."""
    return format_moment(seconds) if isinstance(seconds, int | float) else "?"
