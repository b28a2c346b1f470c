"""Whether another restart in place can help, and what may if it cannot: new processes, or nothing.

Pure: from incidents, which all ranks get alike, to a decision. A rank that knows more (its memory,
its monitor process) decides by itself and leaves with ``RestartAbort``; the others find its
``Escalation`` in the incident.
"""

from __future__ import annotations

import builtins
import json

from ncclops.rank_lists import ranks_named
from ncclops.restart.attribution import FaultKind, Raised
from ncclops.restart.exception import Escalation, RestartAbort
from ncclops.restart.incident import Incident

# The same exception at the same place so often without a new step: a restart in place changes
# nothing about it.
_SAME_FAILURE_LIMIT = 3
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
_UNKNOWN = "unknown place"
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
        self._last: tuple[str, str] | None = None
        self._last_step: int | None = None
        self._times = 0
        self.escalation: Escalation | None = None

    def count(self, incident: Incident, highest_step: int | None) -> None:
        """How an iteration ended; ``highest_step`` is the highest that any has reached here."""
        asked = incident.escalation or _corrupted(incident) or _lost_while_connecting(incident)
        this = _failure_of(incident)
        if asked is not None or this is None:
            self._last, self.escalation = None, asked
            return
        self._times = self._times + 1 if self._is_again(this, highest_step) else 1
        self._last, self._last_step = this, highest_step
        self.escalation = self._decide(incident, this)

    def _is_again(self, this: tuple[str, str], step: int | None) -> bool:
        return _is_same(this, self._last) and step == self._last_step

    def _decide(self, incident: Incident, this: tuple[str, str]) -> Escalation | None:
        what = f"{this[0]} ({this[1]})"
        early = incident.at - self._started < _EARLY_S
        if early and incident.raised is not None and incident.raised.name in _MISTAKE_NAMES:
            return Escalation("stop", f"{what}: a mistake in the script", this)
        if early and incident.iteration == 0 and _is_startup_failure(incident):
            return Escalation("respawn", f"{what}: a failure to start", this, failed_start=True)
        if self._respawned_for is not None and _is_same(this, self._respawned_for):
            return Escalation("stop", f"{what}: again in new processes", this)
        if self._times >= _SAME_FAILURE_LIMIT:
            times = f"{self._times} times in a row at the same place without a new step"
            return Escalation("respawn", f"{what}: {times}", this)
        return None


def _failure(text: str | None) -> tuple[str, str] | None:
    if not text:
        return None
    what, where = json.loads(text)
    return str(what), str(where)


def _corrupted(incident: Incident) -> Escalation | None:
    # Not before there is an incident: most workers never have one.
    from ncclops.classify import in_place

    for fault in incident.faults:
        what = in_place.corrupted_context(f"{fault.summary}\n{fault.traceback or ''}")
        if what is not None:
            rank = fault.initial_rank
            reason = f"the CUDA context of rank {rank} is corrupted: {what}"
            return Escalation("respawn", reason, (f"rank {rank}", what))
    return None


def _lost_while_connecting(incident: Incident) -> Escalation | None:
    """A communicator did not come up, and ranks that waited in NCCL for that had to be ended.

    Nothing is wrong with them: new processes bring them back, where a restart in place would go on
    without them.
    """
    lost = sorted(fault.initial_rank for fault in incident.faults if fault.was_blocked_by_peer)
    if not lost:
        return None
    reason = (
        f"{ranks_named(lost)} waited in NCCL for a communicator that did not come up, and had to be"
        " ended"
    )
    return Escalation("respawn", reason, _failure_of(incident), failed_start=True)


def _is_same(this: tuple[str, str], last: tuple[str, str] | None) -> bool:
    """Whether two failures are one; where a place is unknown, by the exception alone."""
    if last is None or this[0] != last[0]:
        return False
    return this[1] == last[1] or _UNKNOWN in (this[1], last[1])


def _is_startup_failure(incident: Incident) -> bool:
    from ncclops.classify import in_place

    return in_place.is_failed_start(f"{incident.exception} {incident.traceback}")


def _failure_of(incident: Incident) -> tuple[str, str] | None:
    """What happened and where: an exception's line, or the rank of a hang or an error of NCCL. None
    for what ends by itself, such as ranks that are lost one by one.
    """
    if incident.exception is not None:
        return str(incident.exception), _place(incident.raised)
    if incident.cause in (FaultKind.SOFT_TIMEOUT.value, FaultKind.NCCL_ERROR.value):
        return incident.cause, f"rank {incident.first_faulty_rank}"
    return None


def _place(raised: Raised | None) -> str:
    if raised is None or raised.file is None:
        return _UNKNOWN
    function = f", in {raised.function}" if raised.function else ""
    return f"{raised.file}:{raised.line}{function}"
