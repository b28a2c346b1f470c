"""Reads workers' output while it is written, in a thread beside the agent: each line once.

The classifier and the receipts (``printed``) look at the same bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from ncclops.agent.hang_action import Hang
from ncclops.agent.workers import Exit
from ncclops.classify import Classification, Report, Scanner
from ncclops.classify.model import Stats
from ncclops.receipts.log_receipts import PrintedReceipts
from ncclops.record.tail import GrowthWatch

_CHUNK = 1 << 20


@dataclass(frozen=True)
class LiveDiagnosis:
    """What the output of one attempt shows: what failed, and how many steps were done.

    ``error``: why it could not be read to the end, an internal error.
    """

    report: Report
    steps: int
    error: Exception | None = None


class LiveScan:
    """Reads what is written to ``files`` (path to rank) from :meth:`start` on."""

    def __init__(self, files: Mapping[Path, int], printed: PrintedReceipts) -> None:
        self._ranks = dict(files)
        self._printed = printed
        self._files = {path: path.open("rb", buffering=0) for path in files}
        for file in self._files.values():
            file.seek(0, 2)  # what an earlier attempt has written is not this one's
        self._watch = GrowthWatch()
        self._scanner: Scanner | None = None
        self._failure: Exception | None = None
        self._finishing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ncclops-scan", daemon=True)

    def start(self) -> None:
        for path in self._files:
            self._watch.add(path)
        self._thread.start()

    def finish(
        self, exits: Mapping[int, Exit], hang: Hang | None, *, starting_up: bool
    ) -> LiveDiagnosis:
        """Read to the end and judge. Blocks until that is done.

        ``exits`` is how ranks failed, evidence like any line: a crash in native code leaves
        nothing else. ``hang`` is what the hang watch has found.
        ``starting_up``: the workers never got as far as a process group.
        """
        self._finishing.set()
        self._watch.wake()
        self._thread.join()
        self._watch.close()
        for file in self._files.values():
            file.close()
        if self._scanner is None or self._failure is not None:
            return LiveDiagnosis(_unknown(self._failure), steps=0, error=self._failure)
        for rank, end in exits.items():
            self._scanner.add_exit(rank, code=end.code, signal=end.signal)
        if hang is not None:
            for rank in hang.ranks:
                self._scanner.add_hang(rank, hang.reason)
        return LiveDiagnosis(self._scanner.verdict(starting_up=starting_up), self._scanner.steps)

    def _run(self) -> None:
        try:
            self._scan(scanner := Scanner(clock=datetime.now))
            self._scanner = scanner
        except Exception as failure:  # noqa: BLE001 - a diagnosis must never end what it looks at
            self._failure = failure
            self._printed.broken = True

    def _scan(self, scanner: Scanner) -> None:
        while True:
            last_look = self._finishing.is_set()
            read = [self._read(scanner, path) for path in self._files]  # a chunk of each
            if any(read):
                continue
            if last_look:
                self._printed.end()
                return
            self._watch.wait()

    def _read(self, scanner: Scanner, path: Path) -> bool:
        data = self._files[path].read(_CHUNK)
        if data:
            scanner.feed(self._ranks[path], str(path), data)
            self._printed.feed(path, data)
        return bool(data)


def _unknown(failure: Exception | None) -> Report:
    summary = f"the output could not be classified: {failure}"
    return Report(Classification(class_="unknown", confidence=0.0, summary=summary), (), Stats())
