"""What a run does when it is asked from outside (``ncclops.control``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from ncclops.control.commands import ControlRefused
from ncclops.durations import format_duration
from ncclops.launch.job import Job
from ncclops.launch.stopping import StopRequest, StopRequests
from ncclops.launch.team import Team


class Steering:
    """The ``Controls`` of one run. ``team`` gives the workers of the present attempt, if any."""

    def __init__(self, job: Job, stop: StopRequests, team: Callable[[], Team | None]) -> None:
        self._job = job
        self._stop = stop
        self._team = team

    def stop(self, *, reason: str, by: str) -> str:
        """As SIGTERM does, with ``reason`` in place of the signal."""
        if self._stop.first is not None:
            raise ControlRefused(f"it is being stopped already: {self._stop.first.reason}")
        self._record("stop", reason, by)
        grace = self._job.stop_grace
        self._stop.add(StopRequest(reason=f"{reason} ({by})", grace=grace))
        return f"stopping in good order, by force after {format_duration(grace)}"

    def restart(self, *, reason: str, by: str) -> str:
        """In place, on all ranks: it is enough that one of them is told."""
        if not self._job.restarts_in_process:
            raise ControlRefused("this run does not restart in place (--restart): stop it instead")
        if self._stop.asked:
            raise ControlRefused("it is being stopped")
        team = self._team()
        begun = [] if team is None else [w for w in team.running() if w.rank in team.entered]
        if not any(w.order("restart", reason=f"{reason} ({by})", hung=None) for w in begun):
            raise ControlRefused("no worker has come to the script yet, or takes orders")
        self._record("restart", reason, by)
        return "all ranks start the script again"

    def tighten_timeouts(self, limits: Mapping[str, timedelta], *, reason: str, by: str) -> str:
        """From the next step of each rank on."""
        raise NotImplementedError

    def _record(self, action: str, reason: str, by: str, **fields: Any) -> None:
        self._job.run.event("control", action=action, reason=reason, by=by, **fields)
