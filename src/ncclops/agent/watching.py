"""The watch over a running attempt: what workers print and record, made into events.

The edges around ``ncclops.health.live``: its clock is the event loop's, what it finds goes into
``events.jsonl``, and what a person should know at once onto the terminal as well.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta

from msgspec.structs import replace

from ncclops.agent.coordinator import Coordinator
from ncclops.agent.job import Job
from ncclops.agent.slow_causes import SlowCauses
from ncclops.agent.team import Team
from ncclops.diagnose import where
from ncclops.diagnose.story_text import shown
from ncclops.errors import NcclopsError
from ncclops.health.evidence import Reading
from ncclops.health.live import LiveWatch
from ncclops.health.paces import RankPace
from ncclops.health.stalls import RestartWatch
from ncclops.health.stragglers import step_time_in
from ncclops.host import gpu_readings
from ncclops.host_name import host_name
from ncclops.receipts.observation import Observation, Where, observe_record
from ncclops.record import progress
from ncclops.record.event_values import SlowRank
from ncclops.record.events import (
    CompileStallEvent,
    Event,
    RestartStallEvent,
    StartupStallEvent,
    StragglerEvent,
    name_of,
)
from ncclops.record.progress import Progress
from ncclops.record.receipt_records import PaceRecord, ReceiptRecord

_LOOK_LIMIT = timedelta(seconds=5)
_MOST_PLACES = 3
_NOWHERE = Where("receipt.jsonl", 0, "")  # only facts are quoted with their line


class Watching:
    """From the start of an attempt's workers, which are ``ranks``, until :meth:`close`.

    ``slow_ranks`` are those of this node that the others have waited for all the time.
    """

    def __init__(
        self,
        job: Job,
        ranks: Sequence[int],
        team: Team,
        coordinator: Coordinator,
        say: Callable[[str], None],
    ) -> None:
        self._job, self._ranks, self._team, self._say = job, ranks, team, say
        self._coordinator = coordinator
        self._causes = SlowCauses({rank: job.device_of(rank) for rank in ranks})
        self.slow_ranks: dict[int, SlowRank] = {}
        self._loop = asyncio.get_running_loop()
        self._watch = LiveWatch(job.watch, self._loop.time())
        self._began_ns = time.monotonic_ns()
        self._restarts = RestartWatch()
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
        if isinstance(record, PaceRecord):
            self._on_pace(RankPace.of(rank, record))
            return
        seen = observe_record(record, _NOWHERE)
        if seen is None:
            return
        now, step_time = self._loop.time(), step_time_in(record)
        found = self._watch.saw_record(rank, seen, step_time, record.iteration, now, record.ts)
        self._report(found)
        self._arm()

    def on_look(self, readings: Sequence[Reading]) -> None:
        """So the workers of this node look at the moment."""
        stall = self._restarts.look(readings)
        if stall is not None:
            self._report([stall])

    def flush(self) -> None:
        """An iteration or the attempt ends: report the last step before that."""
        self._report(self._watch.flush())

    def finish(self) -> None:
        """The attempt has ended."""
        self._report(self._watch.finish())
        self.flush()

    def steps_printed(self, rank: int) -> int:
        """How many steps the output of ``rank`` has shown."""
        return self._watch.steps_printed(rank)

    def has_trained(self) -> bool:
        """Whether any rank has reported a step, or updated an optimizer, since the attempt began.
        What ranks have printed is not asked."""
        return self._watch.steps_recorded() or any(
            page.updates + page.updates_before > 0 for page in self._pages()
        )

    def close(self) -> None:
        """No window is open any more; what the last lines and records show is still reported."""
        self._closed = True
        self._arm()

    def _on_pace(self, pace: RankPace) -> None:
        self._coordinator.share_pace(pace)
        self._report(self._watch.saw_pace(pace, self._coordinator.paces_elsewhere()))
        if self._watch.suspected(pace.rank):
            self._causes.look({worker.rank: worker.pid for worker in self._team.running()})

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
        return any(page.updates > 0 for page in self._pages())

    def _pages(self) -> Iterator[Progress]:
        """Those of this attempt; of the one before, some may be there still."""
        for rank in self._ranks:
            page = progress.read(self._job.run.paths.rank(rank).progress)
            if page is not None and page.started_ns >= self._began_ns:
                yield page

    def _report(self, found: Sequence[Event]) -> None:
        for event in found:
            if isinstance(event, StragglerEvent):
                if event.measured == "waiting":
                    assert event.rank is not None
                    self._report_found_straggler(event, *self._causes.of(event.rank))
                else:
                    self._report_straggler(event)
                continue
            self._job.run.add(event)
            if isinstance(event, StartupStallEvent | CompileStallEvent | RestartStallEvent):
                self._report_stall(event)

    def _report_stall(
        self, event: StartupStallEvent | CompileStallEvent | RestartStallEvent
    ) -> None:
        """Say it with where the ranks are: it may be a hang that nothing else tells of so early."""

        def look() -> None:
            said = f"{name_of(event)}: {event.message}"
            with suppress(NcclopsError, OSError):
                seen = where.look(self._job.run.path, limit=_LOOK_LIMIT, native="silent")
                known = [each for each in seen.clusters if each.frame or each.doing]
                said = "; ".join([said, *(shown(str(each)) for each in known[:_MOST_PLACES])])
            self._say(said)

        threading.Thread(target=look, name="ncclops-where", daemon=True).start()

    def _report_straggler(self, event: StragglerEvent) -> None:
        """Report it with the GPU's readings; in a thread, because the driver may never answer."""

        def look() -> None:
            health = self._hardware(event)
            causes = [] if health is None else health.complaints()
            with suppress(RuntimeError):  # the run is over meanwhile
                self._loop.call_soon_threadsafe(self._report_found_straggler, event, health, causes)

        threading.Thread(target=look, name="ncclops-gpu", daemon=True).start()

    def _hardware(self, event: StragglerEvent) -> gpu_readings.GpuHealth | None:
        assert event.rank is not None
        device = self._job.device_of(event.rank)
        health = None if device is None else gpu_readings.read_gpu(device)
        return health if health is not None and health.available else None

    def _report_found_straggler(
        self, event: StragglerEvent, health: gpu_readings.GpuHealth | None, causes: list[str]
    ) -> None:
        assert event.rank is not None
        host = host_name()
        readings = None if health is None else health.to_json()
        self._job.run.add(replace(event, host=host, gpu=readings, hardware=causes))
        if event.kind == "one-off":
            return  # recorded only: a single episode needs no action by a person
        self.slow_ranks[event.rank] = SlowRank(
            rank=event.rank,
            node=self._job.run.node,
            ratio=event.ratio,
            over_s=event.over_s,
            gpu=None if health is None else health.device,
            cause=causes,
        )
        if event.kind == "over":
            self._say(f"rank {event.rank} on {host} is no longer slower than the others")
            return
        device = "" if health is None else f", GPU {health.device}"
        since = time.strftime("%H:%M:%S", time.localtime(event.since))
        self._say(
            f"straggler: rank {event.rank} on {host}{device} takes"
            f" {event.ratio:.2f} times the median step since step {event.since_step}"
            f" ({since}); {', '.join(causes) or 'no cause seen'}. {event.advice}"
        )
