"""One restart, explained: what the callback receives and what the JSON file holds."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ncclops.restart._instant import Instant
from ncclops.restart.agreement import Agreement
from ncclops.restart.attribution import ExceededTimeout, Fault, FaultKind, find_cause
from ncclops.restart.exception import Escalation
from ncclops.restart.log import logged
from ncclops.restart.raised import Raised
from ncclops.restart.regroup import Regrouped
from ncclops.restart.state import State

log = logging.getLogger("ncclops.restart")

# Instead of the reason, where so many were lost at once that not all reasons were recorded.
_LOST_WITH_MANY = "lost, with many others"

# In the order in which they happen.
PHASES = (
    "detect",
    "collect",
    "abort",
    "leave",
    "finalize",
    "health_check",
    "barrier",
    "grow",
    "assign",
    "enter",
)


@dataclasses.dataclass(frozen=True)
class Incident:
    """Why iteration ``iteration`` ended, and what the restart after it took on this rank.

    Ranks are initial ranks. ``faulty_ranks`` are all that faulted, the one that caused the others
    first; ``ranks_lost`` those that left the job in this iteration, and ``ranks_returned`` those in
    whose places new processes go on after it. In a job of so many ranks that
    not each of them can read all that happened, the new rank 0 and ranks that leave have the whole
    of it; on the others ``faulty_ranks`` and ``faults`` end after the first, without traceback.
    ``phases_ms`` has the milliseconds this rank spent in each of ``PHASES``, which together are all
    that the restart took here; ``detect`` runs from the fault until it was known here (of a fault
    on another host: until it was recorded), ``leave`` is what the function took to end: ``atomic``
    sections, clean-up of its own and ``last_call_wait``, and ``grow`` what it took to join anew
    with ranks that come back. ``speaks_for_all`` is true on one rank. World sizes count healthy
    ranks; ``rank`` and ``rank_before`` are this rank's numbers (``None``: it left). ``traceback``
    is the exception's, or the stacks of a rank that was silent: of its main thread at the soft
    timeout, of all its threads (with ``incident_dir``) at the hard one.

    ``groups`` is empty when the incident is reported. The file says later how groups came to their
    new members, see ``regroup.Regrouped``, the default one first: all that a function that keeps
    going has from ``CallWrapper``, or the default one that the script has made by ``env://``.
    A group that is not there was made in another way, or not at all.

    ``summary`` is for people. ``detail``, ``raised`` and ``timeout`` are those of the fault that
    caused the others, see ``Fault``; ``escalation`` is what the first rank asks for that left to
    end restarting. ``absent_ranks`` are those that ``first_faulty_rank`` had waited for when it
    raised: they began it, and have raised nothing.
    """

    iteration: int
    cause: str
    summary: str
    first_faulty_rank: int
    faulty_ranks: tuple[int, ...]
    ranks_lost: tuple[int, ...]
    exception: str | None
    traceback: str | None
    faults: tuple[Fault, ...]
    world_size_before: int
    world_size: int
    initial_rank: int
    rank_before: int
    rank: int | None
    at: float
    phases_ms: Mapping[str, float]
    detail: str | None = None
    raised: Raised | None = None
    timeout: ExceededTimeout | None = None
    escalation: Escalation | None = None
    ranks_returned: tuple[int, ...] = ()
    absent_ranks: tuple[int, ...] = ()
    speaks_for_all: bool = False
    groups: tuple[Mapping[str, Any], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As JSON takes it, with the schema's name."""
        return {"schema": "ncclops.incident/1", **dataclasses.asdict(self)}

    def __str__(self) -> str:
        total_ms = sum(self.phases_ms.values())
        phases = ", ".join(f"{name} {ms:.0f}" for name, ms in self.phases_ms.items() if ms >= 0.5)
        lost = f"; lost {', '.join(map(str, self.ranks_lost))}" if self.ranks_lost else ""
        if self.ranks_returned:
            lost += f"; new processes for {', '.join(map(str, self.ranks_returned))}"
        what = self.summary if self.detail is None else self.detail
        went_on = f"{self.world_size} rank{'s' * (self.world_size != 1)} went on"
        return (
            f"restart in process: rank {self.first_faulty_rank}: {what}{lost};"
            f" {went_on if self.world_size else 'no rank goes on'}"
            f" after {total_ms:.0f} ms ({phases})"
        )


def describe(
    agreement: Agreement,
    before: State,
    after: State | None,
    phases_ms: Mapping[str, float],
    returned: Collection[int] = (),
) -> Incident:
    """The incident that ended ``agreement.iteration``, as seen by one rank.

    ``before`` is its state in that iteration and ``after`` in the next; ``None``: it left.
    ``returned`` are the initial ranks that new processes stand in for in the next.
    """
    # A new process knows nothing of it: of those that do, the first.
    left = set(range(before.initial_world_size)) - agreement.gone
    reporter = before.initial_rank == min(left, default=None) if returned else None
    faults = agreement.faults or (_unknown(agreement, before),)
    cause = find_cause(faults)
    return Incident(
        iteration=agreement.iteration,
        cause=cause.kind.value,
        summary=cause.summary,
        first_faulty_rank=cause.initial_rank,
        faulty_ranks=tuple(dict.fromkeys([cause.initial_rank, *agreement.faulty])),
        ranks_lost=tuple(sorted(agreement.lost)),
        exception=cause.summary if cause.traceback and cause.is_exception else None,
        traceback=cause.traceback,
        faults=faults,
        world_size_before=before.world_size,
        world_size=after.world_size if after else before.world_size - len(agreement.terminated),
        initial_rank=before.initial_rank,
        rank_before=before.rank,
        rank=after.rank if after else None,
        at=cause.at,
        phases_ms={name: round(phases_ms.get(name, 0.0), 3) for name in PHASES},
        detail=cause.detail,
        raised=cause.raised,
        timeout=cause.timeout,
        escalation=next((f.escalation for f in faults if f.escalation is not None), None),
        ranks_returned=tuple(sorted(returned)),
        absent_ranks=cause.absent_ranks,
        speaks_for_all=after is not None and (after.rank == 0 if reporter is None else reporter),
    )


def _unknown(agreement: Agreement, before: State) -> Fault:
    return Fault(
        FaultKind.REQUESTED,
        before.initial_rank,
        before.rank,
        agreement.iteration,
        time.time(),
        "no fault was recorded",
    )


class IncidentDirectories:
    """Where the incidents of one call are written: a directory with a number for each.

    Numbers go on over calls and attempts: ``first``, which all ranks have to agree on, is that of
    the incident which ends iteration 0.
    """

    def __init__(self, parent: Path, first: int) -> None:
        self.first = first
        self._parent = parent

    def of(self, iteration: int) -> Path:
        """The directory of the incident that ends ``iteration``."""
        return self._parent / str(self.first + iteration)


def free_number(parent: Path) -> int:
    """A number for which there is no directory in ``parent`` yet."""
    try:
        names = os.listdir(parent)  # noqa: PTH208 - names are all that is wanted
    except OSError:
        return 0
    return max((int(name) for name in names if name.isdecimal()), default=-1) + 1


def write(incident: Incident, directory: Path) -> Path:
    """Write ``incident.json`` in ``directory``, whole or not at all; returns the path.

    The rank that speaks for all does, and on another host, where its file is not to be seen, the
    first rank that comes. A rank that left writes ``left-rank<initial>.json`` next to it. Raises
    ``OSError``.
    """
    name = "incident" if incident.rank is not None else f"left-rank{incident.initial_rank}"
    path = directory / f"{name}.json"
    is_left_to_another = incident.rank is not None and not incident.speaks_for_all
    if is_left_to_another and path.exists():
        return path
    directory.mkdir(parents=True, exist_ok=True)
    draft = directory / f".{path.name}.{os.getpid()}.partial"
    try:
        draft.write_text(json.dumps(incident.to_dict(), indent=1, default=str) + "\n")
        if not is_left_to_another:
            draft.replace(path)
            return path
        with contextlib.suppress(FileExistsError):
            path.hardlink_to(draft)
    finally:
        draft.unlink(missing_ok=True)  # on a full disk, too
    return path


@dataclass(frozen=True)
class _Restart:
    """A restart on its way: how the last iteration ended, and what the phases took so far."""

    agreement: Agreement
    before: State
    phases_ms: dict[str, float]
    returned: Collection[int] = ()


class Account:
    """What each phase of a rank's restarts took in one call, and the incidents that come of it.

    ``on_incident`` gets each incident; ``directories`` is where one rank of each host writes it.

    ``on_regrouped`` is called on the rank that speaks for all, for each group that has its new
    members.

    ``on_lost`` is called on rank 0 for each rank that was lost: with the incident's directory,
    the initial rank and the reason.
    """

    def __init__(
        self,
        directories: IncidentDirectories | None,
        on_incident: Callable[[Incident], object] | None,
        on_lost: Callable[[Path, int, str], object] | None,
        on_regrouped: Callable[[Regrouped], object] | None = None,
    ) -> None:
        self._directories = directories
        self._on_incident = on_incident
        self._on_lost = on_lost
        self._on_regrouped = on_regrouped
        self._reported: Incident | None = None  # the latest one
        self._phases_ms: dict[str, float] = {}
        self._restart: _Restart | None = None  # until the function has been entered again
        self._seen = Instant.now()
        self._assigned_at = 0.0

    # --- the phases ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What runs inside is phase ``name`` of ``incident.PHASES``."""
        started = time.monotonic()
        try:
            yield
        finally:
            self._phases_ms[name] = 1000 * (time.monotonic() - started)

    def aborted(self, seen_at: float, collect_s: float, abort_s: float) -> None:
        """A restart begins: the monitor thread saw a fault at monotonic time ``seen_at``.

        Since then it has taken a snapshot and aborted, and the main thread has left the function.
        """
        since_s = time.monotonic() - seen_at
        seconds = {"collect": collect_s, "abort": abort_s, "leave": since_s - collect_s - abort_s}
        self._phases_ms = {name: 1000 * max(0.0, taken) for name, taken in seconds.items()}
        self._seen = Instant.now()._replace(monotonic_s=seen_at)

    def agreed(self, faults: Sequence[Fault]) -> None:
        """These were the iteration's faults."""
        if faults:
            detected_s = max(fault.known_after_s(self._seen) for fault in faults)
            self._phases_ms["detect"] = 1000 * detected_s

    # --- the incidents ------------------------------------------------------------------------

    def restarting(
        self, agreement: Agreement, before: State, returned: Collection[int] = ()
    ) -> None:
        """All ranks have their new numbers: what remains is to enter the function."""
        self._restart = _Restart(agreement, before, self._phases_ms, returned)
        self._assigned_at = time.monotonic()

    def restarted(self, state: State) -> None:
        """The function is entered, or will not be: report the restart, unless that is done."""
        restart, self._restart = self._restart, None
        if restart is not None:
            restart.phases_ms["enter"] = 1000 * (time.monotonic() - self._assigned_at)
            self._report(restart, state)

    def regrouped(self, regrouped: Sequence[Regrouped]) -> None:
        """Groups have come to the members of the iteration that has begun."""
        incident = self._add_groups(regrouped)
        if incident is None:
            return
        for each in regrouped:
            log.info("%s", each)
        if self._on_regrouped is not None and incident.speaks_for_all:
            with logged("on_regrouped"):
                for each in regrouped:
                    self._on_regrouped(each)

    def made_anew(self, group: Regrouped) -> None:
        """The function has made ``group``. Once in an iteration: what it does with it then is its
        own affair, and that it is made at all is what a function that is called again does."""
        incident = self._reported
        if incident is not None and not incident.groups:
            self._add_groups([group])

    def _add_groups(self, regrouped: Sequence[Regrouped]) -> Incident | None:
        """To the latest incident, which it returns; ``None``: they are not of a restart, or this
        rank is new."""
        incident = self._reported
        if incident is None or incident.iteration != regrouped[0].iteration - 1:
            return None
        groups = (*incident.groups, *(each.to_dict() for each in regrouped))
        self._reported = dataclasses.replace(incident, groups=groups)
        if self._directories is not None and incident.speaks_for_all:
            with logged("writing the incident"):
                write(self._reported, self._directories.of(incident.iteration))
        return incident

    def leaving(self, agreement: Agreement, state: State) -> None:
        """This rank takes no part in the restart."""
        self._report(_Restart(agreement, state, self._phases_ms), None)

    def _report(self, restart: _Restart, after: State | None) -> None:
        """Log the incident, write it and hand it to the callback."""
        incident = describe(
            restart.agreement, restart.before, after, restart.phases_ms, restart.returned
        )
        # One rank warns; of ranks that leave no other behind the first.
        none_left = not incident.world_size and incident.ranks_lost[:1] == (incident.initial_rank,)
        warns = none_left or incident.speaks_for_all
        log.log(logging.WARNING if warns else logging.INFO, "%s", incident)
        self._reported = incident
        if self._directories is not None:
            with logged("writing the incident"):
                self._write(incident, self._directories.of(incident.iteration))
        if self._on_incident is not None:
            with logged("on_incident"):
                self._on_incident(incident)

    def _write(self, incident: Incident, directory: Path) -> None:
        write(incident, directory)
        if self._on_lost is not None and incident.speaks_for_all:
            reasons = {fault.initial_rank: fault.summary for fault in incident.faults if fault.gone}
            for rank in incident.ranks_lost:
                self._on_lost(directory, rank, reasons.get(rank, _LOST_WITH_MANY))
