"""What the ranks agree on through the store: faults, losses, the outcome of an iteration.

Every key is written so that the death of a writer between two operations leaves nothing
undecided, and each rank performs a small constant number of operations per iteration. Ranks are
named by their *initial* rank throughout, which never changes.

========================  =========================================================================
key                       meaning
========================  =========================================================================
``gone`` (log)            ranks that left the job, over all iterations, each with a Fault
``gone/ranks`` (log)      their numbers alone, repeats included, each after its Fault
``<k>/faults`` (log)      the faults seen in iteration *k*, each after its place in the order of
                          arrival; of many only the first, see ``_Share``
``<k>/faults/counts``     how many there were of each sort, in one number
``<k>/faulty`` (log)      the ranks whose faults were not recorded, as there were enough
``<k>/outcome``           ``fault`` or ``completed``, whichever was written first: one key decides,
                          so that no rank restarts while another takes the same iteration for done
``<k>/completed``         how many active ranks came back from the function
``<k>/arrived/<g>``       which ranks of group *g* reached the barrier at the end of *k*, and how
                          many of them were reported gone meanwhile: see ``_arrival_bitmap``
``<k>/arrivals`` (log)    what ranks report when they arrive, if anything
``<k>/done``              the agreement that ends *k*: who is gone, and why; first writer wins
``<k>/world``             the next world, which the planner of iteration *k + 1* starts from
``<k>/placements/<g>``    the agreement once more (in brief if all ranks would read too much), and
                          what each rank of group *g* becomes; set by the planner, all in one
                          message with the world
========================  =========================================================================

The barrier is complete when every initial rank has either arrived or gone. A rank that arrives
sets its bit in its group's number, and the sum shows whether it is the last of the group: then it
reads the other groups' numbers and the log of losses, and if these cover all ranks, it publishes
``done``, plans the next world and publishes the placements. A rank that reports a loss writes it
into the logs, then counts it in the group's number, and then always reads. Of two events the later
one therefore sees both. (Two that count at once may count too many, never too few; the logs
decide.)

A loss that was reported too late for the agreement has to be counted again in the next barrier, by
its reporter. Each report counts all losses in the log, so should the reporter die before it does,
the report of its death does it.
Should the planner die between ``done`` and the placements, the report of its death makes the
reporter plan, from the same ``done`` and with the same result.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from torch.distributed import Store

from ncclops.restart import _arrival_bitmap as bitmap
from ncclops.restart._world import Place, World, decode_place, encode_places
from ncclops.restart.agreement import (
    INITIAL,
    Agreement,
    Arrival,
    Planner,
    RestartPlan,
    numbers_claimed_and_left,
    numbers_lost,
)
from ncclops.restart.attribution import Fault, condense, without_repeats

FAULT = "fault"
COMPLETED = "completed"


@dataclass(frozen=True)
class _Share:
    """How many faults of one sort are recorded in an iteration, and how many with a traceback.

    When a collective fails, every rank of the job may report that, with some kilobytes each.
    The sorts are counted in one number, ``_BITS`` for each, ``shift`` from its low end.
    """

    shift: int
    recorded: int
    with_traceback: int


_BITS = 20
_LOSSES = _Share(0, recorded=64, with_traceback=4)
_CAUSES = _Share(_BITS, recorded=32, with_traceback=4)
_SYMPTOMS = _Share(2 * _BITS, recorded=16, with_traceback=1)
_SHARES = (_LOSSES, _CAUSES, _SYMPTOMS)

# All ranks together read at most so much of an agreement; if it would be more, they get it in
# brief, and the few that need the whole of it read ``done``.
_MOST_READ_BYTES = 256 * 1024


class Ledger:
    """The agreed record of one call of a wrapped function, over one connection to the store.

    ``initial_world_size`` ranks take part. The object is used by one thread at a time; other
    threads make their own over a separate connection, because a blocking ``wait`` occupies
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
        share = _LOSSES if fault.gone else _SYMPTOMS if fault.is_symptom else _CAUSES
        counts = self._store.add(f"{iteration}/faults/counts", 1 << share.shift)
        of_all = {each: counts >> each.shift & ((1 << _BITS) - 1) for each in _SHARES}
        if of_all[share] > share.recorded:
            self._append(f"{iteration}/faulty", str(fault.initial_rank))
        else:
            if of_all[share] > share.with_traceback:
                fault = replace(fault, traceback=None)
            self._append(f"{iteration}/faults", f"{sum(of_all.values())} {fault.to_json()}")
        self._publish(f"{iteration}/outcome", FAULT)

    def record_gone(self, iteration: int, fault: Fault, gone_before: Collection[int]) -> None:
        """Note that ``fault.initial_rank`` left the job; ends the barrier if it was the last.

        ``gone_before`` had gone when the iteration began; all its members agree on that.
        """
        self.record_fault(iteration, fault)
        self._append("gone", replace(fault, traceback=None).to_json())
        self._append("gone/ranks", str(fault.initial_rank))
        self.count_losses(iteration, gone_before)

    def count_losses(self, iteration: int, gone_before: Collection[int]) -> None:
        """Count the losses that are in the log and in no agreement; end the barrier if due."""
        lost = self._ranks_gone() - set(gone_before)
        for group, count in Counter(map(bitmap.group_of, lost)).items():
            key = _arrived_key(iteration, group)
            uncounted = count - bitmap.losses(self._store.add(key, 0))
            if uncounted > 0:
                self._store.add(key, uncounted * bitmap.LOSS)
        self._try_to_agree(iteration, gone_before)

    # --- the outcome of an iteration ----------------------------------------------------------

    def record_completion(self, iteration: int, active_world_size: int) -> None:
        """Note that this rank came back from the function; the last one decides the outcome."""
        if self._store.add(f"{iteration}/completed", 1) == active_world_size:
            self._publish(f"{iteration}/outcome", COMPLETED)

    def wait_for_outcome(self, iteration: int, timeout: timedelta) -> str:
        """Block until the iteration is decided; ``FAULT`` or ``COMPLETED``."""
        return self._wait(f"{iteration}/outcome", timeout)

    # --- the barrier between iterations -------------------------------------------------------

    def arrive(self, iteration: int, arrival: Arrival, gone_before: Collection[int]) -> None:
        """Enter the barrier at the end of ``iteration``; the last one publishes the agreement."""
        if arrival.keys or self._planner is None:
            self._append(f"{iteration}/arrivals", arrival.to_json())
        group = bitmap.group_of(arrival.initial_rank)
        bit = bitmap.arrival(arrival.initial_rank)
        number = self._store.add(_arrived_key(iteration, group), bit)
        expected = bitmap.expected(group, self._initial_world_size, gone_before)
        if bitmap.may_be_complete(number, expected):
            self._try_to_agree(iteration, gone_before)
        elif number == bit and iteration - 3 >= INITIAL:
            # The first of the group has time for it: the others are yet to come.
            self._delete(_arrived_key(iteration - 3, group), _placements_key(iteration - 3, group))

    def wait_for_agreement(
        self, iteration: int, initial_rank: int, timeout: timedelta
    ) -> tuple[Agreement, Place | None]:
        """Block until all ranks have arrived or gone: the agreement, and this rank's placement.

        The placement is ``None`` without a planner, and for a rank that the others take for gone.
        """
        if self._planner is None:
            return Agreement.from_json(self._wait(f"{iteration}/done", timeout)), None
        key = _placements_key(iteration, bitmap.group_of(initial_rank))
        agreed, placements = json.loads(self._wait(key, timeout))
        agreement = Agreement.from_json(agreed)
        gone = initial_rank in agreement.gone
        return agreement, None if gone else decode_place(placements, initial_rank)

    def whole_agreement(self, iteration: int) -> Agreement | None:
        """The agreement that ended ``iteration``, which a rank may have got in brief.

        ``None`` for a rank that comes so late that it is deleted.
        """
        key = f"{iteration}/done"
        if not self._store.check([key]):
            return None
        return Agreement.from_json(self._store.get(key).decode())

    def _try_to_agree(self, iteration: int, gone_before: Collection[int]) -> None:
        present = self._arrived_ranks(iteration, gone_before)
        if present is None or len(self._ranks_gone() | present) < self._initial_world_size:
            return
        if self._store.check([f"{iteration}/{'done' if self._planner is None else 'world'}"]):
            return  # another rank was as late as this one, and has done it
        gone = [Fault.from_json(line) for line in self._read("gone")]
        arrivals = list(map(Arrival.from_json, self._read(f"{iteration}/arrivals")))
        faults = without_repeats(self._faults(iteration))
        world = self._world_of(iteration)
        gone_ranks = frozenset(fault.initial_rank for fault in gone)
        unrecorded = map(int, self._read(f"{iteration}/faulty"))
        proposal = Agreement(
            iteration,
            gone=gone_ranks,
            lost=gone_ranks - frozenset(gone_before),
            terminated=numbers_claimed_and_left(iteration, gone, arrivals, gone_before)
            if self._planner is None
            else numbers_lost(world, gone, gone_before),
            faults=tuple(condense(faults)),
            faulty=tuple(dict.fromkeys([*(f.initial_rank for f in faults), *unrecorded])),
        )
        self._publish(f"{iteration}/done", proposal.to_json())
        if self._planner is not None:
            agreed = Agreement.from_json(self._store.get(f"{iteration}/done").decode())
            keys = dict.fromkeys(present, ()) | {a.initial_rank: a.keys for a in arrivals}
            self._publish_plan(iteration, self._planner(world, agreed, keys), agreed)
        self._forget(iteration - 2)

    def _arrived_ranks(self, iteration: int, gone_before: Collection[int]) -> set[int] | None:
        """Which ranks have arrived; ``None`` if the numbers show that some have yet to."""
        size = self._initial_world_size
        counts = {g: bitmap.expected(g, size, gone_before) for g in bitmap.groups(size)}
        expected = {group: count for group, count in counts.items() if count}
        keys = [_arrived_key(iteration, group) for group in expected]
        numbers = _read_counts(self._store, keys)
        if numbers is None or not all(map(bitmap.may_be_complete, numbers, expected.values())):
            return None
        groups = zip(expected, numbers, strict=True)
        return {rank for group, number in groups for rank in bitmap.arrived(group, number)}

    def _faults(self, iteration: int) -> list[Fault]:
        lines = [line.split(" ", 1) for line in self._read(f"{iteration}/faults")]
        lines.sort(key=lambda line: int(line[0]))
        return [Fault.from_json(text) for _, text in lines]

    def _ranks_gone(self) -> set[int]:
        return set(map(int, self._read("gone/ranks")))

    def _world_of(self, iteration: int) -> World | None:
        """The world of ``iteration``; ``None`` where nothing is planned, and before the first."""
        if self._planner is None or iteration == INITIAL:
            return None
        return World.from_json(self._store.get(f"{iteration - 1}/world"))

    def _publish_plan(self, iteration: int, plan: RestartPlan, agreement: Agreement) -> None:
        blocks: dict[str, dict[int, Place]] = {}
        for rank, placement in plan.placements.items():
            key = _placements_key(iteration, bitmap.group_of(rank))
            blocks.setdefault(key, {})[rank] = placement
        agreed = agreement.to_json()
        if len(agreed) * len(plan.placements) > _MOST_READ_BYTES:
            agreed = agreement.in_brief().to_json()
        values = {key: json.dumps([agreed, encode_places(block)]) for key, block in blocks.items()}
        # The world last, where a store sets them one by one: with it, the plan is whole.
        _set_many(self._store, values | {f"{iteration}/world": plan.world})

    def _forget(self, iteration: int) -> None:
        # No rank reads it any more: none is more than one iteration behind the others.
        names = ("faults", "faults/counts", "faulty", "outcome", "completed", "arrivals", "done")
        self._delete(*(f"{iteration}/{name}" for name in (*names, "world")))

    def _delete(self, *keys: str) -> None:
        for key in keys:
            with contextlib.suppress(Exception):  # some stores cannot delete
                self._store.delete_key(key)

    # --- numbers on which all ranks have to agree ---------------------------------------------

    def agree_on(self, name: str, proposal: int) -> int:
        """The number that the first rank has proposed under ``name``."""
        self._publish(name, str(proposal))
        return int(self._store.get(name))

    # --- leaving the wrapper ------------------------------------------------------------------

    def check_out(self, expected: int) -> None:
        """Note that this rank leaves the wrapper; the last of ``expected`` releases the waiters."""
        if self._store.add("left", 1) >= expected:
            self._publish("all-left", "1")

    def wait_for_all_to_leave(self, timeout: timedelta) -> None:
        """Block until all have checked out."""
        self._wait("all-left", timeout)

    # --- addresses of the monitor processes ---------------------------------------------------

    def publish_address(self, initial_rank: int, address: Sequence[Any]) -> None:
        """Make known where this rank's monitor process listens."""
        self._store.set(f"monitor/{initial_rank}", json.dumps(list(address)))

    def address_of(self, initial_rank: int, timeout: timedelta) -> list[Any]:
        """Where that rank's monitor process listens; blocks until the rank has said so."""
        address: list[Any] = json.loads(self._wait(f"monitor/{initial_rank}", timeout))
        return address

    def known_addresses(self, initial_ranks: Iterable[int]) -> list[list[Any]]:
        """Those of ``initial_ranks`` that have been published; does not block."""
        keys = [f"monitor/{rank}" for rank in initial_ranks]
        return [json.loads(self._store.get(key)) for key in keys if self._store.check([key])]

    # --- the operations underneath ------------------------------------------------------------

    def _publish(self, key: str, value: str) -> None:
        _publish(self._store, key, value)

    def _wait(self, key: str, timeout: timedelta) -> str:
        return _wait(self._store, key, timeout)

    def _append(self, key: str, line: str) -> None:
        _append(self._store, key, line)

    def _read(self, key: str) -> list[str]:
        return _read_log(self._store, key)


def _arrived_key(iteration: int, group: int) -> str:
    return f"{iteration}/arrived/{group}"


def _placements_key(iteration: int, group: int) -> str:
    return f"{iteration}/placements/{group}"


# --- operations of a store ------------------------------------------------------------------------
#
# TCPStore has them (``append``, ``compare_set``); FileStore and stores written in Python have them
# not at all, or not atomically, and get them built from ``add``, which every store has.


def _append(store: Store, key: str, line: str) -> None:
    """Add ``line`` to the log at ``key``; concurrent appends all survive, in some order."""
    if _is_extended(store):
        store.append(key, line + "\n")
    else:
        slot = store.add(f"{key}/slots", 1)
        store.set(f"{key}/slot/{slot}", line)


def _read_log(store: Store, key: str) -> list[str]:
    """The lines of the log at ``key``, none if nothing was written."""
    if _is_extended(store):
        return store.get(key).decode().splitlines() if store.check([key]) else []
    slots = [f"{key}/slot/{slot}" for slot in range(1, store.add(f"{key}/slots", 0) + 1)]
    # A slot that is taken and still empty belongs to a writer that has not counted it yet, or
    # that died and will be reported: either way a later event reads the log again.
    return [store.get(slot).decode() for slot in slots if store.check([slot])]


def _publish(store: Store, key: str, value: str) -> None:
    """Set ``key`` unless it is set already: the first value stands."""
    try:
        # The second time for those that wait already: not every server of torch 2.5 wakes them
        # on a compare_set. It sets the same value, whichever rank was first.
        store.set(key, store.compare_set(key, "", value).decode())
    except (RuntimeError, NotImplementedError) as error:
        if _is_extended(store):
            raise
        if not _lacks_compare_set(error):
            raise
        if store.add(f"{key}/claims", 1) == 1:
            store.set(key, value)


def _wait(store: Store, key: str, timeout: timedelta) -> str:
    """The value of ``key`` once it has one. Raises what the store raises when that is late."""
    if not _is_extended(store):
        store.wait([key], timeout)
        return str(store.get(key).decode())
    # Their get waits by itself: one message less.
    usual = store.timeout
    store.set_timeout(timeout)
    try:
        return str(store.get(key).decode())
    finally:
        store.set_timeout(usual)


def _read_counts(store: Store, keys: Sequence[str]) -> list[int] | None:
    """What was added up under each of ``keys``; ``None`` if one of them is still without."""
    if not store.check(list(keys)):
        return None
    if _is_extended(store):
        return list(map(int, store.multi_get(list(keys))))
    return [store.add(key, 0) for key in keys]


def _set_many(store: Store, values: Mapping[str, str]) -> None:
    """Set all of ``values``, in one message where the store can."""
    if _is_extended(store):
        store.multi_set(list(values), list(values.values()))
        return
    for key, value in values.items():
        store.set(key, value)


def _is_extended(store: Store) -> bool:
    return bool(store.has_extended_api())


def _lacks_compare_set(error: Exception) -> bool:
    text = str(error).lower()
    return isinstance(error, NotImplementedError) or "assert" in text or "not implemented" in text
