"""What workers report, taken over into the team and the run's ``events.jsonl``."""

from __future__ import annotations

from msgspec.structs import replace

from ncclops.agent.team import Team
from ncclops.decision.retrying import Escalated
from ncclops.record.events import (
    BootstrappedEvent,
    EnteredEvent,
    EscalationEvent,
    Event,
    FaultEvent,
    GroupsAbortedEvent,
    GroupTimeoutEvent,
    OwnWrapperEvent,
    ReadyToEndEvent,
    ResourceGrowthEvent,
    RestartEvent,
)
from ncclops.record.run_directory import RunDirectory

# What the record of the run takes over. Nothing else: scripts may write to the directory too.
# Warm-up is known from receipts and printed lines alike (``watching``).
_COPIED = (
    BootstrappedEvent,
    FaultEvent,
    RestartEvent,
    EscalationEvent,
    GroupTimeoutEvent,
    ResourceGrowthEvent,
    OwnWrapperEvent,
)


def take_over(run: RunDirectory, team: Team, rank: int, event: Event) -> None:
    """Act on what the worker of ``rank`` has reported, which may be about another rank."""
    if isinstance(event, EscalationEvent) and team.escalation is not None:
        return  # all ranks report it; one event is enough
    about = rank if event.rank is None else event.rank
    match event:
        case EnteredEvent():
            team.entered.add(about)
        case ReadyToEndEvent():
            team.ready_to_end.add(about)
            team.release()
        case BootstrappedEvent():
            team.bootstrapped.add(about)
        case GroupsAbortedEvent():
            team.aborted.add(about)
        case FaultEvent():
            team.last_faulty = about
        case EscalationEvent():
            failure = None if isinstance(event.failure, str) else event.failure
            team.escalation = Escalated(
                to=event.to,
                reason=event.reason,
                failure=failure,
                failed_start=event.failed_start,
            )
    if isinstance(event, _COPIED):
        run.add(replace(event, rank=about, node=""))
