"""What the run's record says around an incident: what was decided, and how workers ended."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from ncclops.process_ends import exit_status
from ncclops.rank_lists import ranks_named
from ncclops.record.event_values import GpuFault
from ncclops.record.events import (
    EscalationEvent,
    Event,
    FaultEvent,
    GpuFaultEvent,
    RestartEvent,
    RetryEvent,
    VerdictEvent,
    WorkerExitedEvent,
)
from ncclops.record.incident_record import GroupRecord, IncidentRecord

# By so many seconds the clocks of ranks and of agents, or of several nodes, may differ: what is on
# record so soon before an incident may have come after it.
CLOCKS_DIFFER_S = 1.0


@dataclass(frozen=True)
class DecisionTaken:
    """What followed an incident, and why."""

    what: str
    why: str


@dataclass(frozen=True)
class WorkerEnd:
    """How a worker's process ended: with exit ``code``, or killed by ``signal`` (its name)."""

    code: int | None
    signal: str | None
    how: str | None = None
    """In words, where the process was another node's and there is no more."""
    why: str | None = None
    """What the kernel tells of it, where that is known."""

    def __str__(self) -> str:
        how = self.how or exit_status(self.code, self.signal)
        return how if self.why is None else f"{how}, {self.why}"


def worker_end(events: Sequence[Event], rank: int, not_before: float) -> WorkerEnd | None:
    """How the worker of ``rank`` ended after that time; None without a record of it."""
    for event in events:
        if event.rank != rank or event.ts < not_before:
            continue
        if isinstance(event, FaultEvent) and event.how is not None:
            return WorkerEnd(None, None, event.how)
        if isinstance(event, WorkerExitedEvent):
            known = event.exit_code is not None or event.signal is not None
            return WorkerEnd(event.exit_code, event.signal, why=event.why) if known else None
    return None


def gpu_faults(
    events: Sequence[Event], ranks: Collection[int], not_before: float, until: float
) -> tuple[GpuFault, ...]:
    """GPUs that made ``ranks`` fail between two times, in seconds since the epoch."""
    return tuple(
        event.fault
        for event in events
        if isinstance(event, GpuFaultEvent)
        and event.fault.rank in ranks
        and not_before <= event.ts < until
    )


def advice_on(faults: Iterable[GpuFault]) -> list[str]:
    """What to do about them."""
    return [f"replace node {fault.node}: rank {fault.rank}'s {fault.device}" for fault in faults]


def decision_on(
    incident: IncidentRecord, events: Sequence[Event], until: float = math.inf
) -> DecisionTaken:
    """What was decided on the incident: a restart in place, another attempt, or the end.

    ``until`` is when the next fault was, in seconds since the epoch.
    """
    at = incident.at - CLOCKS_DIFFER_S
    following = [event for event in events if event.ts >= at]
    for number, event in enumerate(following):
        if isinstance(event, EscalationEvent) and event.ts < until:
            return _escalated(event, following[number + 1 :])
    in_place = incident.rank_before is not None  # or the agent's own
    for event in following:
        match event:
            case RestartEvent() if in_place and event.iteration == incident.iteration + 1:
                return _restarted(incident)
            case RetryEvent():
                return DecisionTaken(f"a new attempt (number {event.attempt})", event.reason)
            case VerdictEvent():
                return DecisionTaken(f"the run ended: {event.outcome}", event.reason)
    if incident.rank is not None:
        return _restarted(incident)
    return DecisionTaken("nothing is on record", "the run has not come to a decision yet")


def _escalated(escalation: EscalationEvent, following: Sequence[Event]) -> DecisionTaken:
    """Restarts in place were given up: new processes follow, or the job ends."""
    why = escalation.reason
    for event in following:
        match event:
            case RetryEvent():
                return DecisionTaken(
                    f"no further restart in place, but new processes (attempt {event.attempt})",
                    why,
                )
            case EscalationEvent():
                why = event.reason  # the agent's: it has no attempt left
            case VerdictEvent():
                return DecisionTaken(f"the run ended: {event.outcome}", why)
    to = "new processes" if escalation.to == "respawn" else "the end of the run"
    return DecisionTaken(f"no further restart in place, but {to}", why)


def _restarted(incident: IncidentRecord) -> DecisionTaken:
    returned, went_on = incident.ranks_returned, incident.world_size
    groups = _of_groups(incident.groups)
    lost = [rank for rank in incident.ranks_lost if rank not in returned]
    if not lost and not returned:
        return DecisionTaken(
            f"restarted in place, on all {went_on} ranks",
            f"every rank was healthy and came back{groups}",
        )
    reasons = []
    if returned:
        reasons.append(f"new processes have taken the places of {ranks_named(returned)}")
    if lost:
        reasons.append(f"{ranks_named(lost)} cannot come back, and the others are healthy")
        of = f"on {went_on} of {incident.world_size_before} ranks"
    else:
        of = f"on {went_on} ranks, {ranks_named(returned)} in a new process"
    return DecisionTaken(f"restarted in place, {of}", "; ".join(reasons) + groups)


def _of_groups(groups: Sequence[GroupRecord]) -> str:
    """How they have come to their members; those that lost nobody in one clause.

    That a script made one anew for which it asked no other way goes without saying."""
    said = [_of_group(group) for group in groups if group.rung != "kept" and not _is_scripts(group)]
    if kept := sum(group.rung == "kept" for group in groups):
        said.append(f"{kept} that lost nobody {'was' if kept == 1 else 'were'} kept")
    return "".join(f"; {each}" for each in said)


def _of_group(group: GroupRecord) -> str:
    """How ``group`` has come to its members."""
    if group.rung in ("reconfigured", "shrunk"):
        return f"the {group.group} group was {group.rung} in place"
    return f"the {group.group} group was made anew ({group.why})"


def _is_scripts(group: GroupRecord) -> bool:
    return group.rung == "anew" and group.why is None
