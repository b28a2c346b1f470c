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
``<k>/outcome``           ``fault``, with how many seconds a rank has waited where that is known,
                          or ``completed``, whichever was written first: one key decides,
                          so that no rank restarts while another takes the same iteration for done
``<k>/completed/``…       the roll of the active ranks, by number, that came back from the function:
                          see ``_store.rolls``
``<k>/first-returned``    the first of them, as a Fault, which it is if its peers still needed it
``<k>/silent``            how many ranks were silent when they heard of the fault of another one
``<k>/first-silent``      the first of them, as a Fault, which it is if the others waited for it
``<k>/busy``, ``<k>/first-busy``  likewise, of ranks that did something else for as long
``<k>/arrived/``…         the roll of the ranks that reached the barrier at the end of *k*
``<k>/arrivals`` (log)    what ranks report when they arrive, if anything
``<k>/done``              the agreement that ends *k*: who is gone, and why; first writer wins
``<k>/world``             the next world, which the planner of iteration *k + 1* starts from
``next``, ``iteration``,  of lost ranks that come back: see ``generations``, which also says
``returning``             which name space all these keys are in
``<k>/placements/<g>``    the agreement once more (in brief if all ranks would read too much), and
                          what each rank of group *g* becomes; set by the planner, all in one
                          message with the world
========================  =========================================================================

The barrier is complete when every initial rank has either arrived or gone. A rank that sees by the
roll that it has to look reads who arrived and the log of losses, and if these cover all ranks, it
publishes ``done``, plans the next world and publishes the placements. A rank that reports a loss
writes it into the logs, then counts it in the roll, and then always reads. Of two events the later
one therefore sees both. (Two that count at once may count too many, never too few; the logs
decide.) A rank that does not know whether it is in the roll goes on like the reporter of a loss.

A loss that was reported too late for the agreement has to be counted again in the next barrier, by
its reporter. Each report counts all losses in the log, so should the reporter die before it does,
the report of its death does it.
Should the planner die between ``done`` and the placements, the report of its death makes the
reporter plan, from the same ``done`` and with the same result.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from torch.distributed import Store

from ncclops.restart._assignment.world import Place, World, decode_place, encode_places
from ncclops.restart._store import arrival_bitmap as bitmap
from ncclops.restart._store.client import AdditionUnknown, Connection, StoreClient
from ncclops.restart._store.rolls import Roll
from ncclops.restart.agreement import (
    INITIAL,
    Agreement,
    Arrival,
    Planner,
    RestartPlan,
    numbers_claimed_and_left,
    numbers_lost,
)
from ncclops.restart.attribution import (
    Fault,
    FaultKind,
    condense,
    find_cause,
    with_hidden_cause,
    without_repeats,
)
from ncclops.restart.exception import NameSpaceUsed
from ncclops.restart.generations import Generation, GenerationKeys, to_return
from ncclops.restart.regroup import RECONFIGURATIONS

FAULT = "fault"
COMPLETED = "completed"


_FIRST = Generation()


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

# Below the number of an iteration: what torch's process groups write, calls inside it, and
# snapshots, by which ranks have agreed on what they restore.
_LEFT_BEHIND = ("groups/", "call", "snapshots/")
# And a default group that outlives iterations, with a number of each of its reconfigurations.
_OF_KEPT_GROUP = re.compile(r"kept/(?:.*/(?:nccl2_)?reconfigure/(?P<number>\d+)/)?")


def is_outdated(
    key: str, iteration: int, kept_since: int | None = None, beside_since: int | None = None
) -> bool:
    """Whether ``key`` is one of torch's groups, or of inner calls, and no rank in ``iteration`` or
    later reads it any more.

    ``kept_since`` is the iteration in which a group was made that may be shrunk, or was.
    ``beside_since``: no group beside the default one that is in use was made before it; ``None``:
    that is not known."""
    number, _, rest = key.partition("/")
    if not number.isdecimal() or int(number) >= iteration:
        return False
    if rest.startswith("shrinkable/"):
        return kept_since is None or int(number) < kept_since
    if rest.startswith("beside/"):
        return beside_since is not None and int(number) < beside_since
    if (of_kept := _OF_KEPT_GROUP.match(rest)) is not None:
        used_in = of_kept["number"]
        return used_in is None or int(used_in) < iteration * RECONFIGURATIONS
    return rest.startswith(_LEFT_BEHIND)


class Ledger:
    """The agreed record of one call of a wrapped function, over one connection to the store.

    ``initial_world_size`` ranks take part, in ``generation`` those that are not absent. Lost ranks
    may come back; ``waits_for_lost``: they are waited for. ``None``: none comes back. The object is
    used by one thread at a time; other threads make their own over a connection of their own,
    because a blocking ``wait`` occupies the connection it was called on. All methods may raise what
    the store raises.
    """

    def __init__(
        self,
        store: Store | StoreClient,
        initial_world_size: int,
        planner: Planner | None = None,
        generation: Generation = _FIRST,
        waits_for_lost: bool | None = None,
    ) -> None:
        client = store if isinstance(store, StoreClient) else StoreClient(Connection(store))
        self._store = client
        self._initial_world_size = initial_world_size
        self._planner = planner
        self.generation = generation
        self._waits_for_lost = waits_for_lost
        self.generations = GenerationKeys(client)

    def renew(self) -> None:
        """Have the next answer, also to a call that waits, come over a new connection. Any thread.

        See ``StoreClient``.
        """
        self._store.renew()

    def give_up(self) -> None:
        """See ``StoreClient``."""
        self._store.give_up()

    # --- faults and losses --------------------------------------------------------------------

    def record_fault(self, iteration: int, fault: Fault) -> None:
        """Note ``fault`` and, unless the iteration is decided already, make it a failed one."""
        share = _LOSSES if fault.gone else _CAUSES if fault.may_be_cause else _SYMPTOMS
        counts = self._store.add(f"{iteration}/faults/counts", 1 << share.shift, repeatable=True)
        of_all = {each: counts >> each.shift & ((1 << _BITS) - 1) for each in _SHARES}
        if of_all[share] > share.recorded:
            self._store.append(f"{iteration}/faulty", str(fault.initial_rank))
        else:
            fault = fault.being_recorded()
            if of_all[share] > share.with_traceback:
                fault = replace(fault, traceback=None)
            self._store.append(f"{iteration}/faults", f"{sum(of_all.values())} {fault.to_json()}")
        waited = "" if fault.waited_s is None else f" {fault.waited_s}"
        self._store.publish(f"{iteration}/outcome", FAULT + waited)

    def record_gone(self, iteration: int, fault: Fault, gone_before: Collection[int]) -> None:
        """Note that ``fault.initial_rank`` left the job; ends the barrier if it was the last.

        ``gone_before`` had gone when the iteration began; all its members agree on that.
        """
        fault = fault.being_recorded()
        self.record_fault(iteration, fault)
        self._store.append("gone", replace(fault, traceback=None).to_json())
        self._store.append("gone/ranks", str(fault.initial_rank))
        self.count_losses(iteration, gone_before)

    def count_losses(self, iteration: int, gone_before: Collection[int]) -> None:
        """Count the losses that are in the log and in no agreement; end the barrier if due."""
        absent = self.ranks_gone() - set(gone_before)
        roll = self._arrived(iteration, gone_before)
        roll.count(absent | roll.again())
        self._try_to_agree(iteration, gone_before)

    # --- the outcome of an iteration ----------------------------------------------------------

    def record_completion(
        self, iteration: int, active_rank: int, active_world_size: int, returned: Fault
    ) -> None:
        """Note that this rank came back from the function; the last one decides the outcome.

        ``returned`` says that of this rank, and is kept of the first.
        """
        size = active_world_size
        roll = self._completed(iteration, size)
        number = roll.sign(active_rank)
        if number is None:
            roll.count(roll.again())
        else:
            # the first of its group; where ranks come back, that keeps them from it
            is_first = number == bitmap.arrival(active_rank)
            if is_first and (size > 1 or self._waits_for_lost is not None):
                self._store.publish(f"{iteration}/first-returned", returned.to_json())
            if not roll.is_to_look(active_rank, number):
                return
        present = roll.present()
        if present is not None and len(present) < size:
            present |= roll.again()
        if present is not None and len(present) == size:
            self._store.publish(f"{iteration}/outcome", COMPLETED)

    def unfinished(self, iteration: int) -> frozenset[int] | None:
        """The ranks that had not come back from the function in ``iteration``, if none of them is
        active in the next one; else ``None``, and where no rank plans the worlds for all.

        All ranks find the same once they have passed the barrier after ``iteration``.
        """
        before, now = self._world_of(iteration), self._world_of(iteration + 1)
        if before is None or now is None:
            return None
        active = before.initial_ranks[: before.active]
        came = self._completed(iteration, len(active)).signed()
        finished = {active[number] for number in came}
        if finished.issuperset(now.initial_ranks[: now.active]):
            return frozenset(active) - finished
        return None

    def note_silent(self, iteration: int, fault: Fault) -> None:
        """Note that this rank was silent when another one's fault ended ``iteration``, or did
        something else: then no timeout was exceeded, and any that was silent comes before it.

        Kept of the first of either: it is the cause if the others waited for it.
        """
        is_busy = fault.kind is FaultKind.SOFT_TIMEOUT and fault.timeout is None
        what = "busy" if is_busy else "silent"
        with contextlib.suppress(AdditionUnknown):
            if self._store.add(f"{iteration}/{what}", 1) == 1:
                self._store.publish(f"{iteration}/first-{what}", fault.to_json())

    def cause_so_far(self, iteration: int) -> Fault | None:
        """What the faults that are recorded in ``iteration`` most likely follow from."""
        faults = self._faults(iteration)
        return find_cause(faults) if faults else None

    def is_waited_for_in_vain(self, iteration: int, numbers: Collection[int] | None) -> bool:
        """Whether a rank that still waits for the active ranks with these ``numbers`` in
        ``iteration``, ``None``: for all, does so in vain.

        One of them has left the function, or the iteration was ended because a rank was silent:
        then that one waits as well, or whatever it does has taken too long.
        """
        faults = self._faults(iteration)
        if any(fault.kind in (FaultKind.SOFT_TIMEOUT, FaultKind.HUNG) for fault in faults):
            return True
        world = self._world_of(iteration)
        if world is None:
            awaited = set(range(self._initial_world_size))
        else:
            active = world.initial_ranks[: world.active]
            awaited = {active[n] for n in (range(len(active)) if numbers is None else numbers)}
        left = self.ranks_gone() | self._arrived(iteration).signed_beside(awaited)
        left |= {fault.initial_rank for fault in faults if fault.kind is FaultKind.EXCEPTION}
        return not left.isdisjoint(awaited)

    def wait_for_outcome(self, iteration: int, timeout: timedelta) -> tuple[str, float | None]:
        """Block until the iteration is decided: ``COMPLETED`` or ``FAULT``, and how many seconds a
        rank has waited, if that is known."""
        outcome, _, waited_s = self._store.wait_long(f"{iteration}/outcome", timeout).partition(" ")
        return outcome, float(waited_s) if waited_s else None

    # --- the barrier between iterations -------------------------------------------------------

    def arrive(self, iteration: int, arrival: Arrival, gone_before: Collection[int]) -> None:
        """Enter the barrier at the end of ``iteration``; the last one publishes the agreement."""
        if arrival.keys or self._planner is None:
            self._store.append(f"{iteration}/arrivals", arrival.to_json())
        rank, roll = arrival.initial_rank, self._arrived(iteration, gone_before)
        number = roll.sign(rank)
        if number is None:
            self.count_losses(iteration, gone_before)
        elif roll.is_to_look(rank, number):
            self._try_to_agree(iteration, gone_before)
        elif number == bitmap.arrival(rank) and (old := iteration - 3) >= INITIAL:
            # The first of the group has time for it: the others are yet to come.
            size = self._initial_world_size
            for outdated in (self._arrived(old), self._completed(old, size)):
                self._delete(*outdated.keys_of(rank))
            self._delete(_placements_key(old, bitmap.group_of(rank)))

    def wait_for_agreement(
        self, iteration: int, initial_rank: int, timeout: timedelta
    ) -> tuple[Agreement, Place | None]:
        """Block until all ranks have arrived or gone: the agreement, and this rank's placement.

        The placement is ``None`` without a planner, and for a rank that the others take for gone.
        """
        if self._planner is None:
            return Agreement.from_json(self._store.wait(f"{iteration}/done", timeout)), None
        key = _placements_key(iteration, bitmap.group_of(initial_rank))
        agreed, placements = json.loads(self._store.wait(key, timeout))
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
        return Agreement.from_json(self._store.get(key))

    def _try_to_agree(self, iteration: int, gone_before: Collection[int]) -> None:
        roll = self._arrived(iteration, gone_before)
        present = roll.present()
        if present is None:
            return
        known = self.ranks_gone() | present | set(gone_before)
        if len(known) < self._initial_world_size:
            again = roll.again()
            if len(known | again) < self._initial_world_size:
                return
            present |= again
        if self._store.check([f"{iteration}/{'done' if self._planner is None else 'world'}"]):
            return  # another rank was as late as this one, and has done it
        gone = [Fault.from_json(line) for line in self._store.read_log("gone")]
        arrivals = list(map(Arrival.from_json, self._store.read_log(f"{iteration}/arrivals")))
        faults = without_repeats(self._faults(iteration))
        names = ("silent", "returned", "busy")
        silent, returned, busy = (self._first(iteration, what) for what in names)
        faults = with_hidden_cause(faults, silent, returned, busy)
        world = self._world_of(iteration)
        gone_ranks = frozenset(fault.initial_rank for fault in gone).union(gone_before)
        unrecorded = map(int, self._store.read_log(f"{iteration}/faulty"))
        proposal = Agreement(
            iteration,
            gone=gone_ranks,
            lost=gone_ranks - frozenset(gone_before),
            terminated=self._terminated(iteration, gone, gone_ranks, arrivals, world, gone_before),
            faults=tuple(condense(faults)),
            faulty=tuple(dict.fromkeys([*(f.initial_rank for f in faults), *unrecorded])),
            returning=self._returning(iteration, gone, gone_before, returned),
        )
        self._store.publish(f"{iteration}/done", proposal.to_json())
        if self._planner is not None:
            agreed = Agreement.from_json(self._store.get(f"{iteration}/done"))
            keys = dict.fromkeys(present, ()) | {a.initial_rank: a.keys for a in arrivals}
            self._publish_plan(iteration, self._planner(world, agreed, keys), agreed)
        self._forget(iteration - 2)

    def _terminated(
        self,
        iteration: int,
        gone: Collection[Fault],
        gone_ranks: frozenset[int],
        arrivals: Collection[Arrival],
        world: World | None,
        gone_before: Collection[int],
    ) -> frozenset[int]:
        if iteration == INITIAL and self.generation.number:
            return gone_ranks  # each rank has its number at launch again
        if self._planner is None:
            return numbers_claimed_and_left(iteration, gone, arrivals, gone_before)
        return numbers_lost(world, gone, gone_before)

    def _returning(
        self,
        iteration: int,
        gone: Collection[Fault],
        gone_before: Collection[int],
        returned: Fault | None,
    ) -> frozenset[int]:
        if self._waits_for_lost is None or iteration == INITIAL:
            return frozenset()
        lost = [fault for fault in gone if fault.initial_rank not in gone_before]
        left = {fault.initial_rank for fault in lost}.union(gone_before)
        announced = left & self.generations.announced()
        waits = self._waits_for_lost
        return to_return(lost, announced, waits=waits, returned=returned is not None)

    def missing(self, iteration: int, gone_before: Collection[int]) -> frozenset[int]:
        """The initial ranks that have neither come to the barrier after ``iteration`` nor gone."""
        there = self.ranks_gone() | self._arrived(iteration).signed() | set(gone_before)
        return frozenset(range(self._initial_world_size)).difference(there)

    def is_awaited(self, initial_rank: int) -> bool:
        """Whether that rank is expected, has not joined yet, and has not been given up."""
        if initial_rank in self.generation.absent or self._store.check([f"monitor/{initial_rank}"]):
            return False
        return initial_rank not in self.ranks_gone()

    @property
    def ranks_return(self) -> bool:
        """Whether lost ranks may come back."""
        return self._waits_for_lost is not None

    def is_over(self, iteration: int) -> bool:
        """Whether ``iteration`` has an outcome, or a rank has returned from the function in it."""
        return any(
            self._store.check([f"{iteration}/{key}"]) for key in ("outcome", "first-returned")
        )

    def _arrived(self, iteration: int, gone_before: Collection[int] = ()) -> Roll:
        name = f"{iteration}/arrived"
        return Roll(self._store, name, self._initial_world_size, gone_before)

    def _completed(self, iteration: int, active_world_size: int) -> Roll:
        return Roll(self._store, f"{iteration}/completed", active_world_size)

    def _faults(self, iteration: int) -> list[Fault]:
        lines = [line.split(" ", 1) for line in self._store.read_log(f"{iteration}/faults")]
        lines.sort(key=lambda line: int(line[0]))
        return [Fault.from_json(text) for _, text in lines]

    def _first(self, iteration: int, what: str) -> Fault | None:
        key = f"{iteration}/first-{what}"
        return Fault.from_json(self._store.get(key)) if self._store.check([key]) else None

    def ranks_gone(self) -> set[int]:
        """The initial ranks that have left the job by now, whether an agreement says so or not."""
        return set(map(int, self._store.read_log("gone/ranks")))

    def _world_of(self, iteration: int) -> World | None:
        """The world of ``iteration``; ``None`` where nothing is planned, and before the first."""
        if self._planner is None or iteration == INITIAL:
            return None
        is_first = iteration == self.generation.first_iteration
        return World.from_json(self._store.get(f"{INITIAL if is_first else iteration - 1}/world"))

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
        self._store.set_many(values | {f"{iteration}/world": plan.world})

    def _forget(self, iteration: int) -> None:
        # No rank reads it any more: none is more than one iteration behind the others.
        names = ("faults", "faults/counts", "faulty", "outcome", "arrivals", "done")
        later = ("arrived/again", "completed/again", "world")
        candidates = ("first-returned", "silent", "first-silent", "busy", "first-busy")
        self._delete(*(f"{iteration}/{name}" for name in (*names, *later, *candidates)))

    def outdated(
        self, iteration: int, kept_since: int | None = None, beside_since: int | None = None
    ) -> list[str]:
        """What process groups and calls inside iterations before ``iteration`` have left.

        Their keys are torch's and those of other ledgers: they have to be looked for.
        """
        found = []
        with contextlib.suppress(Exception):  # some stores cannot list keys
            for key in self._store.list_keys():
                if is_outdated(key, iteration, kept_since, beside_since):
                    found.append(key)
        return found

    def delete(self, keys: Iterable[str]) -> None:
        """Delete ``keys``, where the store can."""
        self._delete(*keys)

    def _delete(self, *keys: str) -> None:
        for key in keys:
            with contextlib.suppress(Exception):  # some stores cannot delete
                self._store.delete(key)

    # --- numbers on which all ranks have to agree ---------------------------------------------

    def agree_on(self, name: str, proposal: int) -> int:
        """The number that the first rank has proposed under ``name``."""
        self._store.publish(name, str(proposal))
        return int(self._store.get(name))

    # --- leaving the wrapper ------------------------------------------------------------------

    def check_out(self, expected: int) -> None:
        """Note that this rank leaves the wrapper; the last of ``expected`` releases the waiters."""
        if self._store.add("left", 1) >= expected:
            self._store.publish("all-left", "1")

    def wait_for_all_to_leave(self, timeout: timedelta) -> None:
        """Block until all have checked out."""
        self._store.wait("all-left", timeout)

    # --- addresses of the monitor processes ---------------------------------------------------

    def publish_address(self, initial_rank: int, address: Sequence[Any]) -> None:
        """Make known where this rank's monitor process listens.

        Raises ``NameSpaceUsed`` if the rank has done so before, before anything else is written:
        the keys of another job would be taken for those of this one, or it is still running.
        """
        ours = json.dumps(list(address))
        self._store.publish(f"monitor/{initial_rank}", ours)
        if self._store.get(f"monitor/{initial_rank}") != ours:
            raise NameSpaceUsed(
                f"rank {initial_rank} has joined a job under this name in this store before: give "
                "each job its own NCCLOPS_STORE_PREFIX, the same on all ranks, or its own store"
            )

    def address_of(self, initial_rank: int, timeout: timedelta) -> list[Any]:
        """Where that rank's monitor process listens; blocks until the rank has said so."""
        address: list[Any] = json.loads(self._store.wait(f"monitor/{initial_rank}", timeout))
        return address

    def vouch(self, initial_rank: int) -> None:
        """Say that this rank lives: its monitor process is not asked by any other."""
        self._store.add(f"vouches/{initial_rank}", 1, repeatable=True)

    def vouches(self, initial_rank: int) -> int:
        """How often that rank has said so."""
        return self._store.add(f"vouches/{initial_rank}", 0)

    def known_addresses(self, initial_ranks: Iterable[int]) -> list[list[Any]]:
        """Those of ``initial_ranks`` that have been published; does not block."""
        keys = [f"monitor/{rank}" for rank in initial_ranks]
        return [json.loads(self._store.get(key)) for key in keys if self._store.check([key])]


def _placements_key(iteration: int, group: int) -> str:
    return f"{iteration}/placements/{group}"
