"""What the agent has of notifications: the run's events handed on, and their end.

Nothing of ``ncclops.notify`` is loaded where nobody is to be told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ncclops.agent.job import Job
from ncclops.record.events import RunStartedEvent
from ncclops.record.run_directory import RunDirectory

if TYPE_CHECKING:
    from ncclops.notify.notifier import Notifier
    from ncclops.notify.targets import NotifyPlan


class Notifications:
    """Of the run of ``job``; ``say`` is for what was lost, and called in other threads."""

    def __init__(self, job: Job, say: Callable[[str], None]) -> None:
        self._job, self._say = job, say
        self._notifier: Notifier | None = None

    @property
    def pids(self) -> set[int]:
        """Processes that notify, which are nobody else's to end or to wait for."""
        return set() if self._notifier is None else self._notifier.processes.pids

    @property
    def is_starting(self) -> bool:
        """Whether there may be one of which the pid is not known yet."""
        return self._notifier is not None and self._notifier.processes.is_starting

    def start(self) -> None:
        """Hand on the events of the run from now on."""
        job = self._job
        if job.notify is None:
            return
        self._notifier = _notifier(job.run, job.notify, self._say)
        started = RunStartedEvent(run_id=job.run.run_id, world_size=job.layout.world_size)
        self._notifier.post(started)  # it is on record already

    def close(self, limit_s: float) -> None:
        """Send what there is to send, for ``limit_s`` at most. Blocks; any thread."""
        if self._notifier is not None:
            self._notifier.close(limit_s)


@contextmanager
def told(
    run: RunDirectory, plan: NotifyPlan | None, say: Callable[[str], None], limit_s: float
) -> Iterator[None]:
    """Tell of the events that the body adds to ``run``: the verdict of an agent that was killed."""
    if plan is None:
        yield
        return
    notifier = _notifier(run, plan, say)
    try:
        yield
    finally:
        notifier.close(limit_s)


def _notifier(run: RunDirectory, plan: NotifyPlan, say: Callable[[str], None]) -> Notifier:
    from ncclops.notify.messages import Origin
    from ncclops.notify.notifier import Notifier

    origin = Origin(run_id=run.run_id, run_dir=str(run.path), node=run.node, marks=plan.marks)
    notifier = Notifier(plan, origin, record=run.add, say=say)
    notifier.start()
    run.listen(notifier.post)
    return notifier
