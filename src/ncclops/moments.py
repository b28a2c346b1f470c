"""Points in time as people read them."""

from __future__ import annotations

from datetime import datetime

# In seconds since the epoch, the beginning of the year 9999: the latest that can be shown as a date
# in each time zone. What is later in a file is no time.
LATEST_S = 253_370_764_800.0


def format_moment(seconds: float) -> str:
    """``seconds`` since the epoch in the reader's zone; ``?`` for what no calendar has."""
    try:
        return f"{datetime.fromtimestamp(seconds).astimezone():%Y-%m-%d %H:%M:%S %Z}"
    except (OverflowError, ValueError, OSError):
        return "?"
