"""Starting the workers of one attempt: the environment of each, and its process."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ncclops.agent import workers
from ncclops.agent.attached import Streams
from ncclops.agent.fork_server import ForkServer, ForkServers
from ncclops.agent.job import Job
from ncclops.agent.rendezvous_result import Place
from ncclops.agent.stop_requests import StopRequests
from ncclops.env import snapshot
from ncclops.host import process_view
from ncclops.record.environment_record import ENVIRONMENT
from ncclops.record.events import WorkerStartedEvent
from ncclops.record.variables import AGENT_PID, ATTACHED, STARTED


class WorkerStarts:
    """Starts workers of the attempt at ``place``.

    ``added`` is what a retry adds to the plan, ``attached`` the streams of the rank that gets
    standard input, if one does.
    """

    def __init__(
        self,
        job: Job,
        place: Place,
        added: Mapping[str, str],
        fork_servers: ForkServers,
        attached: Streams,
        stop: StopRequests,
    ) -> None:
        self._job, self._place = job, place
        self._added, self._attached = added, attached
        self._fork_servers, self._stop = fork_servers, stop

    def environ(self, rank: int) -> dict[str, str]:
        """The environment of ``rank``, all but the time of its start."""
        attempt = workers.WorkerAttempt(
            number=self._place.number,
            most=self._job.retry.granted,
            job_id=self._job.job_id,
            store=self._place.store,
        )
        local_rank = list(self._place.ranks).index(rank)
        return {
            **self._job.environ_of(rank),
            **self._place.environ,
            **self._added,
            **workers.identity(self._place.layout, attempt, local_rank),
            "TORCHELASTIC_ERROR_FILE": str(
                self._job.run.paths.rank(rank).error(self._place.number)
            ),
            AGENT_PID: str(os.getpid()),
        }

    async def fork_server(self, environs: Sequence[Mapping[str, str]]) -> ForkServer | None:
        """What forks workers with ``environs``, once it can; None: they are started afresh."""
        if not environs:
            return None
        return await self._fork_servers.for_workers(environs, lambda: self._stop.asked)

    def spawn(
        self, rank: int, environ: Mapping[str, str], server: ForkServer | None
    ) -> workers.Worker:
        """Start the process of ``rank``. Raises ``NcclopsError`` or ``OSError``."""
        job, environ = self._job, {**environ, STARTED: f"{time.time():.3f}"}
        with suppress(OSError):  # for `env diff` of two ranks; no reason not to start
            path = job.run.paths.rank(rank).environment
            ENVIRONMENT.write(path, snapshot.take(environ, label=path.stem))
        streams = Streams()
        if rank == job.attached:  # its interpreter has to see the terminal when it starts
            streams, environ[ATTACHED], server = self._attached, "1", None
        return workers.Worker.spawn(rank, job.argv, environ, job.run, streams, server)

    def record(self, worker: workers.Worker) -> None:
        """Note in the run that ``worker`` was started."""
        seen = process_view.read_stat(Path(f"/proc/{worker.pid}"))
        self._job.run.add(
            WorkerStartedEvent(
                rank=worker.rank,
                pid=worker.pid,
                attempt=self._place.number,
                started_ticks=None if seen is None else seen.started_ticks,
                forked=worker.forked,
            )
        )
