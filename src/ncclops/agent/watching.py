"""The watch over a running attempt: what workers print and record, made into events.

The edges around ``ncclops.health.live``: its clock is the event loop's, what it finds goes into
``events.jsonl``, and what a person should know at once onto the terminal as well.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from msgspec.structs import replace

from ncclops.agent.job import Job
from ncclops.health.live import LiveWatch
from ncclops.health.stragglers import step_time_in
from ncclops.host import gpu_readings
from ncclops.receipts.observation import Observation, Where, observe_record
from ncclops.record import progress
from ncclops.record.events import (
    CompileStallEvent,
    Event,
    StartupStallEvent,
    StragglerEvent,
    name_of,
)
from ncclops.record.receipt_records import ReceiptRecord

_NOWHERE = Where("receipt.jsonl", 0, "")  # only facts are quoted with their line


class Watching:
    """From the start of an attempt's workers, which are ``ranks``, until :meth:`close`."""

    def __init__(self, job: Job, ranks: Sequence[int], say: Callable[[str], None]) -> None:
        self._job, self._ranks, self._say = job, ranks, say
        self._loop = asyncio.get_running_loop()
        self._watch = LiveWatch(job.watch, self._loop.time())
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._arm()

    def on_printed(self, rank: int, seen: Sequence[Observation]) -> None:
        """The output of ``rank`` shows something."""
        for each in seen:
            self._report(self._watch.saw_line(rank, each, self._loop.time(), time.time()))
        self._arm()

    def on_record(self, rank: int, record: ReceiptRecord) -> None:
        """``rank`` has written a record into its ``receipt.jsonl``."""
        seen = observe_record(record, _NOWHERE)
        if seen is None:
            return
        now, step_time = self._loop.time(), step_time_in(record)
        found = self._watch.saw_record(rank, seen, step_time, record.iteration, now, record.ts)
        self._report(found)
        self._arm()

    def flush(self) -> None:
        """An iteration or the attempt ends: report the last step before that."""
        self._report(self._watch.flush())

    def steps_printed(self, rank: int) -> int:
        """How many steps the output of ``rank`` has shown."""
        return self._watch.steps_printed(rank)

    def close(self) -> None:
        """No window is open any more; what the last lines and records show is still reported."""
        self._closed = True
        self._arm()

    def _arm(self) -> None:
        deadline = None if self._closed else self._watch.deadline
        if self._timer is not None:
            if self._timer.when() == deadline:
                return
            self._timer.cancel()
            self._timer = None
        if deadline is not None:
            self._timer = self._loop.call_at(deadline, self._on_deadline)

    def _on_deadline(self) -> None:
        # A timer may be a clock's tick early.
        deadline = self._watch.deadline
        if self._updates_silently():
            self._watch.trains(self._loop.time())
        self._report(self._watch.check(max(self._loop.time(), deadline or 0.0)))
        self._timer = None
        self._arm()

    def _updates_silently(self) -> bool:
        """Whether only the updates of its optimizers show that the script trains."""
        pages = (progress.read(self._job.run.paths.rank(r).progress) for r in self._ranks)
        return any(page is not None and page.updates > 0 for page in pages)

    def _report(self, found: Sequence[Event]) -> None:
        for event in found:
            if isinstance(event, StragglerEvent):
                self._report_straggler(event)
                continue
            self._job.run.add(event)
            if isinstance(event, StartupStallEvent | CompileStallEvent):
                self._say(f"{name_of(event)}: {event.message}")

    def _report_straggler(self, event: StragglerEvent) -> None:
        """Report it with the GPU's readings; in a thread, because the driver may never answer."""

        def look() -> None:
            found = self._hardware(event)
            with suppress(RuntimeError):  # the run is over meanwhile
                self._loop.call_soon_threadsafe(self._report_found_straggler, event, found)

        threading.Thread(target=look, name="ncclops-gpu", daemon=True).start()

    def _hardware(self, event: StragglerEvent) -> gpu_readings.GpuHealth | None:
        assert event.rank is not None
        device = self._job.device_of(event.rank)
        health = None if device is None else gpu_readings.read_gpu(device)
        return health if health is not None and health.available else None

    def _report_found_straggler(
        self, event: StragglerEvent, health: gpu_readings.GpuHealth | None
    ) -> None:
        host = socket.gethostname()
        complaints = [] if health is None else health.complaints()
        readings = None if health is None else health.to_json()
        self._job.run.add(replace(event, host=host, gpu=readings, hardware=complaints))
        if event.kind != "chronic":
            return  # recorded only: a single episode needs no action by a person
        device = "" if health is None else f", GPU {health.device}"
        since = time.strftime("%H:%M:%S", time.localtime(event.since))
        self._say(
            f"straggler: rank {event.rank} on {host}{device} takes"
            f" {event.ratio:.2f} times the median step since step {event.since_step}"
            f" ({since})"
            + (f"; {', '.join(complaints)}" if complaints else "")
            + f". {event.advice}"
        )
