"""Time stamps as logs write them.

A stamp is compared, never shown: (year or None, month, day, seconds of the day). Zones are
ignored: the logs of one job are written in one zone, and an offset printed by one library and
not by another would put lines of the same process hours apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from datetime import datetime
from functools import cache

from ncclops.classify.model import Stamp

_MONTHS = {
    name: number
    for number, name in enumerate(
        ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"), 1
    )
}
_CLOCK = r"(?P<h>\d\d):(?P<m>\d\d):(?P<s>\d\d(?:[.,]\d{1,9})?)"
_MONTH = "|".join(_MONTHS)
_FORMATS = (
    # 2026-02-25 18:08:45, 2025-01-21T04:41:44,285060, 2025-06-12_22:45:44, 2023-May-21 …
    rf"(?<!\d)(?P<Y>\d{{4}})[-/](?P<M>\d\d|{_MONTH})[-/](?P<D>\d\d)[T _-]{_CLOCK}",
    # glog as c10d writes it: E606 09:09:08.164985344, W0621 21:35:18.832000
    rf"(?<![A-Za-z\d])[IWEFVC](?P<M>\d{{1,2}})(?P<D>\d\d) {_CLOCK}",
    # Fri Oct 14 14:56:49 2022 and syslog's Oct 14 14:56:49
    rf"\b(?P<M>{_MONTH}) +(?P<D>\d{{1,2}}) {_CLOCK}(?: (?P<Y>\d{{4}}))?",
    # 10/14/2025-12:04:44
    rf"(?<!\d)(?P<M>\d\d)/(?P<D>\d\d)/(?P<Y>\d{{4}})[ -]{_CLOCK}",
)
# In each of them: text without it needs none of them compiled.
_ANY_CLOCK = re.compile(r"\d:\d\d:\d\d")


def first_stamp(text: str) -> Stamp | None:
    """The earliest-standing stamp in ``text``, or None when there is none that is a date."""
    stamps = _stamps(match for form in _formats_for(text) if (match := form.search(text)))
    return min(stamps, key=lambda item: item[0], default=(0, None))[1]


def last_stamp(text: str) -> Stamp | None:
    """The stamp nearest to the end of ``text``: what the lines after it may inherit."""
    stamps = _stamps(match for form in _formats_for(text) for match in form.finditer(text))
    return max(stamps, key=lambda item: item[0], default=(0, None))[1]


def stamp_of(moment: datetime) -> Stamp:
    """The stamp a log would write at ``moment``."""
    midnight = moment.replace(hour=0, minute=0, second=0, microsecond=0)
    return (moment.year, moment.month, moment.day, (moment - midnight).total_seconds())


def comparable(stamp: Stamp, default_year: int) -> float:
    """Seconds on one axis; only differences and order mean anything."""
    year, month, day, seconds = stamp
    # Months of 31 days keep the order and need no calendar.
    days = ((year or default_year) * 12 + month) * 31 + day
    return days * 86400.0 + seconds


def _formats_for(text: str) -> tuple[re.Pattern[str], ...]:
    return _compiled() if _ANY_CLOCK.search(text) else ()


@cache
def _compiled() -> tuple[re.Pattern[str], ...]:
    return tuple(map(re.compile, _FORMATS))


def _stamps(matches: Iterable[re.Match[str]]) -> Iterator[tuple[int, Stamp]]:
    for match in matches:
        if (stamp := _read(match)) is not None:
            yield match.start(), stamp


def _read(match: re.Match[str]) -> Stamp | None:
    fields = match.groupdict()
    month = _MONTHS.get(fields["M"]) or int(fields["M"])
    day, hour, minute = int(fields["D"]), int(fields["h"]), int(fields["m"])
    if not (1 <= month <= 12 and 1 <= day <= 31 and hour < 24 and minute < 60):
        return None
    year = int(fields["Y"]) if fields.get("Y") else None
    seconds = float(fields["s"].replace(",", "."))
    return (year, month, day, hour * 3600 + minute * 60 + seconds)
