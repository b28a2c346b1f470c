"""What the workers report to the agent, delivered in the agent's event loop as it is written."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Generic

from ncclops.record.lines import Decode, Record, RecordReader
from ncclops.record.tail import GrowthWatch

Deliver = Callable[[int, Record], None]


class WorkerEvents(Generic[Record]):
    """Follows one file a rank, and calls ``deliver(rank, record)`` for each record, once.

    Lines that ``decode`` refuses were not written by us: scripts may write to the directory.
    """

    def __init__(self, decode: Decode[Record], deliver: Deliver[Record]) -> None:
        self._decode = decode
        self._deliver = deliver
        self._watch = GrowthWatch()
        self._readers: dict[int, RecordReader[Record]] = {}

    def follow(self, files: Mapping[int, Path]) -> None:
        """Follow these too; a rank whose file is followed already stays as it is.

        Raises ``OSError`` where there is no such file.
        """
        for rank, path in files.items():
            if (known := self._readers.get(rank)) is not None:
                with suppress(OSError):  # something else lies there by now
                    self._follow_anew(rank, path, known)
                continue
            self._readers[rank] = RecordReader(path, self._decode)
            self._watch.add(path)

    def _follow_anew(self, rank: int, path: Path, known: RecordReader[Record]) -> None:
        """Follow ``path`` where the file that was followed has been removed, and made anew."""
        if known.reads(path):
            return
        self._readers[rank] = RecordReader(path, self._decode)
        self._watch.add(path)
        for record in known.new():
            self._deliver(rank, record)
        known.close()

    def open(self) -> None:
        """Start delivering; call in the event loop."""
        asyncio.get_running_loop().add_reader(self._watch.fileno(), self._on_growth)

    def collect(self) -> None:
        """Deliver what is there now, such as the last events of a worker that has just ended."""
        for rank, reader in self._readers.items():
            for record in reader.new():
                self._deliver(rank, record)

    def close(self) -> None:
        """Deliver what is left and stop."""
        self.collect()
        asyncio.get_running_loop().remove_reader(self._watch.fileno())
        self._watch.close()
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()

    def _on_growth(self) -> None:
        self._watch.wait()  # returns at once, and clears what woke us
        self.collect()
