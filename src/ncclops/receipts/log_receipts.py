"""What workers' output shows of training, read once, as it passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ncclops.receipts.log_formats import Form
from ncclops.receipts.log_scan import LogScan
from ncclops.receipts.observation import Observation
from ncclops.receipts.receipt_facts import Facts

# What has neither a newline nor a carriage return for so long is no line of a trainer.
_LONGEST_PART = 1 << 16

Deliver = Callable[[int, Sequence[Observation]], None]


class PrintedReceipts:
    """The output files of a run, over all its attempts.

    Fed from one thread, which is the one that ``deliver(rank, observations)`` is called in.
    """

    def __init__(self, run: Path, deliver: Deliver, forms: Sequence[Form] = ()) -> None:
        self.broken = False  # some of the output was not read; set by the caller of ``feed``
        self._run = run
        self._deliver = deliver
        self._forms = forms
        self._streams: dict[Path, _Stream] = {}

    def follow(self, files: Mapping[Path, int]) -> None:
        """Add these files (path to rank); call it before data from them is fed."""
        for path, rank in files.items():
            if path not in self._streams:
                name = str(path.relative_to(self._run))
                self._streams[path] = _Stream(rank, LogScan(name, extra_forms=self._forms))

    def feed(self, path: Path, data: bytes) -> None:
        """Take what was appended to ``path``."""
        stream = self._streams[path]
        if seen := stream.feed(data):
            self._deliver(stream.rank, seen)

    def cut(self, path: Path) -> None:
        """What is fed next of ``path`` does not follow on what was fed before."""
        if path in self._streams:
            self._streams[path].cut()

    def end(self) -> None:
        """The present processes have ended: an unfinished line is complete."""
        for stream in self._streams.values():
            if seen := stream.end():
                self._deliver(stream.rank, seen)

    def facts(self) -> list[Facts]:
        """What each file has shown so far."""
        return [stream.scan.facts for stream in self._streams.values()]


class _Stream:
    def __init__(self, rank: int, scan: LogScan) -> None:
        self.rank = rank
        self.scan = scan
        self._rest = b""

    def feed(self, data: bytes) -> list[Observation]:
        # A progress bar has no newline for hours; each of its drawings ends with a return.
        data = self._rest + data
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        seen = self.scan.feed_block(data[:end]) if end else []
        self._rest = data[end:]
        if len(self._rest) > _LONGEST_PART:
            rest, self._rest = self._rest, b""
            seen += self.scan.feed(rest, ends=False)
        return seen

    def cut(self) -> None:
        self._rest = b""  # the beginning of a line: a step of which digits are missing

    def end(self) -> list[Observation]:
        rest, self._rest = self._rest, b""
        return self.scan.feed(rest + b"\n") if rest else []
