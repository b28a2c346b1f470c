"""What workers report, taken over into the team and the run's ``events.jsonl``."""

from __future__ import annotations

from msgspec.structs import replace

from ncclops.agent.team import Team
from ncclops.decision.retrying import Escalated
from ncclops.diagnose.story_text import shown
from ncclops.rank_lists import ranks_named
from ncclops.record.events import (
    RANK_LOST,
    BootstrappedEvent,
    EnteredEvent,
    EscalationEvent,
    Event,
    ExitingEvent,
    FaultEvent,
    FinishedEvent,
    GroupsAbortedEvent,
    GroupTimeoutEvent,
    OwnWrapperEvent,
    ReadyToEndEvent,
    RegroupedEvent,
    ResourceGrowthEvent,
    RestartEvent,
    ScriptExitEvent,
    ScriptFailedEvent,
    SlowExitEvent,
)
from ncclops.record.run_directory import RunDirectory

# What the record of the run takes over. Nothing else: scripts may write to the directory too.
# Warm-up is known from receipts and printed lines alike (``watching``).
_COPIED = (
    BootstrappedEvent,
    FaultEvent,
    RestartEvent,
    RegroupedEvent,
    EscalationEvent,
    GroupTimeoutEvent,
    ResourceGrowthEvent,
    OwnWrapperEvent,
    ScriptExitEvent,
    SlowExitEvent,
)


def _is_known(escalated: Escalated, before: Escalated | None) -> bool:
    """All ranks report it, and one event is enough, of one that knows the failure if any does."""
    return before is not None and (before.knows_failure or not escalated.knows_failure)


def _escalated(event: EscalationEvent) -> Escalated:
    return Escalated(
        to=event.to,
        reason=event.reason,
        failure=None if isinstance(event.failure, str) else event.failure,
        failed_start=event.failed_start,
        passing=event.passing,
        hung=event.hung,
    )


# As the restart core calls a fault that is an exception.
_RAISED = "exception"
# As the agent requests a restart for a hang.
_FOUND_HUNG = "hang: "


def restart_line(event: RestartEvent) -> str:
    """What the terminal shows of a restart in place: who failed, where, and who goes on."""
    who = ranks_named(event.faulty_ranks[:1])
    more = f" and {event.alike} more rank{'s' * (event.alike != 1)}" if event.alike else ""
    place = "" if event.place is None else f" ({shown(event.place)})"
    left = [rank for rank in event.ranks_lost if rank not in event.ranks_returned]
    lost = f" without {ranks_named(left)}" if left else ""
    if event.ranks_returned:
        lost += f", {ranks_named(event.ranks_returned)} in a new process"
    again = f"restart {event.iteration} in place{lost}"
    what = event.cause.removeprefix(f"{who}: ")
    if what.startswith(_FOUND_HUNG):
        return f"{who} hangs: {again}"  # the evidence was shown when it was found
    return f"{who}{more}: {what}{place}: {again}"


def slow_exit_line(rank: int, event: SlowExitEvent) -> str:
    """What the terminal shows of a process that does not end after its script."""
    waits = f"it {shown(event.waits_for)}"
    if event.ended:
        return (
            f"rank {rank}: nothing has happened for {event.after_s:g} s: its process ends; {waits}"
        )
    return (
        f"rank {rank}: its script ended {event.after_s:g} s ago, and its process goes on: {waits}"
    )


def forced_exit_line(team: Team, rank: int, after_s: float) -> str:
    """What the terminal shows of a process that is ended since all ranks have come to their end.

    Where the others had gone on without it, its death is explained by that: SIGKILL is no news.
    """
    if rank in team.lost and (why := team.lost_for.get(rank)):
        team.explained[rank] = why
        left = f"the others have gone on without it ({shown(why)}) and ended"
        return f"rank {rank}: {left}, and its process does not within {after_s:g} s: SIGKILL"
    return (
        f"rank {rank}: its script has ended, and its process does not within {after_s:g} s: SIGKILL"
    )


def take_over(run: RunDirectory, team: Team, rank: int, event: Event) -> None:
    """Act on what the worker of ``rank`` has reported, which may be about another rank."""
    if isinstance(event, EscalationEvent) and (
        team.ending or _is_known(_escalated(event), team.escalation)
    ):
        return  # once the attempt is ending, that is why ranks leave
    about = rank if event.rank is None else event.rank
    match event:
        case EnteredEvent():
            team.entered.add(about)
            team.has_returned(about)
        case FinishedEvent():  # on all ranks
            team.leaving.add(about)
            at_work = {worker.rank for worker in team.at_work()}
            team.finished |= at_work - team.lost | {about}
        case ExitingEvent():
            team.leaving.add(about)
            if about not in team.returning:  # too late: the others have finished without it
                team.finished.add(about)
        case ReadyToEndEvent():
            team.ready_to_end.add(about)
            team.release()
        case BootstrappedEvent():
            team.bootstrapped.add(about)
        case ScriptFailedEvent() if not team.ending:  # else its groups were aborted
            team.script_failures[about] = event
        case GroupsAbortedEvent():
            team.aborted.add(about)
        case FaultEvent():
            team.last_faulty = about
            team.lost_for[about] = event.cause.removeprefix(f"rank {about}: ")
            if event.kind == _RAISED:
                team.raised.add(about)
            else:
                team.raised.discard(about)
            if event.rank is None and event.kind == RANK_LOST:
                # It lives and says so itself: the others had gone on without it, and it ends.
                team.explained[about] = team.lost_for[about]
        case RestartEvent():
            team.lost = team.lost.union(event.ranks_lost).difference(event.ranks_returned)
            if team.last_faulty in event.ranks_returned:
                team.last_faulty = None  # its new process is at no fault
            why = event.why_ended
            team.why_ended |= {int(lost): why[lost] for lost in why if lost.isdecimal()}
        case OwnWrapperEvent() if team.own_wrapper is None or event.grows:
            team.own_wrapper = event
        case EscalationEvent():
            team.escalation = _escalated(event)
    if isinstance(event, _COPIED):
        run.add(replace(event, rank=about, node=""))
