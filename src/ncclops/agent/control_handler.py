"""What a run does when it is asked from outside (``ncclops.control``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from itertools import pairwise

from ncclops.agent.coordinator import LimitsChange
from ncclops.agent.job import Job
from ncclops.agent.stop_requests import StopRequests
from ncclops.agent.team import Team
from ncclops.control.commands import NO_REASON, ControlRefused
from ncclops.decision.outcome import StopRequest
from ncclops.durations import format_duration
from ncclops.record.events import ControlEvent
from ncclops.record.worker_commands import RestartCommand, TightenCommand
from ncclops.timeouts.model import Window
from ncclops.timeouts.settle import HARD, SOFT, acts_before

# A stop that an operator requests can wait for a long step and a checkpoint; a scheduler's SIGTERM
# cannot.
STOP_GRACE = timedelta(minutes=5)


class ControlHandler:
    """The ``Controls`` of one run. ``team`` gives the workers of the present attempt, if any.

    ``share_limits`` sends a change to the agents of all nodes, this one included; they :meth:`take`
    it. It returns False where there are no other nodes. ``act_before`` has hangs of the present
    attempt dealt with as early as its timeouts ask for.
    """

    def __init__(
        self,
        job: Job,
        stop: StopRequests,
        team: Callable[[], Team | None],
        share_limits: Callable[[LimitsChange], bool],
        act_before: Callable[[timedelta], object],
    ) -> None:
        self._job = job
        self._stop = stop
        self._team = team
        self._share_limits = share_limits
        self._act_before = act_before
        self._tightened: tuple[Team | None, Window] | None = None

    def stop(self, *, reason: str, by: str, grace: timedelta | None = None) -> str:
        """As SIGTERM does, with ``reason`` in place of the signal; SIGKILL after ``grace``."""
        if self._stop.first is not None and grace is None:  # a grace may shorten the time
            raise ControlRefused(
                f"it is being stopped already: {self._stop.first.reason}; another stop with"
                " --grace DURATION shortens the time"
            )
        self._record("stop", reason, by)
        shorter = " (--grace DURATION shortens that)" if grace is None else ""
        grace = max(STOP_GRACE, self._job.stop_grace) if grace is None else grace
        self._stop.add(StopRequest(reason=_why(reason, by), grace=grace))
        return f"stopping gracefully; SIGKILL after {format_duration(grace)}{shorter}"

    def restart(self, *, reason: str, by: str) -> str:
        """In place, on all ranks: a command to one of them is enough."""
        if not self._job.restarts_in_process:
            raise ControlRefused("this run does not restart in place (--restart): stop it instead")
        if self._stop.asked:
            raise ControlRefused("it is being stopped")
        team = self._team()
        restart = RestartCommand(reason=_why(reason, by))
        begun = [] if team is None else [w for w in team.running() if w.rank in team.entered]
        if not any(w.send_command(restart) for w in begun):
            raise ControlRefused("no worker is ready for commands: try again once the script runs")
        self._record("restart", reason, by)
        return "all ranks start the script again"

    def tighten_timeouts(self, limits: Mapping[str, timedelta], *, reason: str, by: str) -> str:
        """On each rank from its next step, or update of an optimizer, on."""
        if not self._job.restarts_in_process and {"soft", "hard"} & set(limits):
            raise ControlRefused(
                "soft and hard are timeouts of restarts in place, which this run does not use"
                " (--restart): give process_group only"
            )
        team = self._team()
        window = tightened(self._present(team), limits)
        if team is None or not team.running():
            raise ControlRefused("no worker runs")
        change = LimitsChange(window, reason, by)
        if not self._share_limits(change) and not self.take(change):
            raise ControlRefused("not all workers read commands: try again")
        return f"from the next step on: {_said(window)}"

    def take(self, change: LimitsChange) -> bool:
        """Send shorter timeouts to the workers of this node; whether all will get them."""
        team, window = self._team(), change.window
        workers = team.running() if team else []
        command = TightenCommand(
            process_group=window.process_group, soft=window.soft, hard=window.hard
        )
        sent = [worker.send_command(command) for worker in workers]
        self._tightened = (team, window)
        self._act_before(acts_before(window))
        all_sent = bool(sent) and all(sent)
        self._job.run.add(
            ControlEvent(
                action="tighten-timeouts",
                reason=change.reason,
                by=change.by,
                told=all_sent,
                process_group=_seconds(window.process_group),
                soft=_seconds(window.soft),
                hard=_seconds(window.hard),
            )
        )
        return all_sent

    def _present(self, team: Team | None) -> Window:
        """The timeouts of ``team`` after warm-up. New workers start with the profile's again."""
        if self._tightened is not None and self._tightened[0] is team:
            return self._tightened[1]
        return self._job.timeouts.steady or self._job.timeouts.first

    def _record(self, action: str, reason: str, by: str) -> None:
        self._job.run.add(ControlEvent(action=action, reason=reason, by=by))


def _why(reason: str, by: str) -> str:
    return f"{by}, without a reason" if reason == NO_REASON else f"{reason} ({by})"


def tightened(window: Window, limits: Mapping[str, timedelta]) -> Window:
    """``window`` with ``limits``, and the rest in proportion where that would be too long.

    Raises :class:`ControlRefused` for what would be longer than before, or out of order.
    """
    group = limits.get("process_group", window.process_group)
    hard = limits.get("hard", _shorter(window.hard, group * HARD))
    soft = limits.get("soft", _shorter(window.soft, hard and hard * (SOFT / HARD)))
    new = Window(process_group=group, soft=soft, hard=hard)
    for name, limit in limits.items():
        present = getattr(window, name)
        if present is not None and limit > present:
            raise ControlRefused(
                f"{name} is {format_duration(present)} already; timeouts only get shorter"
            )
    present_limits = [limit for limit in (soft, hard, group) if limit is not None]
    if any(low >= high for low, high in pairwise(present_limits)):
        raise ControlRefused(f"soft < hard < process_group must hold, and not {_said(new)}")
    return new


def _shorter(limit: timedelta | None, most: timedelta | None) -> timedelta | None:
    return limit if limit is None or most is None else min(limit, most)


def _seconds(limit: timedelta | None) -> float | None:
    return None if limit is None else limit.total_seconds()


def _said(window: Window) -> str:
    texts = window.to_json()
    shown = ("soft", "hard", "process_group")
    return ", ".join(f"{name} {texts[name]}" for name in shown if texts[name] is not None)
