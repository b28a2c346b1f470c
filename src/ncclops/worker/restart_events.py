"""Incidents of the restart core as events of the run."""

from __future__ import annotations

from ncclops.receipts import recorder
from ncclops.record import worker_record
from ncclops.record.events import FaultEvent, RegroupedEvent, RestartEvent
from ncclops.record.incident_record import same_words
from ncclops.restart.attribution import FaultKind
from ncclops.restart.incident import Incident
from ncclops.restart.regroup import Regrouped
from ncclops.stacks.ownership import user_frame
from ncclops.stacks.parsing import last_traceback
from ncclops.worker import no_restart
from ncclops.worker.timeout_phases import TimeoutPhases

# After these the rank at fault is not there any more.
_SILENT = (FaultKind.DIED.value, FaultKind.LOST.value)


def report(incident: Incident, instead: str | None = None) -> None:
    """Each rank reports its own fault; one rank the restart, and the faults of dead ranks.

    ``instead`` is what follows the restart where that does not start the script again.
    """
    recorder.current().flush()  # the steps before the fault are on record before the fault is
    culprit, speaks_for_all = incident.first_faulty_rank, incident.speaks_for_all
    if _leaves_as_told(incident):
        pass  # no rank is at fault for that
    elif culprit == incident.initial_rank:
        worker_record.report(FaultEvent(cause=incident.summary, kind=incident.cause))
    elif speaks_for_all and incident.cause in _SILENT:
        worker_record.report(FaultEvent(rank=culprit, cause=incident.summary, kind=incident.cause))
    if speaks_for_all:
        worker_record.report(
            RestartEvent(
                iteration=incident.iteration + 1,
                cause=incident.summary,
                faulty_ranks=list(incident.faulty_ranks),
                ranks_lost=list(incident.ranks_lost),
                ranks_returned=list(incident.ranks_returned),
                why_ended={
                    str(fault.initial_rank): fault.detail or fault.summary
                    for fault in incident.faults
                    if fault.gone and fault.timeout is not None
                },
                world_size=incident.world_size,
                phases_ms=dict(incident.phases_ms),
                place=_place(incident),
                alike=_alike(incident),
                instead=instead,
            )
        )


def report_regrouped(regrouped: Regrouped) -> None:
    """Report how a group has come to its members. One rank does."""
    worker_record.report(
        RegroupedEvent(
            iteration=regrouped.iteration,
            group=regrouped.group,
            rung=regrouped.rung.value,
            why=regrouped.why,
            world_size=regrouped.world_size,
            ms=round(regrouped.ms, 3),
        )
    )


def _leaves_as_told(incident: Incident) -> bool:
    """Whether it began with this rank, which leaves because the attempt is ending."""
    told = no_restart.escalation()
    first = next(iter(incident.faults), None)
    return told is not None and first is not None and first.escalation == told


def _place(incident: Incident) -> str | None:
    """The innermost line of the script's in the traceback of what was raised."""
    if incident.exception is None:
        return None
    executed = last_traceback(incident.traceback or "")
    mine = user_frame(frame for frame, _ in reversed(executed))
    return None if mine is None else f"{mine.file}:{mine.line}"


def _alike(incident: Incident) -> int:
    """How many ranks besides the first raised the same."""
    raised = [fault for fault in incident.faults if fault.is_exception]
    others = [fault for fault in raised if fault.initial_rank != incident.first_faulty_rank]
    return sum(same_words(fault.summary, incident.summary) for fault in others)


def begin_next(incident: Incident, phases: TimeoutPhases | None) -> None:
    """The iteration after ``incident`` begins on this rank, under a wrapper of the script's."""
    if incident.rank is None:
        return
    recorder.current().begin_iteration(incident.iteration + 1)
    if phases is not None:
        phases.begin_iteration()
