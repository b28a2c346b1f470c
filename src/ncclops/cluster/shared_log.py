"""One log for all agents of a round, in the job's store: the same records in the same order.

A record is written at the end of the log by compare-and-set: one writer succeeds, the others try
the next number. So a writer may die at any moment and leaves no gap, and what was decided first is
decided for all. Waiting for the next record is a blocking ``wait`` in the store.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol

from ncclops.cluster import records
from ncclops.cluster.records import Record


class Store(Protocol):
    """The methods of torch's store that are used here; one thread at a time."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...
    def wait(self, keys: list[str], timeout: timedelta) -> None: ...
    def get(self, key: str) -> bytes: ...


class SharedLog:
    """The log under ``prefix``. Reading and writing may use separate connections."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix
        self._end = 0  # no record before it is missing, as far as we know

    def post(self, record: Record) -> int:
        """Append ``record``, which no other writer may write in the same words; its number."""
        text = records.encode(record)
        while self._store.compare_set(self._key(self._end), "", text) != text.encode():
            self._end += 1
        self._end += 1  # the same record once more is another one
        return self._end - 1

    def read(self, number: int, limit: timedelta) -> Record | None:
        """Record ``number``, once it is there; None after ``limit``.

        Raises ``RuntimeError`` when the store does not answer.
        """
        key = self._key(number)
        try:
            self._store.wait([key], limit)
        except RuntimeError as error:
            if is_lost(error):
                raise
            return None
        return records.decode(self._store.get(key))

    def _key(self, number: int) -> str:
        return f"{self._prefix}/log/{number}"


def is_lost(error: Exception) -> bool:
    """Whether ``error``, raised by a store, says that it is gone rather than late."""
    return not any(words in str(error).lower() for words in ("timeout", "timed out"))
