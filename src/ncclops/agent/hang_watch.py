"""Looks at the workers periodically, and reports when one of them hangs, on two kinds of evidence.

This runs in a separate thread: a GPU driver or a file server that does not answer must not block
the agent. What is found is delivered in the event loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

from ncclops.agent.job import Job
from ncclops.agent.team import Team
from ncclops.agent.workers import Worker
from ncclops.health import probes
from ncclops.health.evidence import Reading, Sample, Tracker
from ncclops.health.hang import HangLimits, HangVerdict, judge
from ncclops.host import gpu_readings
from ncclops.record import progress
from ncclops.record.paths import RunPaths

# So often per window, within these bounds: a look costs a few reads of /proc for each process.
_LOOKS_PER_WINDOW = 20
_SELDOM, _OFTEN = timedelta(seconds=30), timedelta(milliseconds=100)
# A driver that has not answered by then counts as without evidence.
_GPU_LIMIT_S = 2.0

Judged = Callable[[HangVerdict], None]


@dataclass(frozen=True)
class _Look:
    """A worker to look at, as the event loop knows it at the moment."""

    rank: int
    pid: int
    printed_steps: int


class HangWatch:
    """Watches ``team``, which runs ``ranks``, from :meth:`start` to :meth:`close`.

    ``hung`` is called with each verdict, repeatedly while the hang lasts.
    """

    def __init__(
        self,
        job: Job,
        ranks: Iterable[int],
        team: Team,
        steps_printed: Callable[[int], int],
        hung: Judged,
    ) -> None:
        self._job, self._team = job, team
        self._limits: HangLimits = job.hang
        self._steps_printed = steps_printed
        self._hung = hung
        self._loop = asyncio.get_running_loop()
        self._trackers: dict[int, Tracker] = {}
        self._gpus = {rank: _GpuActivity(job.device_of(rank)) for rank in ranks}
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ncclops-hangs", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Do not look again; does not wait for a look under way."""
        self._ending.set()

    def _run(self) -> None:
        # Periodic, because no event says that nothing happens.
        pause = min(_SELDOM, max(_OFTEN, self._limits.hang / _LOOKS_PER_WINDOW))
        while not self._ending.wait(pause.total_seconds()):
            with suppress(RuntimeError):  # the loop has ended meanwhile
                self._look()

    def _look(self) -> None:
        looks = self._on_loop(self._workers)
        readings = {look.rank: self._read(look) for look in looks}
        now = self._loop.time()
        samples = [self._sample(reading, now) for reading in readings.values() if reading]
        # Ranks that have ended or finished are not waited for.
        others = self._job.layout.world_size - self._job.layout.nproc
        verdict = judge(samples, self._limits, world_size=len(samples) + others)
        if verdict.hung:
            self._loop.call_soon_threadsafe(self._deliver, verdict)

    def _on_loop(self, function: Callable[[], list[_Look]]) -> list[_Look]:
        """The result of ``function`` in the event loop, the only thread that may use the team."""
        done, result = threading.Event(), list[_Look]()

        def run() -> None:
            result.extend(function())
            done.set()

        self._loop.call_soon_threadsafe(run)
        while not done.wait(_SELDOM.total_seconds()):
            if self._ending.is_set():
                return []
        return result

    def _workers(self) -> list[_Look]:
        running: list[Worker] = self._team.running()
        return [_Look(each.rank, each.pid, self._steps_printed(each.rank)) for each in running]

    def _read(self, look: _Look) -> Reading | None:
        """What ``look`` shows; None for a rank that has done its part and waits for the others."""
        run_dir = self._job.run.path
        page = progress.read(RunPaths(run_dir).rank(look.rank).progress)
        if page is not None and page.pid == look.pid and page.ended:
            return None
        return probes.read_rank(
            run_dir,
            look.rank,
            look.pid,
            alive=True,
            printed_steps=look.printed_steps or None,
            gpu_active=self._gpus[look.rank].glance(),
        )

    def _sample(self, reading: Reading, now: float) -> Sample:
        return self._trackers.setdefault(reading.rank, Tracker()).add(reading, now)

    def _deliver(self, verdict: HangVerdict) -> None:
        if not self._ending.is_set():
            self._hung(verdict)


class _GpuActivity:
    """Whether a GPU works, as far as its driver answers; never waits for long."""

    def __init__(self, device: int | str | None) -> None:
        self._device = device
        self._asking: threading.Thread | None = None
        self._answer: bool | None = None

    def glance(self) -> bool | None:
        if self._device is None or (self._asking is not None and self._asking.is_alive()):
            return None
        self._answer = None
        self._asking = threading.Thread(target=self._ask, name="ncclops-gpu", daemon=True)
        self._asking.start()
        self._asking.join(_GPU_LIMIT_S)
        return self._answer

    def _ask(self) -> None:
        assert self._device is not None
        self._answer = gpu_readings.is_active(self._device)
