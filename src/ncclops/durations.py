"""Durations as people write them (``"90s"``, ``"120m"``) and as Python uses them.

Everywhere in Python APIs a duration is a ``datetime.timedelta``; in profiles, on the command
line and in messages it is a number with a unit.
"""

from __future__ import annotations

import math
import re
from datetime import timedelta

_UNIT_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
# A century: for some, "never"; sums and multiples of it can still be computed with.
_LONGEST = timedelta(days=36_525)
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)")


def parse_duration(text: str) -> timedelta:
    """The duration that ``text`` spells: a non-negative number and a unit, such as ``"1.5h"``.

    Units are ms, s, m, h and d. Raises ``ValueError`` with the accepted form otherwise; a bare
    number is refused, because it might mean seconds or minutes.
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a duration: write a number and a unit, as in 90s or 2h")
    seconds = float(match[1]) * _UNIT_S[match[2]]
    if seconds > _LONGEST.total_seconds():
        raise ValueError(f"{text[:20]!r} is longer than any duration: at most {_LONGEST.days}d")
    return timedelta(seconds=seconds)


def format_duration(duration: timedelta) -> str:
    """``duration`` in the largest unit that shows a whole number; see ``parse_duration``."""
    total_ms = round(duration.total_seconds() * 1000)
    for unit, size_ms in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000)):
        if total_ms and total_ms % size_ms == 0:
            return f"{total_ms // size_ms}{unit}"
    return f"{total_ms}ms"


def format_rounded(duration: timedelta) -> str:
    """``duration`` in whole seconds, rounded up, for what is only to be read: not ``29550ms``."""
    return format_duration(timedelta(seconds=math.ceil(duration.total_seconds())))
