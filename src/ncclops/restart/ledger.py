"""What the ranks agree on through the store: faults, losses, the outcome of an iteration.

Every key is written so that the death of a writer between two operations leaves nothing
undecided, and each rank performs a small constant number of operations per iteration. Ranks are
named by their *initial* rank throughout, which never changes.

========================  =========================================================================
key                       meaning
========================  =========================================================================
``gone`` (log)            ranks that left the job for good, over all iterations, each with a Fault
``gone/count``            entries in it (repeats included)
``<k>/faults`` (log)      the faults seen in iteration *k*, in order of arrival
``<k>/outcome``           ``fault`` or ``completed``, whichever was written first: one key decides,
                          so that no rank restarts while another takes the same iteration for done
``<k>/completed``         how many active ranks came back from the function
``<k>/arrived`` (log)     ranks that reached the barrier at the end of *k*, and ``/count`` of them
``<k>/done``              the agreement that ends *k*: who is gone, and why; first writer wins
``<k>/world``             the next world, which the planner of iteration *k + 1* starts from
``<k>/placements/<n>``    the agreement once more, and what each of the initial ranks from 64 n on
                          becomes; set by the planner, all in one message
========================  =========================================================================

The barrier is complete when every initial rank has either arrived or gone. Whoever adds to one
of the two counts reads the other; the later of two events therefore sees both, and the rank
whose addition makes the sum large enough reads the logs and, if they cover everybody, publishes
``done``, plans the next world and publishes the placements. An entry is appended before it is
counted: a process that dies in between is reported gone, which counts again. (The sum may
therefore be too large, never too small; the logs decide.) Should the planner die between ``done``
and the placements, the report of its death makes the reporter plan, from the same ``done`` and
with the same result.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import Store

from ncclops.restart import _store_ops
from ncclops.restart.attribution import Fault, condense, without_repeats

FAULT = "fault"
COMPLETED = "completed"
# The barrier before the first iteration, and whatever goes wrong until then.
INITIAL = -1
# So many ranks find their placement under one key: few keys for the planner to set and to delete,
# and a few KiB for a rank to read.
_PLACEMENTS_PER_KEY = 64


@dataclass(frozen=True)
class Agreement:
    """How iteration ``iteration`` ended, the same on every rank.

    ``gone`` are the initial ranks that left the job up to now; ``terminated`` those among them
    that were members of this iteration, by their numbers in it; ``faults`` what happened in it,
    if that was much only the beginning; ``faulty`` all ranks it happened on, by initial number.
    """

    iteration: int
    gone: frozenset[int]
    terminated: frozenset[int]
    faults: tuple[Fault, ...]
    faulty: tuple[int, ...]

    def to_json(self) -> str:
        """As the store holds it."""
        return json.dumps(
            {
                "iteration": self.iteration,
                "gone": sorted(self.gone),
                "terminated": sorted(self.terminated),
                "faults": [fault.to_json() for fault in self.faults],
                "faulty": self.faulty,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Agreement:
        """The inverse of ``to_json``."""
        fields: dict[str, Any] = json.loads(text)
        return cls(
            fields["iteration"],
            frozenset(fields["gone"]),
            frozenset(fields["terminated"]),
            tuple(map(Fault.from_json, fields["faults"])),
            tuple(fields["faulty"]),
        )


@dataclass(frozen=True)
class Arrival:
    """A rank at the barrier: who, its number in the iteration, its keys for the assignment."""

    initial_rank: int
    rank: int
    keys: tuple[str, ...] = ()

    def to_json(self) -> str:
        """One line, as the log in the store holds it."""
        return json.dumps([self.initial_rank, self.rank, *self.keys])

    @classmethod
    def from_json(cls, line: str) -> Arrival:
        """The inverse of ``to_json``."""
        initial_rank, rank, *keys = json.loads(line)
        return cls(initial_rank, rank, tuple(keys))


@dataclass(frozen=True)
class Plan:
    """The planner's result: the next world as text, and what to tell each rank that arrived."""

    world: str
    placements: Mapping[int, str]


# (the world before, the agreement, who arrived) -> Plan; must depend on nothing else.
Planner = Callable[[str | None, Agreement, Mapping[int, Arrival]], Plan]


@dataclass(frozen=True)
class Membership:
    """What a rank knows of an iteration's members: how many, and who had gone before it."""

    world_size: int
    gone_before: frozenset[int]


class Ledger:
    """The agreed record of one call of a wrapped function, over one connection to the store.

    ``initial_world_size`` ranks take part. The object is used by one thread at a time; other
    threads make their own over a connection of their own, because a blocking ``wait`` occupies
    the connection it was called on. All methods may raise what the store raises.
    """

    def __init__(
        self, store: Store, initial_world_size: int, planner: Planner | None = None
    ) -> None:
        self._store = store
        self._initial_world_size = initial_world_size
        self._planner = planner

    # --- faults and losses --------------------------------------------------------------------

    def record_fault(self, iteration: int, fault: Fault) -> None:
        """Note ``fault`` and, unless the iteration is decided already, make it a failed one."""
        self._append(f"{iteration}/faults", fault.to_json())
        self._publish(f"{iteration}/outcome", FAULT)

    def record_gone(self, iteration: int, fault: Fault, membership: Membership) -> None:
        """Note that ``fault.initial_rank`` left for good; ends the barrier if it was the last."""
        self._append("gone", fault.to_json())
        gone = self._store.add("gone/count", 1)
        self.record_fault(iteration, fault)
        arrived = self._store.add(f"{iteration}/arrived/count", 0)
        if gone + arrived >= self._initial_world_size:
            self._try_to_agree(iteration, membership)

    # --- the outcome of an iteration ----------------------------------------------------------

    def record_completion(self, iteration: int, active_world_size: int) -> None:
        """Note that this rank came back from the function; the last one decides the outcome."""
        if self._store.add(f"{iteration}/completed", 1) == active_world_size:
            self._publish(f"{iteration}/outcome", COMPLETED)

    def wait_for_outcome(self, iteration: int, timeout: timedelta) -> str:
        """Block until the iteration is decided; ``FAULT`` or ``COMPLETED``."""
        return self._wait(f"{iteration}/outcome", timeout)

    # --- the barrier between iterations -------------------------------------------------------

    def arrive(self, iteration: int, arrival: Arrival, members: Membership) -> None:
        """Enter the barrier at the end of ``iteration``; the last one publishes the agreement."""
        self._append(f"{iteration}/arrived", arrival.to_json())
        arrived = self._store.add(f"{iteration}/arrived/count", 1)
        gone = self._store.add("gone/count", 0)
        if gone + arrived >= self._initial_world_size:
            self._try_to_agree(iteration, members)

    def wait_for_agreement(
        self, iteration: int, initial_rank: int, timeout: timedelta
    ) -> tuple[Agreement, str | None]:
        """Block until everybody has arrived or gone: the agreement, and this rank's placement.

        The placement is ``None`` without a planner, and for a rank that the others hold for gone.
        """
        if self._planner is None:
            return Agreement.from_json(self._wait(f"{iteration}/done", timeout)), None
        key = _placements_key(iteration, initial_rank)
        agreed, placements = json.loads(self._wait(key, timeout))
        agreement = Agreement.from_json(agreed)
        gone = initial_rank in agreement.gone
        return agreement, None if gone else placements[str(initial_rank)]

    def _try_to_agree(self, iteration: int, membership: Membership) -> None:
        gone = [Fault.from_json(line) for line in self._read("gone")]
        arrived = map(Arrival.from_json, self._read(f"{iteration}/arrived"))
        arrivals = {arrival.initial_rank: arrival for arrival in arrived}
        covered = arrivals.keys() | {fault.initial_rank for fault in gone}
        if len(covered) < self._initial_world_size:
            return
        faults = without_repeats(list(map(Fault.from_json, self._read(f"{iteration}/faults"))))
        numbers = {rank: arrival.rank for rank, arrival in arrivals.items()}
        proposal = Agreement(
            iteration,
            frozenset(fault.initial_rank for fault in gone),
            terminated_numbers(iteration, gone, numbers, membership),
            tuple(condense(faults)),
            tuple(dict.fromkeys(fault.initial_rank for fault in faults)),
        )
        self._publish(f"{iteration}/done", proposal.to_json())
        if self._planner is not None and not self._store.check([f"{iteration}/world"]):
            agreed = Agreement.from_json(self._store.get(f"{iteration}/done").decode())
            self._publish_plan(iteration, self._planner, agreed, arrivals)
        self._forget(iteration - 2)

    def _publish_plan(
        self,
        iteration: int,
        planner: Planner,
        agreement: Agreement,
        arrivals: Mapping[int, Arrival],
    ) -> None:
        before = f"{iteration - 1}/world"
        world = None if iteration == INITIAL else self._store.get(before).decode()
        plan = planner(world, agreement, arrivals)
        blocks: dict[str, dict[int, str]] = {}
        for rank, placement in plan.placements.items():
            blocks.setdefault(_placements_key(iteration, rank), {})[rank] = placement
        agreed = agreement.to_json()
        values = {key: json.dumps([agreed, placements]) for key, placements in blocks.items()}
        _store_ops.set_many(self._store, values)
        self._store.set(f"{iteration}/world", plan.world)

    def _forget(self, iteration: int) -> None:
        # Nobody reads it any more: a rank is never more than one iteration behind the others.
        names = ("faults", "outcome", "completed", "arrived", "arrived/count", "done", "world")
        keys = [f"{iteration}/{name}" for name in names]
        if self._planner is not None:
            first_ranks = range(0, self._initial_world_size, _PLACEMENTS_PER_KEY)
            keys += [_placements_key(iteration, rank) for rank in first_ranks]
        for key in keys:
            with contextlib.suppress(Exception):  # some stores cannot delete
                self._store.delete_key(key)

    # --- leaving the wrapper ------------------------------------------------------------------

    def check_out(self, expected: int) -> None:
        """Note that this rank leaves the wrapper; the last of ``expected`` opens the door."""
        if self._store.add("left", 1) >= expected:
            self._publish("all-left", "1")

    def wait_for_everyone(self, timeout: timedelta) -> None:
        """Block until all have checked out."""
        self._wait("all-left", timeout)

    # --- addresses of the guardians -----------------------------------------------------------

    def publish_address(self, initial_rank: int, address: Sequence[Any]) -> None:
        """Make known where this rank's guardian listens."""
        self._store.set(f"guardian/{initial_rank}", json.dumps(list(address)))

    def address_of(self, initial_rank: int, timeout: timedelta) -> list[Any]:
        """Where that rank's guardian listens; blocks until the rank has said so."""
        address: list[Any] = json.loads(self._wait(f"guardian/{initial_rank}", timeout))
        return address

    def known_addresses(self, initial_ranks: Iterable[int]) -> list[list[Any]]:
        """Those of ``initial_ranks`` that have been published; does not block."""
        keys = [f"guardian/{rank}" for rank in initial_ranks]
        return [json.loads(self._store.get(key)) for key in keys if self._store.check([key])]

    # --- the operations underneath ------------------------------------------------------------

    def _publish(self, key: str, value: str) -> None:
        _store_ops.publish(self._store, key, value)

    def _wait(self, key: str, timeout: timedelta) -> str:
        self._store.wait([key], timeout)
        value: str = self._store.get(key).decode()
        return value

    def _append(self, key: str, line: str) -> None:
        _store_ops.append(self._store, key, line)

    def _read(self, key: str) -> list[str]:
        return _store_ops.read_log(self._store, key)


def _placements_key(iteration: int, initial_rank: int) -> str:
    return f"{iteration}/placements/{initial_rank // _PLACEMENTS_PER_KEY}"


def terminated_numbers(
    iteration: int, gone: Iterable[Fault], arrived: dict[int, int], membership: Membership
) -> frozenset[int]:
    """The numbers, in ``iteration``, of its members that have gone.

    Most reports carry the number. A rank that died before it had taken its number in, or whose
    death was noticed from afar, has one of the numbers that nobody claims; which one it was
    makes no difference to those that remain.
    """
    lost = {fault.initial_rank: fault for fault in gone}
    lost = {rank: fault for rank, fault in lost.items() if rank not in membership.gone_before}
    known = {
        rank: fault.rank
        for rank, fault in lost.items()
        if fault.rank is not None and fault.iteration == iteration
    }
    known |= {rank: arrived[rank] for rank in lost.keys() & arrived.keys()}
    present = {number for rank, number in arrived.items() if rank not in lost}
    free = sorted(set(range(membership.world_size)) - present - set(known.values()))
    missing = sorted(lost.keys() - known.keys())
    return frozenset(known.values()) | frozenset(free[: len(missing)])
