"""What went wrong on which rank, as values, and which of it was the cause.

Pure: nothing here waits, logs or communicates.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import time
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from ncclops.restart._instant import Instant
from ncclops.restart.exception import (
    CudaContextLost,
    Escalation,
    GpuUnusable,
    PeersAbsent,
    RestartAbort,
    RestartError,
)
from ncclops.restart.raised import (
    Raised,
    append_to_chain,
    described,
    is_due_to_peer,
    points_elsewhere,
    summarise,
    tells_of_lost_peer,
    waited_for_peer_s,
)


class FaultKind(enum.StrEnum):
    """How a rank failed; the value is what incident records and events say."""

    EXCEPTION = "exception"  # an Exception left the wrapped function, initialize or a check
    REQUESTED = "requested"  # the function raised RankShouldRestart itself
    LEFT = "left"  # a BaseException: the rank leaves, the others go on
    FINALIZE = "finalize"  # clean-up failed: the rank leaves
    HEALTH_CHECK = "health-check"  # unfit to restart: the rank leaves
    DISCARDED = "discarded"  # the assignment has no place for this rank
    DIED = "died"  # the process is gone: killed, crashed, or ended after the hard timeout
    LOST = "lost"  # neither the main process nor its monitor process can be reached
    SOFT_TIMEOUT = "soft-timeout"  # no progress
    NCCL_ERROR = "nccl-error"  # NCCL has reported an error of one of its communicators
    HUNG = "hung"  # found hung by an observer of all ranks, such as the launcher
    COMPLETION_TIMEOUT = "completion-timeout"  # this rank finished, and others did not in time
    RETURNED_EARLY = "returned-early"  # it left the function first, and its peers waited for it


# Kinds that as a rule follow from another rank's fault: when one rank hangs, all that wait for it
# run into their soft timeout too, and some of them earlier; when one dies, NCCL may tell others.
_SYMPTOMS = {FaultKind.SOFT_TIMEOUT, FaultKind.COMPLETION_TIMEOUT, FaultKind.NCCL_ERROR}

_NOTHING_RAISED = {
    FaultKind.DIED,
    FaultKind.LOST,
    FaultKind.SOFT_TIMEOUT,
    FaultKind.NCCL_ERROR,
    FaultKind.HUNG,
    FaultKind.RETURNED_EARLY,
}

# Enough for the frames that matter; the store is no place for megabytes of recursion.
_TRACEBACK_CHARS = 8000


@dataclasses.dataclass(frozen=True)
class ExceededTimeout:
    """Which timeout a silent rank has exceeded, and by which clock.

    ``limit`` is ``soft`` or ``hard``; the rank's monitor process ends it at the hard one, at
    ``abort-hang``: the abort of its groups did not return in time, and at ``abort``: it did, and
    has not freed the main thread, which waited in the library ``waits_in``.
    ``clock`` says what did not move: ``python`` (no Python thread could run), ``main-thread`` or
    ``ping``. Times are in seconds, as measured on the rank's host.
    """

    limit: Literal["soft", "hard", "abort", "abort-hang"]
    limit_s: float
    silent_s: float
    clock: Literal["python", "main-thread", "ping"]
    waits_in: Literal["NCCL", "Gloo"] | None = None


@dataclasses.dataclass(frozen=True)
class Fault:
    """One rank's fault.

    ``initial_rank`` is the rank at launch and ``rank`` its number in ``iteration`` (``None``
    where the reporter could not know it). ``at`` is wall time in seconds, by the reporter's
    clock, for people; ``instant`` is for measuring, and ``recorded_after_s`` what has been measured
    on the reporter's host: how long after it the fault was recorded (``None``: not known).
    ``gone`` faults take the rank out of the job; ``secondary`` ones occurred when
    this rank's groups were already being aborted because of another.

    ``summary`` is one line for people; decide on the fields instead. ``detail`` is the summary
    without the rank's number, where it begins with that. ``raised`` is the exception, ``timeout``
    what a silent rank has exceeded (of a rank that ``died``: ``None`` unless its monitor process
    ended it), ``escalation`` what a rank asks for that leaves with ``RestartAbort``, ``device`` the
    GPU of one that leaves with ``GpuUnusable`` or ``CudaContextLost``, and its host;
    ``absent_ranks`` are those that it waited for in vain (``PeersAbsent``).
    ``due_to_peer``: it is what a rank shows whose peer has gone or does not come. The exception, or
    one that it was raised from, is a connection's or a collective's; a silent rank waits in
    ``torch.distributed``, or has threads that run and another rank has recorded it.
    """

    kind: FaultKind
    initial_rank: int
    rank: int | None
    iteration: int
    at: float
    summary: str
    traceback: str | None = None
    gone: bool = False
    secondary: bool = False
    detail: str | None = None
    raised: Raised | None = None
    timeout: ExceededTimeout | None = None
    escalation: Escalation | None = None
    due_to_peer: bool = False
    instant: Instant | None = None
    recorded_after_s: float | None = None
    device: str | None = None
    absent_ranks: tuple[int, ...] = ()

    @property
    def stops_restarting(self) -> bool:
        """Whether the rank left by ``RestartAbort``: a decision, as a rule of all ranks alike."""
        return self.raised is not None and self.raised.is_a(RestartAbort)

    @property
    def is_exception(self) -> bool:
        """Whether it is something that was raised; ``traceback`` then says where.

        Else ``traceback`` has the stacks of a rank that was silent, where they could be taken.
        """
        return self.kind not in _NOTHING_RAISED

    @property
    def report(self) -> str:
        """Summary and traceback or stacks, for people."""
        if self.is_exception:
            return self.traceback or self.summary
        return f"{self.summary}\n{self.traceback}" if self.traceback else self.summary

    @property
    def is_symptom(self) -> bool:
        """Whether this fault as a rule is the consequence of one on another rank."""
        expected = self.kind in _SYMPTOMS or self.was_blocked_by_peer
        return self.secondary or expected or self.is_symptom_by_text

    @property
    def may_be_cause(self) -> bool:
        """Whether it is no symptom, or a rank was silent that did not wait for its peers."""
        is_silent = self.kind is FaultKind.SOFT_TIMEOUT and not self.secondary
        return not self.is_symptom or (is_silent and not self.lacks_a_peer)

    @property
    def was_blocked_by_peer(self) -> bool:
        """Whether the rank was ended because it waited, without end, for one that did not come."""
        return self.timeout is not None and self.timeout.limit == "abort"

    @property
    def is_symptom_by_text(self) -> bool:
        """Whether it is the exception of a rank whose peer has gone."""
        return self.kind is FaultKind.EXCEPTION and self.lacks_a_peer

    @property
    def lacks_a_peer(self) -> bool:
        """Whether all that it shows is that a peer has gone or does not come.

        So does an error of NCCL: a peer that destroys its groups after an exception closes its
        connections before anything else is known of it.
        """
        by_text = self.kind is FaultKind.EXCEPTION and tells_of_lost_peer(self.summary)
        return self.due_to_peer or by_text or self.kind is FaultKind.NCCL_ERROR

    @property
    def waited_s(self) -> float | None:
        """How long the rank had waited for a peer when it raised, where that is known."""
        return waited_for_peer_s(self.summary) if self.is_symptom_by_text else None

    def known_after_s(self, seen: Instant) -> float:
        """How long after it the fault was known at ``seen``, in seconds, and 0 at least.

        Of a fault on another host: without the time on the way, which no clock has measured.
        """
        elapsed_s = None if self.instant is None else self.instant.seconds_until(seen)
        return max(0.0, elapsed_s if elapsed_s is not None else self.recorded_after_s or 0.0)

    def being_recorded(self) -> Fault:
        """This fault, recorded now; by another process of its host, say, than it occurred in."""
        elapsed_s = None if self.instant is None else self.instant.seconds_until(Instant.now())
        return (
            self
            if elapsed_s is None
            else dataclasses.replace(self, recorded_after_s=round(elapsed_s, 6))
        )

    def to_json(self) -> str:
        """One line, as the logs in the store hold it."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Fault:
        """The inverse of ``to_json``."""
        fields: dict[str, Any] = json.loads(line)
        fields["kind"] = FaultKind(fields["kind"])
        fields["absent_ranks"] = tuple(fields["absent_ranks"])
        if raised := fields.get("raised"):
            fields["raised"] = Raised(**{**raised, "bases": tuple(raised["bases"])})
        if timeout := fields.get("timeout"):
            fields["timeout"] = ExceededTimeout(**timeout)
        if instant := fields.get("instant"):
            fields["instant"] = Instant(*instant)
        if escalation := fields.get("escalation"):
            failure = escalation["failure"]
            escalation["failure"] = None if failure is None else tuple(failure)
            fields["escalation"] = Escalation(**escalation)
        return cls(**fields)

    @classmethod
    def of_exception(
        cls,
        error: BaseException,
        kind: FaultKind,
        *,
        initial_rank: int,
        rank: int,
        iteration: int,
        gone: bool = False,
        secondary: bool = False,
    ) -> Fault:
        """The fault that ``error`` on this rank is."""
        text = "".join(described(error).format())
        return cls(
            kind=kind,
            initial_rank=initial_rank,
            rank=rank,
            iteration=iteration,
            at=time.time(),
            instant=Instant.now(),
            summary=summarise(error),
            traceback=text[-_TRACEBACK_CHARS:],
            gone=gone,
            secondary=secondary,
            raised=Raised.of(error),
            escalation=error.escalation if isinstance(error, RestartAbort) else None,
            due_to_peer=is_due_to_peer(error),
            device=error.device if isinstance(error, GpuUnusable | CudaContextLost) else None,
            absent_ranks=error.absent_ranks if isinstance(error, PeersAbsent) else (),
        )

    @classmethod
    def observed(
        cls,
        kind: FaultKind,
        initial_rank: int,
        iteration: int,
        detail: str,
        *,
        rank: int | None = None,
        gone: bool = False,
    ) -> Fault:
        """A fault of ``initial_rank`` that is seen now and has raised nothing, as ``detail``."""
        return cls(
            kind=kind,
            initial_rank=initial_rank,
            rank=rank,
            iteration=iteration,
            at=time.time(),
            instant=Instant.now(),
            summary=f"rank {initial_rank}: {detail}",
            gone=gone,
            detail=detail,
        )

    @classmethod
    def of_early_return(cls, initial_rank: int, rank: int, iteration: int) -> Fault:
        """The fault that a return from the function is if others still need this rank."""
        detail = "ended, or destroyed its groups, while other ranks still needed it"
        return cls.observed(FaultKind.RETURNED_EARLY, initial_rank, iteration, detail, rank=rank)


def find_cause(faults: Sequence[Fault]) -> Fault:
    """The fault that the others most likely follow from: the first that is not a mere symptom.

    ``faults`` are in the order in which they were recorded, and there is at least one. Of
    symptoms, a silent rank comes first in which nothing could run, then one that did not wait for
    its peers; then an exception of another kind, which a slow clean-up may have kept in the
    function until something was aborted; then ranks that lost their peers.
    """
    return min(faults, key=_likeness_to_victim)


def _likeness_to_victim(fault: Fault) -> int:
    if not fault.is_symptom:
        return 0
    if fault.lacks_a_peer or fault.kind is FaultKind.COMPLETION_TIMEOUT:
        is_follower = fault.was_blocked_by_peer or points_elsewhere(fault.summary)
        return 5 if fault.secondary or is_follower else 4
    if fault.secondary:
        return 3
    return 1 if fault.timeout is not None and fault.timeout.clock == "python" else 2


def with_hidden_cause(faults: Sequence[Fault], *candidates: Fault | None) -> list[Fault]:
    """``faults``, and the first of ``candidates`` that there is, if nothing else explains them.

    So it is when nothing is known but that ranks lost a peer or waited for one. A candidate is a
    rank that hung and did not reach its own timeout, whose clean-up after an exception waited for
    others, or that skipped a step, was done first and so closed the connections that the others
    still needed. Who observes all ranks cannot see such a clean-up, and names one that waits.
    """
    found = next((fault for fault in candidates if fault is not None), None)
    if found is None or not faults:
        return list(faults)
    cause = find_cause(faults)
    is_same_rank = cause.initial_rank == found.initial_rank
    if is_same_rank and cause.traceback is None and not found.is_exception:
        # Of many symptoms only the first is recorded with its stack, and that may be a victim's.
        known = dataclasses.replace(cause, traceback=found.traceback)
        return [known if fault is cause else fault for fault in faults]
    came_later = cause.secondary or cause.kind is FaultKind.HUNG
    if not (cause.lacks_a_peer or (found.is_exception and came_later)):
        return list(faults)
    if cause.kind is FaultKind.NCCL_ERROR and found.kind is FaultKind.SOFT_TIMEOUT:
        return list(faults)  # who is silent closes no connection: the network may have failed
    others = [fault for fault in faults if fault.initial_rank != found.initial_rank]
    return [found, *others]


def condense(faults: Sequence[Fault], most: int = 32) -> list[Fault]:
    """``faults`` fit for being read by thousands of ranks: the first ``most``, cause included.

    Only the cause keeps its traceback.
    """
    if not faults:
        return []
    cause = find_cause(faults)
    kept = [fault for fault in faults[:most] if fault is not cause]
    position = min(faults.index(cause), len(kept))
    kept = [dataclasses.replace(fault, traceback=None) for fault in kept[: most - 1]]
    return [*kept[:position], cause, *kept[position:]]


def without_repeats(faults: Sequence[Fault]) -> list[Fault]:
    """``faults`` with each rank's first one only, and the first by which it is gone; in order.

    A death, for example, may be reported both by the monitor process and by its neighbour.
    """
    first = {(fault.initial_rank, fault.gone): fault for fault in reversed(faults)}
    return [fault for fault in faults if first[fault.initial_rank, fault.gone] is fault]


class RemoteFaultError(RestartError):
    """What happened on the rank that caused the restart, as text.

    Chained to what a rank leaves with that itself was well.
    """


class Causes:
    """The exceptions of a rank so far, so that none is lost when it ends with another one."""

    def __init__(self, initial_rank: int) -> None:
        self._initial_rank = initial_rank
        self.last: BaseException | None = None
        self._earlier: BaseException | None = None
        self._remote: Fault | None = None  # the latest one
        self._follows_from_remote = False

    def note(self, error: BaseException) -> None:
        """``error`` was raised on this rank."""
        if error is not self.last:
            self._earlier, self.last = self.last, error

    def note_faults(self, faults: Iterable[Fault]) -> None:
        """The faults of an iteration; that of another rank which comes closest to their cause.

        A rank that merely stops restarting, as a rule all at once, is not taken for a cause.
        """
        causes = [fault for fault in faults if not fault.stops_restarting]
        others = [fault for fault in causes if fault.initial_rank != self._initial_rank]
        if others:
            self._remote = find_cause(others)
            self._follows_from_remote = find_cause(causes) is self._remote

    def with_root_cause(self, error: BaseException) -> BaseException:
        """``error``, chained to this rank's earlier exception, and that to another rank's fault.

        The latter if it was the cause, or if this rank has raised nothing.
        """
        if self._earlier is not None:
            append_to_chain(error, self._earlier)
        if self._remote is not None and (self._earlier is None or self._follows_from_remote):
            append_to_chain(error, RemoteFaultError(self._remote.report))
        return error
