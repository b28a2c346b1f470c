"""The one phase that a callback has open: frameworks tell of beginnings and ends separately."""

from __future__ import annotations

from datetime import timedelta

from ncclops import receipt
from ncclops.durations import parse_duration


class Phases:
    """At most one phase is open; the beginning of another one ends it.

    ``limit`` is for each of them. Raises ``ValueError`` if it is no duration.
    """

    def __init__(self, limit: timedelta | str) -> None:
        if not isinstance(limit, str | timedelta):
            raise TypeError(
                "ReceiptCallback(phase_limit): give text with a unit, as '30m', or a"
                f" datetime.timedelta, not {limit!r}"
            )
        self._limit = parse_duration(limit) if isinstance(limit, str) else limit
        self._open: receipt.phase | None = None

    @property
    def is_open(self) -> bool:
        """Whether a phase is declared now."""
        return self._open is not None

    def begin(self, name: str) -> None:
        """From now on the rank does ``name``, which takes longer than a step."""
        self.end()
        self._open = receipt.phase(name, self._limit)
        self._open.__enter__()

    def end(self) -> None:
        """Steps again, or nothing that was declared."""
        if self._open is not None:
            self._open.__exit__()
            self._open = None
