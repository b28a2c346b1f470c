"""Points in time as people read them."""

from __future__ import annotations

from datetime import datetime


def format_moment(seconds: float) -> str:
    """``seconds`` since the epoch in the reader's zone; ``?`` for what no calendar has."""
    try:
        return f"{datetime.fromtimestamp(seconds).astimezone():%Y-%m-%d %H:%M:%S %Z}"
    except (OverflowError, ValueError, OSError):
        return "?"
