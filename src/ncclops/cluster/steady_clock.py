"""The clock of a rendezvous process: the host's, as it was when the process started, and from then
on set by nobody.

torch's rendezvous writes the time of each heartbeat into the store, and a node is lost for it whose
last one is old by the reader's clock. A host whose clock is set while the job runs would lose the
others so, and they it.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime, tzinfo


def _since_boot() -> float:
    # Goes on while the machine sleeps, as the clocks of the other hosts do.
    return time.clock_gettime(time.CLOCK_BOOTTIME)


_BOOTED = time.time() - _since_boot()


def now() -> float:
    """Seconds since the epoch, by this clock."""
    return _BOOTED + _since_boot()


class SteadyDatetime(datetime):
    """``datetime`` for code that asks it for the time: ``now`` is by this clock."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
        """A plain ``datetime``: it goes into pickles that other nodes read."""
        return datetime.fromtimestamp(now(), tz)

    @classmethod
    def utcnow(cls) -> datetime:  # type: ignore[override]
        """The same in UTC, without a zone."""
        return datetime.fromtimestamp(now(), UTC).replace(tzinfo=None)
