"""What happened to a run that failed, told once, from its incident, its class, its first failure.

``tell_attempt`` is about one attempt, on the node where it is called; ``complete`` adds what is
known when the run has ended. ``story_text`` shows it, everywhere in the same words.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from shlex import quote
from typing import Any

import msgspec

from ncclops.classify.model import BENIGN, EXITS, NO_FAILURE_SEEN
from ncclops.classify.wording import signal_hint
from ncclops.diagnose import advice, escalated, own_code
from ncclops.diagnose.incident_events import CLOCKS_DIFFER_S, advice_on
from ncclops.diagnose.incident_report import IncidentReport, report_incident
from ncclops.diagnose.places import describe_operation
from ncclops.errors import NcclopsError
from ncclops.process_ends import describe_failure
from ncclops.rank_lists import ranks_named
from ncclops.record import event_log
from ncclops.record.error_file import read_error
from ncclops.record.event_values import GpuFault
from ncclops.record.events import (
    EscalationEvent,
    Event,
    RegroupedEvent,
    RestartEvent,
    RetryEvent,
    ScriptExitEvent,
    WorkerExitedEvent,
    WorkerStartedEvent,
)
from ncclops.record.incident_record import ELSEWHERE, IncidentRecord, same_words
from ncclops.record.paths import RunPaths, numbered
from ncclops.record.story_record import CodeLine, Story, TriedStep
from ncclops.record.verdict_record import FirstFailure
from ncclops.stacks.frame import Frame

# Classes of an output that does not show how the job failed.
_SHOW_NOTHING = ("unknown", NO_FAILURE_SEEN, BENIGN)
_RETURNED_EARLY = "returned-early"  # the cause of such an incident
_PROOF_LINES = 3
_OUTPUT_LINES = 8
_MOST_CHARS = 200
# What we write into a rank's log ourselves, which the story says in its own words.
_OUR_LINES = ("ncclops: ", "[rank ")


def tell_attempt(
    run: Path,
    failure: FirstFailure | None,
    found: Mapping[str, Any] | None,
    *,
    node: str,
    attempt: int,
    since: float,
) -> Story | None:
    """As ``tell``, with the incident that the attempt ended in, if it did.

    ``since`` is when the attempt began, in seconds since the epoch.
    """
    paths = RunPaths(run)
    report = None
    if numbered(paths.incidents):
        with suppress(NcclopsError, OSError):  # damaged, or not written to the end
            report = report_incident(run, None)
    if report is not None:
        earlier = report.record.at < since - CLOCKS_DIFFER_S
        # Of a fault of all nodes, one has the record; the others have that their ranks left.
        left = escalated.is_leaving(report.record)
        if earlier or left or went_on(report, event_log.read(paths.events)):
            report = None
        if left and failure is not None and failure.message is None:
            told = tell(run, None, failure, found, node=node, attempt=attempt)
            return None if told is None else msgspec.structs.replace(told, waited=True)
    return tell(run, report, failure, found, node=node, attempt=attempt)


def tell(
    run: Path,
    report: IncidentReport | None,
    failure: FirstFailure | None,
    found: Mapping[str, Any] | None,
    *,
    node: str,
    attempt: int,
) -> Story | None:
    """How the attempt with this number failed here; None where nothing shows that it did.

    ``report`` is of the incident in which it ended, ``failure`` of the worker that ended first,
    ``found`` the classifier's verdict with its evidence, ``node`` the name of this one.
    """
    paths = RunPaths(run)
    if report is not None:
        if report.record.cause == ELSEWHERE:
            if report.culprit.waited:
                return None  # as all ranks here did
            found = None
        told = _of_incident(report)
        if report.record.cause == _RETURNED_EARLY:
            told = _with_exit(told, _exits(event_log.read(paths.events)).get(told.rank))
    elif failure is not None:
        told = _of_failure(failure, paths, attempt, None if found is None else found["class"])
    elif found is not None:
        told = Story(what=str(found["summary"]), rank=found["rank"])
    else:
        return None
    if found is not None:
        told = msgspec.structs.replace(
            told,
            class_=found["class"],
            confidence=found["confidence"],
            summary=found["summary"],
            proof=list(_proof(found, [told.what, *(line.text for line in told.code)])),
            next_steps=told.next_steps or list(found["remedy"]),
        )
        if failure is not None and report is None and found["class"] == advice.PEER_EXIT:
            told = _of_who_ended_early(told, event_log.read(paths.events), node)
    log = None if told.rank is None else paths.rank(told.rank).stderr_log
    if log is not None and log.exists():
        told = msgspec.structs.replace(told, log=str(log))
    output = [] if told.code else _output(failure, told)
    command = _next_command(told, run)
    return msgspec.structs.replace(told, output=output, next_command=command, log_host=node)


def _of_who_ended_early(told: Story, events: Iterable[Event], node: str) -> Story:
    """``told`` of a rank that missed a peer, about the one that had ended well before, if one has.

    Where several had, it is not known for which one it waited.
    """
    seen = list(events)
    early = _ended_well_before(seen)
    if not early:
        return told
    who = ranks_named(early)
    on = f" on {node}" if node and len(early) == 1 else ""
    needed = "it" if len(early) == 1 else "them"
    blamed = msgspec.structs.replace(
        told,
        what=f"{who}{on} had ended with exit code 0 while others still needed {needed}:"
        f" {told.what}",
        next_steps=[advice.ENDED_EARLY.format(who=who), *told.next_steps],
    )
    if len(early) > 1:
        return blamed
    (rank,) = early
    blamed = msgspec.structs.replace(blamed, rank=rank, host=node or None, code=[])
    return _with_exit(blamed, _exits(seen).get(rank))


def _with_exit(told: Story, at: Frame | None) -> Story:
    """``told`` of a rank that was over too early, with the line that ended the script."""
    return told if at is None else msgspec.structs.replace(told, code=own_code.of_stack([at]))


def _exits(events: Iterable[Event]) -> dict[int | None, Frame]:
    """Where the script has ended itself last, by rank, in the processes that were last."""
    found = dict[int | None, Frame]()
    for event in events:
        match event:
            case WorkerStartedEvent(rank=rank):
                found.pop(rank, None)
            case ScriptExitEvent(rank=rank, file=file, line=line, function=function):
                found[rank] = Frame(file, line, function)
    return found


def _ended_well_before(events: Iterable[Event]) -> list[int]:
    """The ranks of this node that had ended with 0 when the first of the last attempt failed: the
    others may have waited for them."""
    ranks: list[int] = []
    failed = False
    for event in events:
        match event:
            case WorkerStartedEvent():
                ranks, failed = [], False
            case WorkerExitedEvent(rank=int(rank), exit_code=0) if not failed:
                ranks.append(rank)
            case WorkerExitedEvent():
                failed = True
    return sorted(ranks) if failed else []


def complete(
    told: Story,
    events: Sequence[Event],
    gpu_faults: Sequence[GpuFault],
    *,
    node: str,
    ended: str,
    why: str,
) -> Story:
    """``told``, maybe by another node than this, with what was tried and why it stopped.

    ``ended`` is how the last attempt ended, ``why`` the retry policy's reason; each may be empty.
    """
    last = next((each for each in reversed(events) if isinstance(each, EscalationEvent)), None)
    is_said = ended.startswith(f"rank {told.rank} ") or any(
        line.endswith(ended.removeprefix("hang: ")) for line in told.proof
    )
    reasons = [why]
    if last is not None and last.to == "stop":
        reasons = _why_no_more(told.class_, last, why)
    broken = [f"rank {fault.rank}: {fault}" for fault in gpu_faults if str(fault) not in told.what]
    if ended and told.class_ in _SHOW_NOTHING and told.what == told.summary:
        # The output is all there is, and shows nothing: no class of failure, no advice on a log.
        told = Story(
            what=ended,
            next_steps=[advice.OUTPUT_SHOWS_NOTHING],
            next_command=told.next_command,
        )
    return msgspec.structs.replace(
        told,
        what="; ".join([*broken, told.what]),
        next_steps=list(dict.fromkeys([*advice_on(gpu_faults), *told.next_steps])),
        log_host=None if told.log_host == node else told.log_host,
        tried=list(tried(events)),
        # After an escalation all ranks leave, and the one that does so first is not to blame.
        ended="" if last is not None or is_said else ended,
        stopped="; ".join(filter(None, dict.fromkeys(reasons))),
    )


def tried(events: Sequence[Event]) -> Iterator[TriedStep]:
    """The restarts in place, escalations and new attempts of the run, in their order."""
    groups = _groups_after(events)
    for number, event in enumerate(events):
        match event:
            case RestartEvent(instead=None):
                left = [rank for rank in event.ranks_lost if rank not in event.ranks_returned]
                lost = f", without {ranks_named(left)}" if left else ""
                if event.ranks_returned:
                    lost += f", {ranks_named(event.ranks_returned)} in a new process"
                yield TriedStep(
                    at=event.ts,
                    kind="restart",
                    what=f"restart {event.iteration} in place{lost}{groups.get(number, '')}",
                    why=event.cause,
                    lost=left,
                )
            case EscalationEvent():
                to = "new processes" if event.to == "respawn" else "the end of the job"
                what = f"no further restart in place, but {to}"
                yield TriedStep(at=event.ts, kind="escalation", what=what, why=event.reason)
            case RetryEvent():
                what = f"attempt {event.attempt} in new processes"
                yield TriedStep(at=event.ts, kind="attempt", what=what, why=event.reason)


def _groups_after(events: Sequence[Event]) -> dict[int, str]:
    """By the place of each restart: what became of the default group of a script that keeps going,
    where that is on record."""
    found: dict[int, str] = {}
    until_next: dict[int | None, str] = {}
    for number in range(len(events) - 1, -1, -1):
        match events[number]:
            case RegroupedEvent(group="default", rung=rung, iteration=iteration):
                became = "made anew" if rung == "anew" else rung
                until_next[iteration] = f", its group {became}"
            case RestartEvent(iteration=iteration):
                found[number] = until_next.get(iteration, "")
                until_next = {}
            case RetryEvent():
                until_next = {}
    return found


def went_on(report: IncidentReport, events: Sequence[Event]) -> bool:
    """Whether the job was started again, in place or in new processes, after the incident."""
    after = report.record.at - CLOCKS_DIFFER_S
    # Where ranks left in a later incident, the restart in place after this one did not help.
    again = RetryEvent if report.left_in is not None else (RestartEvent, RetryEvent)
    return any(isinstance(each, again) and each.ts > after for each in events)


def _alike(record: IncidentRecord) -> str:
    """The ranks that raised what the culprit did, as a number: there may be thousands."""
    others = (fault for fault in record.faults if fault.initial_rank != record.first_faulty_rank)
    said = record.exception
    count = 0 if said is None else sum(same_words(fault.summary, said) for fault in others)
    return f"; {count} more rank{'s' * (count != 1)} raised the same" if count else ""


def _of_incident(report: IncidentReport) -> Story:
    culprit, record = report.culprit, report.record
    view = next((view for view in report.views if view.rank == culprit.rank), None)
    code: list[CodeLine] = []
    if culprit.rank == record.first_faulty_rank and record.traceback:
        code = own_code.of_traceback(record.traceback)
    if not code and view is not None:
        code = own_code.of_stack(view.frames)
    if not code and culprit.frame is not None:
        code = own_code.of_stack((culprit.frame, *culprit.callers))
    last = None if view is None else view.last
    # Where the culprit is absent, those that raised are the ranks that waited for it.
    raised = culprit.rank == record.first_faulty_rank
    return Story(
        what=report.sentence + (_alike(record) if raised else ""),
        rank=culprit.rank,
        host=culprit.host,
        code=code,
        operation=None if last is None else describe_operation(last),
        incident=report.number,
        waited=culprit.waited,
        next_steps=list(report.advice),
    )


def _of_failure(failure: FirstFailure, paths: RunPaths, attempt: int, class_: str | None) -> Story:
    error = read_error(paths.rank(failure.rank).error(attempt))
    code = own_code.of_traceback((error and error.traceback) or "\n".join(failure.tail))
    host = f" on {failure.host}" if failure.host else ""
    what = f"rank {failure.rank}{host} {describe_failure(failure.exit_code, failure.signal)}"
    if failure.message:
        what += f": {failure.message}"
    elif class_ != "preempted" and (hint := signal_hint(failure.signal)):
        what += f" ({hint})"
    at = f" at {place(code[-1])}" if code else ""
    return Story(what=what + at, rank=failure.rank, host=failure.host or None, code=code)


def place(line: CodeLine) -> str:
    """Such as ``/home/me/train.py:12 in step``; a file that does not compile has no function."""
    return f"{line.file}:{line.line}" + (f" in {line.function}" if line.function else "")


def _next_command(told: Story, run: Path) -> str:
    name = quote(str(run))
    if told.incident is not None:
        return f"ncclops incident {name} {told.incident}"
    return f"ncclops {'bundle' if told.class_ in (None, *_SHOW_NOTHING) else 'classify'} {name}"


def _proof(found: Mapping[str, Any], told: Sequence[str]) -> Iterator[str]:
    """The lines that prove the class, each text once, without those that ``told`` quotes."""
    causes = [line for line in found.get("evidence", ()) if line["role"] == "cause"]
    seen = list(told)
    for line in causes[:_PROOF_LINES]:
        if line["file"] == EXITS:
            continue
        text = own_code.without_rank(line["text"]).strip()[:_MOST_CHARS]
        if not any(text in each for each in seen):
            seen.append(text)
            # A fact that was given as a value has the name of its source as file.
            is_file = Path(line["file"]).is_absolute()
            where = f"{line['file']}:{line['line']}" if is_file else line["file"]
            yield f"{where}: {text}"


def _output(failure: FirstFailure | None, told: Story) -> list[str]:
    if failure is None or failure.rank != told.rank:
        return []
    lines = (own_code.without_rank(line).rstrip() for line in failure.tail)
    theirs = [line for line in lines if line and not line.startswith(_OUR_LINES)]
    return [line[:_MOST_CHARS] for line in theirs if line not in told.what][-_OUTPUT_LINES:]


def _why_no_more(class_: str | None, asked: EscalationEvent, why: str) -> list[str]:
    """Why the workers have ``asked`` for the end, and ``why`` the policy agrees, each thing once:
    it may be in their words, and it speaks of the failure's ``class_`` as they may."""
    own = _own_words(asked)
    if why == asked.reason:
        return [own]
    return [why] if own.startswith(f"{class_}, ") and why.startswith(f"{class_} ") else [own, why]


def _own_words(escalation: EscalationEvent) -> str:
    """The reason without the failure that it repeats."""
    if not isinstance(escalation.failure, tuple):
        return escalation.reason
    what, where = escalation.failure
    for failure in (f"{what} ({where}): ", f"{what}: "):
        if failure in escalation.reason:
            return escalation.reason.partition(failure)[2]
    return escalation.reason
