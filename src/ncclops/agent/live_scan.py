"""Reads workers' output while it is written, in a thread beside the agent: each line once.

The classifier and the receipts (``printed``) look at the same bytes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from io import FileIO
from pathlib import Path

from ncclops.agent.backlog import MOST_LAST_BYTES, Patience, Span, all_but_the_last, gaps
from ncclops.agent.gpu_watch import DRIVER
from ncclops.agent.hang_action import Hang
from ncclops.agent.network_watch import NetworkLines
from ncclops.agent.workers import Exit
from ncclops.classify import Classification, Report, Scanner
from ncclops.classify.model import EXITS, KERNEL, Stats
from ncclops.receipts.log_receipts import PrintedReceipts
from ncclops.record.regular_file import open_regular
from ncclops.record.tail import GrowthWatch

_CHUNK = 1 << 20
_LAST_CHUNK = 1 << 17  # between two looks at the clock, once there is a deadline


@dataclass(frozen=True)
class LiveDiagnosis:
    """What the output of one attempt shows: what failed, and how many steps were done.

    ``error``: why it could not be read to the end, an internal error.
    ``passed_over``: what was left out of files, of which ranks, so that the run could end.
    """

    report: Report
    steps: int
    error: Exception | None = None
    passed_over: Sequence[tuple[int, Path, Span]] = ()


class LiveScan:
    """Reads what is written to ``files`` (path to rank) from :meth:`start` on.

    So it does with ``nccl_logs``, NCCL's own files, which have no receipts and are begun anew by
    each process.
    """

    def __init__(
        self,
        files: Mapping[Path, int],
        printed: PrintedReceipts,
        nccl_logs: Mapping[Path, int],
        network: NetworkLines,
    ) -> None:
        self._ranks = {**files, **nccl_logs}
        self._nccl_logs = set(nccl_logs)
        self._network = network
        self._printed = printed
        self._files = dict[Path, FileIO]()
        for path in self._ranks:
            with suppress(OSError):  # gone, or none any more: there is nothing to read
                self._files[path] = open_regular(path)
        for file in self._files.values():
            file.seek(0, 2)  # what an earlier attempt has written is not this one's
        self._evidence_ends: dict[Path, int] = {}
        self._ends: dict[Path, int] = {}  # once all processes have ended
        self._gaps: dict[Path, Span] = {}  # not come to yet
        self._passed_over: list[tuple[int, Path, Span]] = []
        self._patience = Patience()
        self._is_short = False
        self._names: dict[Path, Path] = {}  # of what is read behind a gap
        self._watch = GrowthWatch()
        self._scanner: Scanner | None = None
        self._failure: Exception | None = None
        self._finishing = threading.Event()
        self._given_up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ncclops-scan", daemon=True)

    def start(self) -> None:
        for path in self._files:
            self._watch.add(path)
        self._thread.start()

    def pass_over(self, ranks: Collection[int]) -> None:
        """What these write from now on is no evidence: their groups are about to be aborted."""
        for path, rank in self._ranks.items():
            if rank in ranks and path in self._files:
                with suppress(OSError):  # and nothing of it can be read
                    self._evidence_ends[path] = os.fstat(self._files[path].fileno()).st_size

    def finish(
        self,
        exits: Mapping[int, Exit],
        hang: Hang | None,
        *,
        starting_up: bool | None,
        has_trained: bool,
        driver: Mapping[int, Sequence[str]],
        memory: Mapping[int, str],
        last_words: Mapping[int, str],
        raised: Mapping[int, str],
    ) -> LiveDiagnosis:
        """Read to the end and judge. Blocks until that is done: seconds, by ``backlog``.

        ``exits`` is how ranks failed, evidence like any line: a crash in native code leaves
        nothing else. ``hang`` is what the hang watch has found.
        ``starting_up``: not all process groups have completed a collective; None: not known.
        ``has_trained``: the scripts have reported steps, or updated optimizers.
        ``driver`` are lines about the GPUs of ranks that failed, ``memory`` is what the kernel
        tells of ranks that the OOM killer has ended, ``last_words`` what scripts have handed to
        ``sys.exit``, ``raised`` exceptions that could not be written anywhere.
        """
        self._patience.begin()
        self._finishing.set()
        self._watch.wake()
        self._thread.join()
        self._watch.close()
        for file in self._files.values():
            with suppress(OSError):  # of a file system that has failed: nothing is lost with it
                file.close()
        if self._scanner is None or self._failure is not None:
            return unread(str(self._failure), self._failure)
        for rank, lines in driver.items():
            self._scanner.feed(rank, DRIVER, "".join(f"{line}\n" for line in lines))
        for rank, text in memory.items():
            self._scanner.feed(rank, KERNEL, f"{text}\n")
        for rank, text in last_words.items():
            self._scanner.feed(rank, EXITS, f"SystemExit: {text}\n")
        for rank, text in raised.items():
            self._scanner.feed(rank, EXITS, f"{text}\n")
        for rank, end in exits.items():
            self._scanner.add_exit(rank, code=end.code, signal=end.signal)
        if hang is not None:
            for rank in hang.ranks:
                self._scanner.add_hang(rank, hang.reason)
        if has_trained:
            self._scanner.add_steps()
        report = self._scanner.verdict(starting_up=starting_up)
        return LiveDiagnosis(report, self._scanner.steps, passed_over=self._passed_over)

    def hasten(self, last_s: float) -> None:
        """Read only last lines, for ``last_s`` seconds from now, once :meth:`finish` was called in
        another thread; that returns soon."""
        self._patience.shorten(last_s)

    def give_up(self) -> None:
        """Read no more, and feed nothing more, whatever :meth:`finish` in another thread does."""
        self._given_up.set()

    def _run(self) -> None:
        try:
            self._scan(scanner := Scanner(clock=datetime.now))
            self._scanner = scanner
        except Exception as failure:  # noqa: BLE001 - a diagnosis must never end what it looks at
            self._failure = failure
            self._printed.broken = True

    def _scan(self, scanner: Scanner) -> None:
        while not self._given_up.is_set():
            last_look = self._finishing.is_set()
            read = [self._read(scanner, path) for path in self._files]  # a chunk of each
            if any(read):
                continue
            if last_look:
                self._printed.end()
                return
            self._watch.wait()

    def _find_ends(self) -> None:
        for path, file in self._files.items():
            self._ends[path] = os.fstat(file.fileno()).st_size
        self._gaps = gaps(self._unread())

    def _unread(self) -> dict[Path, Span]:
        at = {path: file.tell() for path, file in self._files.items()}
        return {path: (at[path], max(at[path], end)) for path, end in self._ends.items()}

    def _look_at_the_clock(self) -> None:
        """Leave out what there is no time for."""
        if not self._ends:
            self._find_ends()
        if self._patience.is_over:
            self._gaps = all_but_the_last(self._unread(), 0)
        elif self._patience.is_short and not self._is_short:
            self._is_short = True
            left = all_but_the_last(self._unread(), MOST_LAST_BYTES)
            # What is already left out stays so.
            self._gaps = {
                path: (begin, max(end, self._gaps.get(path, (0, 0))[1]))
                for path, (begin, end) in left.items()
            }

    def _read(self, scanner: Scanner, path: Path) -> bool:
        file, rank = self._files[path], self._ranks[path]
        if self._given_up.is_set():
            return False
        if self._finishing.is_set():
            self._look_at_the_clock()
        if path in self._nccl_logs and os.fstat(file.fileno()).st_size < file.tell():
            file.seek(0)
        at, stop = file.tell(), self._ends.get(path)
        if (gap := self._gaps.get(path)) is not None:
            if at == gap[0]:
                return self._cross(path, gap)
            stop = gap[0] if at < gap[0] else stop
        data = file.read(_CHUNK if stop is None else max(0, min(_LAST_CHUNK, stop - at)))
        if data and not self._given_up.is_set():
            end = self._evidence_ends.get(path, at + len(data))
            name = self._names.get(path, path)
            scanner.feed(rank, str(name), data[: max(0, end - at)])
            self._network.feed(rank, name, data)
            if path not in self._nccl_logs:
                self._printed.feed(path, data)
        return bool(data)

    def _cross(self, path: Path, gap: Span) -> bool:
        """What comes behind ``gap`` counts from its next line, whose number is not known."""
        file, at = self._files[path], gap[1]
        file.seek(at)
        if at < self._ends[path]:
            at = file.seek(at + file.read(_CHUNK).find(b"\n") + 1)
        del self._gaps[path]
        self._passed_over.append((self._ranks[path], path, (gap[0], at)))
        self._names[path] = path.with_name(f"{path.name} (from byte {at})")
        self._printed.cut(path)
        return True


def unread(why: str, failure: Exception | None = None) -> LiveDiagnosis:
    """The diagnosis of output that could not be read; ``failure`` is an internal error."""
    summary = f"the output could not be classified: {why}"
    unknown = Classification(class_="unknown", confidence=0.0, summary=summary)
    return LiveDiagnosis(Report(unknown, (), Stats()), steps=0, error=failure)
