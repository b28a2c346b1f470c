"""What the agent does when it is asked from outside: ``ncclops.control.Controls``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from datetime import timedelta
from typing import Any

from ncclops.control.commands import ControlRefused
from ncclops.durations import format_duration
from ncclops.errors import UsageError
from ncclops.launch.attempt import RunningAttempt
from ncclops.launch.job import Job
from ncclops.launch.ladder import Ladder
from ncclops.launch.stopping import StopRequest, StopRequests
from ncclops.launch.workers import Worker

# Who asks in words can wait for a long step and a checkpoint; a scheduler's SIGTERM cannot.
STOP_GRACE = timedelta(minutes=5)


class Steering:
    """``current`` is the attempt under way, if there is one."""

    def __init__(
        self, job: Job, stop: StopRequests, current: Callable[[], RunningAttempt | None]
    ) -> None:
        self._job, self._stop, self._current = job, stop, current
        self._ladder: Ladder = job.ladder

    def stop(self, *, reason: str, by: str, grace: timedelta | None = None) -> str:
        """Stop the run in good order; by force after ``grace``."""
        grace = max(STOP_GRACE, self._job.stop_grace) if grace is None else grace
        already = "already stopping; " if self._stop.asked else "stopping; "
        self._stop.add(StopRequest(reason=f"{reason} ({by})", grace=grace))
        return f"{already}by force after {format_duration(grace)}"

    def restart(self, *, reason: str, by: str) -> str:
        """Start the script again on all ranks, in their processes."""
        worker = self._restartable()
        self._job.run.event("restart-requested", reason=reason, by=by)
        if not worker.order("restart", reason=f"{reason} ({by})", hung=None):
            raise ControlRefused(f"rank {worker.rank} does not take orders any more")
        return "all ranks start the script again, in their processes"

    def tighten_timeouts(self, limits: Mapping[str, timedelta], *, reason: str, by: str) -> str:
        """Shorten ``soft`` and ``hard``, and ``process_group`` for all groups there are."""
        ladder = self._shortened(limits)
        team = self._present().team
        restart_core = {"soft", "hard"} & limits.keys()
        if restart_core:
            self._restartable().order(
                "timeouts", soft_s=ladder.soft.total_seconds(), hard_s=ladder.hard.total_seconds()
            )
        if (limit := limits.get("process_group")) is not None:
            for worker in team.running():
                worker.order("group-timeout", limit_s=limit.total_seconds())
        self._ladder = ladder
        told = {name: limit.total_seconds() for name, limit in limits.items()}
        self._job.run.event("timeouts-tightened", limits_s=told, reason=reason, by=by)
        return ", ".join(f"{name} {format_duration(limit)}" for name, limit in limits.items())

    def _shortened(self, limits: Mapping[str, timedelta]) -> Ladder:
        if "barrier" in limits:
            raise ControlRefused("barrier is fixed when workers start")
        if {"soft", "hard"} & limits.keys() and self._ladder.steady_soft is not None:
            raise ControlRefused("soft and hard follow the profile's steady window in this run")
        names = {entry.name for entry in fields(self._ladder)}
        for name, limit in limits.items():
            now = getattr(self._ladder, name) if name in names else None
            if now is not None and limit > now:
                raise ControlRefused(f"{name} is {format_duration(now)}: it can only get shorter")
        try:
            # torch's watchdog goes by the timeout of the groups.
            changes: dict[str, Any] = dict(limits)
            if "process_group" in limits and self._ladder.nccl_watchdog is not None:
                changes["nccl_watchdog"] = limits["process_group"]
            return replace(self._ladder, **changes)
        except UsageError as error:
            raise ControlRefused(str(error)) from None

    def _present(self) -> RunningAttempt:
        attempt = self._current()
        if attempt is None or not attempt.team.running():
            raise ControlRefused("no workers are running at the moment")
        if self._stop.asked:
            raise ControlRefused("the run is stopping")
        return attempt

    def _restartable(self) -> Worker:
        """A worker that can tell the others; all of them restart."""
        team = self._present().team
        if not self._job.restarts_in_process:
            raise ControlRefused("workers of this run do not restart in place (--restart)")
        for worker in team.running():
            if worker.rank in team.entered:
                return worker
        raise ControlRefused("no worker has started its script yet")
