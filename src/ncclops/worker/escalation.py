"""Whether another restart in place can help, and what may if it cannot: new processes, or nothing.

Pure: from incidents, which all ranks get alike, to a decision. A rank that knows more (its memory,
its monitor process) decides by itself and leaves with ``RestartAbort``; the others find its
``Escalation`` in the incident.
"""

from __future__ import annotations

import builtins
import dataclasses
import json
import logging
from collections.abc import Collection, Sequence

from ncclops.classify import in_place
from ncclops.rank_lists import ranks_named
from ncclops.record.events import HANG
from ncclops.record.incident_record import same_words
from ncclops.restart.attribution import Fault, FaultKind
from ncclops.restart.exception import Escalation, GpuUnusable, RestartAbort
from ncclops.restart.incident import Incident
from ncclops.restart.raised import Raised
from ncclops.worker.meeting import AbsentRanksError

log = logging.getLogger("ncclops.restart")

# So often may one failure come without a new step in between. What the script raises for a reason
# of its own, it raises in new processes too; another failure may have to do with these.
_SCRIPT_S_LIMIT = 2
_LIMIT = 3
# And so often all failures together, however they differ: a restart in place changes nothing.
_FAILURES_LIMIT = 8
# Exceptions that a mistake in the script raises, and hardly anything else. Early in a run one is
# enough; later, hours of training are worth the attempts.
_MISTAKES = (
    NameError,
    AttributeError,
    TypeError,
    LookupError,
    ImportError,
    SyntaxError,
    NotImplementedError,
)
# Python's own classes only: libraries derive theirs for what may pass (a key that is not yet in a
# remote store).
_MISTAKE_NAMES = frozenset(
    name
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, _MISTAKES)
)
_LEFT_DEBUGGER = "BdbQuit"
_UNKNOWN = "unknown place"
# Whoever has found it.
_FOUND_HUNG = (FaultKind.SOFT_TIMEOUT, FaultKind.HUNG)
# Ranks that ended, or waited to end, apart from the others. All go on, so nothing else limits it.
_ENDS = (FaultKind.RETURNED_EARLY.value, FaultKind.COMPLETION_TIMEOUT.value)
# Ranks that wait without end, whatever for.
_HANGS = (*_FOUND_HUNG, FaultKind.NCCL_ERROR)
_EARLY_S = 300.0


def as_exception(escalation: Escalation) -> RestartAbort:
    """What takes this rank out; the others find ``escalation`` in the incident, and follow."""
    text = f"escalation to {escalation.to}: {escalation.reason}"
    return RestartAbort(text, escalation=escalation)


class SmallestWorld:
    """With how many ranks a job may train on. ``minimum`` as in ``profiles.model.Restarts``;
    ``at_start`` is how many trained at first."""

    def __init__(self, minimum: int, *, at_start: int) -> None:
        self._minimum = minimum or at_start
        self._at_start = at_start

    def judge(self, world_size: int) -> Escalation | None:
        """None as long as the ``world_size`` ranks that are left are enough."""
        if world_size >= self._minimum:
            return None
        reason = (
            f"{world_size} of {self._at_start} ranks are left, and [restarts] min_world_size of the"
            f" profile asks for {self._minimum}"
        )
        return Escalation("respawn", reason)


class Repetition:
    """Judges incidents; ``escalation`` is None as long as restarts in place may help.

    ``started`` is when this attempt began, in seconds since the epoch. ``respawned_for`` is the
    failure for which an earlier attempt has asked for new processes, as the variable
    ``RESPAWNED_FOR`` has it: once more, and they have not helped either.
    """

    def __init__(self, started: float, respawned_for: str | None) -> None:
        self._started = started
        self._respawned_for = _failure(respawned_for)
        self._ended_at = started  # the iteration before
        # Since the last new step: how often each failure came, and how many there were.
        self._times: list[tuple[tuple[str, str], int]] = []
        self._failures = 0
        self._furthest: int | None = None
        self._updates: int | None = None  # of the optimizer, in the iteration before
        self._at_first: tuple[str, str] | None = None  # how the processes' first run has failed
        self.escalation: Escalation | None = None

    def count(
        self,
        incident: Incident,
        furthest: int | None,
        *,
        updates: int | None = None,
        starting_up: bool | None = None,
        unfinished: Collection[int] | None = None,
    ) -> Escalation | None:
        """How an iteration ended, and ``escalation`` after it.

        ``furthest`` is the highest step that this one, or any, has reached here. Where that is not
        known (None), ``updates`` of the optimizer in this one may show it. They begin anew with
        each start, wherever its checkpoint is: so who has run for long is taken to have come
        further, but not for ever, and neither after as many updates as before nor with a wait at
        the end.
        ``starting_up``: a process group of this rank had not completed a collective yet; None
        where that is not known. ``unfinished``: the ranks that had not run the script to its end,
        if all that would run it now had: they do not, and whether the whole job starts once more is
        the agent's decision.
        """
        try:
            found = self._judge(incident, furthest, updates, starting_up, unfinished)
        except Exception as error:
            log.exception("whether a restart in place can help is not known")
            why = f"whether a restart in place can help is not known ({type(error).__name__})"
            found = Escalation("respawn", f"{incident.summary}: {why}", _failure_of(incident))
        self.escalation = _with_hung(found, incident)
        return self.escalation

    def _judge(
        self,
        incident: Incident,
        furthest: int | None,
        updates: int | None,
        starting_up: bool | None,
        unfinished: Collection[int] | None,
    ) -> Escalation | None:
        this = _failure_of(incident)
        if incident.iteration == 0:
            self._at_first = this
        asked = (
            incident.escalation
            or _corrupted(incident)
            or _final(incident)
            or self._mistake(incident)
            or self._lost_while_waiting(incident)
            or _alone(unfinished)
        )
        if asked is not None or this is None:
            return asked
        self._note_progress(incident, furthest, updates)
        return self._decide(incident, this, starting_up)

    def _note_progress(self, incident: Incident, furthest: int | None, updates: int | None) -> None:
        lasted_s, self._ended_at = incident.at - self._ended_at, incident.at
        trained = updates is None or (updates != self._updates and not _waited(incident))
        self._updates = updates
        if furthest is None and lasted_s >= _EARLY_S and trained:
            self._times.clear()
        furthest = updates if furthest is None else furthest
        if furthest is not None and (self._furthest is None or furthest > self._furthest):
            self._times.clear()
            self._failures, self._furthest = 0, furthest

    def _decide(
        self, incident: Incident, this: tuple[str, str], starting_up: bool | None
    ) -> Escalation | None:
        if (again := self._again(this)) is not None:
            return again
        what = f"{this[0]} ({this[1]})"
        failed_start = _is_startup_failure(incident) and (
            self._is_early(incident) if starting_up is None else starting_up
        )
        if failed_start and incident.iteration == 0:
            return Escalation("respawn", f"{what}: a failure to start", this, failed_start=True)
        times = self._add(this)
        if times >= _SCRIPT_S_LIMIT and _is_script_s(incident):
            return self._script_s(f"{what}: {_so_often(times)}", this)
        if times >= _LIMIT:
            return Escalation(
                "respawn", f"{what}: {_so_often(times)}", this, failed_start=failed_start
            )
        if self._failures >= _FAILURES_LIMIT:
            reason = f"{self._failures} failures without a new step, the last of them {what}"
            return Escalation("respawn", reason, this, failed_start=failed_start)
        return None

    def _is_early(self, incident: Incident) -> bool:
        return incident.at - self._started < _EARLY_S

    def _mistake(self, incident: Incident) -> Escalation | None:
        """An exception that early in a run shows a mistake in the script; or a person's wish."""
        if incident.raised is None:
            return None
        if incident.raised.name == _LEFT_DEBUGGER:
            return Escalation("stop", f"rank {incident.first_faulty_rank}: the debugger was left")
        if incident.raised.name not in _MISTAKE_NAMES:
            return None
        if not self._is_early(incident):
            return None
        what, where = this = str(incident.exception), _place(incident.raised)
        return self._script_s(f"{what} ({where}): a mistake in the script", this)

    def _script_s(self, reason: str, this: tuple[str, str]) -> Escalation:
        """The script is to be changed, unless its first run in these processes did not fail so:
        then the reason may be what that run has left in them, or in a library."""
        if _is_same(this, self._at_first) or self._respawned_for is not None:
            return Escalation("stop", reason, this)
        return Escalation("respawn", f"{reason}, but not in the first run of these processes", this)

    def _lost_while_waiting(self, incident: Incident) -> Escalation | None:
        """Ranks that waited for others where no abort frees them had to be ended: mostly in NCCL,
        for a communicator that did not come up.

        Nothing is wrong with them: new processes bring them back, where a restart in place would
        go on without them.
        """
        lost = {
            fault.initial_rank: fault.timeout.waits_in
            for fault in incident.faults
            if fault.was_blocked_by_peer
            and fault.timeout is not None
            and fault.initial_rank not in incident.ranks_returned
        }
        if not lost:
            return None
        library = "Gloo" if set(lost.values()) == {"Gloo"} else "NCCL"
        why = incident.first_faulty_rank, incident.detail or incident.summary
        asked, this = waited_in_vain(sorted(lost), library, why), _failure_of(incident)
        is_start = incident.cause in _HANGS or _is_startup_failure(incident)
        if asked.passing or not is_start:
            return self._found_ranks_waiting(incident, asked)
        return self._again(this) or dataclasses.replace(asked, failure=this)

    def _found_ranks_waiting(self, incident: Incident, asked: Escalation) -> Escalation:
        """``asked`` for another reason than a failure to start; again and again, but not for what
        the script raises of itself on the same rank."""
        asked = dataclasses.replace(asked, failed_start=False, passing=True)
        if not _is_script_s(incident):
            return asked
        what, where = str(incident.exception), _place(incident.raised)
        this = what, f"{where}, rank {incident.first_faulty_rank}"
        return self._again(this) or dataclasses.replace(asked, failure=this)

    def _again(self, this: tuple[str, str] | None) -> Escalation | None:
        """None unless the present processes were started for the same failure."""
        if this is None or not _is_same(this, self._respawned_for):
            return None
        return Escalation("stop", f"{this[0]} ({this[1]}): again in new processes", this)

    def _add(self, this: tuple[str, str]) -> int:
        """How often ``this`` has come by now without a new step."""
        self._failures += 1
        earlier = [times for failure, times in self._times if _is_same(this, failure)]
        self._times = [each for each in self._times if not _is_same(this, each[0])]
        self._times.append((this, sum(earlier) + 1))
        return self._times[-1][1]


def _with_hung(asked: Escalation | None, incident: Incident) -> Escalation | None:
    if asked is None or asked.failure is None or asked.failure[0] != HANG or asked.hung is not None:
        return asked
    return dataclasses.replace(asked, hung=incident.first_faulty_rank)


def _so_often(times: int) -> str:
    return f"{times} times at the same place without a new step"


def _failure(text: str | None) -> tuple[str, str] | None:
    if not text:
        return None
    what, where = json.loads(text)
    return str(what), str(where)


def _corrupted(incident: Incident) -> Escalation | None:
    devices = {fault.initial_rank: fault.device for fault in incident.faults if fault.device}
    unusable = {
        fault.initial_rank
        for fault in incident.faults
        if fault.raised is not None and fault.raised.is_a(GpuUnusable)
    }
    for fault in incident.faults:
        what = in_place.corrupted_context(f"{fault.summary}\n{fault.traceback or ''}")
        rank = fault.initial_rank
        # A rank with a broken GPU leaves, and the others go on: new processes would meet it again.
        if what is not None and not in_place.is_hardware(what) and rank not in unusable:
            where = f", on {devices[rank]}" if rank in devices else ""
            reason = f"the CUDA context of rank {rank} is corrupted: {what}{where}"
            return Escalation("respawn", reason, (f"rank {rank}", what))
    return None


def _final(incident: Incident) -> Escalation | None:
    """An error of which the signatures say that it comes back with every start."""
    for fault in incident.faults:
        if not fault.is_exception or not _may_be_cause(fault, incident):
            continue
        found = in_place.judge(fault.traceback or fault.summary)
        if found.is_final:
            what = f"rank {fault.initial_rank}: {fault.summary}"
            reason = f"{what}: {found.class_}, which no new start changes: {found.summary}"
            return Escalation("stop", reason, (fault.summary, _place(fault.raised)))
    return None


def _may_be_cause(fault: Fault, incident: Incident) -> bool:
    """Whether ``fault`` is not the consequence of another rank's; where all are, the first is."""
    return not fault.is_symptom or fault.initial_rank == incident.first_faulty_rank


def _waited(incident: Incident) -> bool:
    """Whether the iteration ended with a wait, which may be most of its time."""
    return incident.cause in (*_HANGS, *_ENDS)


def _is_script_s(incident: Incident) -> bool:
    """Whether an exception of the script's own ended the iteration, or one of its ranks was not
    where the others waited for it, or had ended before them."""
    if incident.cause == FaultKind.RETURNED_EARLY.value:
        return True
    if incident.cause != FaultKind.EXCEPTION.value or incident.exception is None:
        return False
    if _lacked_ranks(incident):
        return True
    if incident.raised is not None and "DistError" in incident.raised.bases:
        return False
    return in_place.judge(incident.traceback or incident.exception).is_script_s


def _lacked_ranks(incident: Incident) -> bool:
    return incident.raised is not None and incident.raised.name == AbsentRanksError.__name__


def waited_in_vain(
    ranks: Sequence[int], library: str, cause: tuple[int, str] | None = None
) -> Escalation:
    """``ranks`` waited in ``library`` for what no abort ends.

    ``cause`` is the rank that they waited for, as a rule, and what happened there; None: not known.
    """
    waited = f"{ranks_named(ranks)} waited in {library} for"
    ended = "and had to be ended"
    if cause is not None and cause[0] not in ranks:
        ended += f" after rank {cause[0]}: {cause[1]}"
    if library == "Gloo":
        return Escalation("respawn", f"{waited} ranks that were gone, {ended}", passing=True)
    return Escalation(
        "respawn",
        f"{waited} a communicator that did not come up, {ended}",
        failed_start=True,
    )


def is_replaceable(library: str, cause: Fault | None) -> bool:
    """Whether a new process is enough in the place of a rank that waited in ``library``.

    One that waited in Gloo has nothing of the others' failure. One that waited in NCCL has not
    either where another rank has raised an exception of its own before it came to the communicator,
    and is still there: it judges whether that may be tried again.
    """
    if library == "Gloo":
        return True
    if cause is None or cause.kind is not FaultKind.EXCEPTION or cause.gone or cause.is_symptom:
        return False
    return not in_place.is_failed_start(cause.report)


def _is_same(this: tuple[str, str], last: tuple[str, str] | None) -> bool:
    """Whether two failures are one; where a place is unknown, by the exception alone."""
    if last is None or not same_words(this[0], last[0]):
        return False
    return this[1] == last[1] or _UNKNOWN in (this[1], last[1])


def _is_startup_failure(incident: Incident) -> bool:
    return in_place.is_failed_start(f"{incident.exception} {incident.traceback}")


def _alone(unfinished: Collection[int] | None) -> Escalation | None:
    if not unfinished:
        return None
    return Escalation("respawn", f"all ranks but {ranks_named(unfinished)} had finished")


def _failure_of(incident: Incident) -> tuple[str, str] | None:
    """What happened and where: an exception's line, or the rank of anything else.

    None for what ends by itself, such as ranks that are lost one by one.
    """
    if incident.exception is not None:
        what = str(incident.exception)
        # Where absent ranks were is not the same each time.
        return what.partition(": rank")[0] if _lacked_ranks(incident) else what, _place(
            incident.raised
        )
    rank = f"rank {incident.first_faulty_rank}"
    if incident.cause in _FOUND_HUNG:
        return HANG, rank
    if incident.cause in _ENDS:
        return incident.summary, rank
    if incident.cause == FaultKind.NCCL_ERROR.value:
        return incident.cause, rank
    return None


def _place(raised: Raised | None) -> str:
    if raised is None or raised.file is None:
        return _UNKNOWN
    function = f", in {raised.function}" if raised.function else ""
    return f"{raised.file}:{raised.line}{function}"
