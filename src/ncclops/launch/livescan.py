"""Classifies workers' output while it is written, in a thread beside the agent."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ncclops.classify import Report, Scanner
from ncclops.launch.tail import GrowthWatch

_CHUNK = 1 << 20


@dataclass(frozen=True)
class Diagnosis:
    """What the output of one attempt shows: what failed, and how many steps were done."""

    report: Report
    steps: int


class LiveScan:
    """Reads what is written to ``files`` (path to rank) from :meth:`start` on."""

    def __init__(self, files: Mapping[Path, int]) -> None:
        self._ranks = dict(files)
        self._files = {path: path.open("rb", buffering=0) for path in files}
        for file in self._files.values():
            file.seek(0, 2)  # what an earlier attempt has written is not this one's
        self._watch = GrowthWatch()
        self._scanner = Scanner()
        self._finishing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ncclops-scan", daemon=True)

    def start(self) -> None:
        for path in self._files:
            self._watch.add(path)
        self._thread.start()

    def finish(self) -> Diagnosis:
        """Read to the end and judge. Blocks until that is done."""
        self._finishing.set()
        self._watch.wake()
        self._thread.join()
        self._watch.close()
        for file in self._files.values():
            file.close()
        return Diagnosis(self._scanner.verdict(), self._scanner.steps)

    def _run(self) -> None:
        while True:
            last_look = self._finishing.is_set()
            read = [self._read(path) for path in self._files]  # a chunk of each, in turn
            if any(read):
                continue
            if last_look:
                return
            self._watch.wait()

    def _read(self, path: Path) -> bool:
        data = self._files[path].read(_CHUNK)
        if data:
            self._scanner.feed(self._ranks[path], str(path), data)
        return bool(data)
