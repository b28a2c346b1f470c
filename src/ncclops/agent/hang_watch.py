"""Looks at the workers periodically, in a thread, and reports when the job hangs.

The edge of ``ncclops.health.liveness``, which decides. In a thread of its own, because a GPU driver
or a file server that does not answer must not block the agent; what is found is judged and reported
in the event loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ncclops.agent.coordinator import Coordinator
from ncclops.agent.job import Job
from ncclops.agent.team import Team
from ncclops.health import probes
from ncclops.health.evidence import Reading
from ncclops.health.hang import HangFinding, HangVerdict
from ncclops.health.liveness import Liveness
from ncclops.host import gpu_readings

# How often it is seen that the event loop has ended and does not answer.
_LOOP_ANSWERS_S = 30.0
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

    ``looked`` is called with what each look has found, ``hung`` with each verdict that this node
    acts on, repeatedly while the hang lasts.
    ``coordinator`` knows the ranks of other nodes.
    """

    def __init__(
        self,
        job: Job,
        ranks: Iterable[int],
        team: Team,
        steps_printed: Callable[[int], int],
        coordinator: Coordinator,
        looked: Callable[[Sequence[Reading]], None],
        hung: Judged,
    ) -> None:
        self._job, self._team = job, team
        self._liveness = Liveness(job.hang)
        self.act_before = self._liveness.act_before
        self._steps_printed = steps_printed
        self._coordinator = coordinator
        self._looked, self._hung = looked, hung
        self._loop = asyncio.get_running_loop()
        self._gpus = {rank: _GpuActivity(job.device_of(rank)) for rank in ranks}
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ncclops-hangs", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def close(self) -> None:
        """Do not look again; does not wait for a look under way."""
        self._ending.set()

    def _run(self) -> None:
        # Periodic, because no event says that nothing happens.
        while not self._ending.wait(self._liveness.pause.total_seconds()):
            self._look()

    def _look(self) -> None:
        looks = self._on_loop(self._workers)
        readings = [self._read(look) for look in looks]
        findings = self._liveness.look(readings, self._loop.time())
        self._in_loop(self._judge, readings, findings)

    def _on_loop(self, function: Callable[[], list[_Look]]) -> list[_Look]:
        """The result of ``function`` in the event loop, the only thread that may use the team."""
        done, result = threading.Event(), list[_Look]()

        def run() -> None:
            result.extend(function())
            done.set()

        self._in_loop(run)
        while not done.wait(_LOOP_ANSWERS_S):
            if self._ending.is_set():
                return []
        return result

    def _in_loop(self, function: Callable[..., object], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # it has ended meanwhile
            self._ending.set()

    def _workers(self) -> list[_Look]:
        workers = self._team.taking_part()
        return [_Look(each.rank, each.pid, self._steps_printed(each.rank)) for each in workers]

    def _read(self, look: _Look) -> Reading:
        return probes.read_rank(
            self._job.run.path,
            look.rank,
            look.pid,
            alive=True,
            printed_steps=look.printed_steps or None,
            gpu_active=self._gpus[look.rank].glance(),
        )

    def _judge(self, readings: Sequence[Reading], findings: Sequence[HangFinding]) -> None:
        """Judge the job by ``findings`` on all ranks of this node whose processes run."""
        if self._ending.is_set():
            return
        self._looked(readings)
        self._coordinator.share_view(self._liveness.view(findings))
        verdict = self._liveness.verdict(findings, self._coordinator.elsewhere())
        if verdict is not None:
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
        asking = threading.Thread(target=self._ask, name="ncclops-gpu", daemon=True)
        try:
            asking.start()
        except RuntimeError:  # as many threads as are allowed
            return None
        self._asking = asking
        asking.join(_GPU_LIMIT_S)
        return self._answer

    def _ask(self) -> None:
        assert self._device is not None
        self._answer = gpu_readings.is_active(self._device)
