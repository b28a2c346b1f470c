"""What a barrier ends in, as values: the agreement, who arrived, the plan for the next world."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ncclops.restart._assignment.world import Place, World
from ncclops.restart.attribution import Fault, find_cause

# The barrier before the first iteration, and everything that goes wrong until then.
INITIAL = -1


@dataclass(frozen=True)
class Agreement:
    """How iteration ``iteration`` ended, the same on every rank.

    ``gone`` are the initial ranks that left the job up to now; ``lost`` those among them that left
    in this iteration, and ``terminated`` their numbers in it; ``returning`` those that have gone
    whose places new processes take, or are waited for; ``faults`` what happened in it,
    if that was much only the beginning; ``faulty`` all ranks it happened on, by initial number.
    ``brief``: in a large job, where all would read too much, most ranks know only the fault that
    caused the others, without traceback.
    """

    iteration: int
    gone: frozenset[int]
    lost: frozenset[int]
    terminated: frozenset[int]
    faults: tuple[Fault, ...]
    faulty: tuple[int, ...]
    brief: bool = False
    returning: frozenset[int] = frozenset()

    def in_brief(self) -> Agreement:
        """What every rank has to know of it."""
        cause = [replace(find_cause(self.faults), traceback=None)] if self.faults else []
        faulty = tuple(fault.initial_rank for fault in cause)
        return replace(self, faults=tuple(cause), faulty=faulty, brief=True)

    def to_json(self) -> str:
        """As the store holds it."""
        return json.dumps(
            {
                "iteration": self.iteration,
                "gone": ranges(self.gone),
                "lost": ranges(self.lost),
                "terminated": ranges(self.terminated),
                "returning": ranges(self.returning),
                "faults": [fault.to_json() for fault in self.faults],
                "faulty": self.faulty,
                "brief": self.brief,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Agreement:
        """The inverse of ``to_json``."""
        fields: dict[str, Any] = json.loads(text)
        return cls(
            fields["iteration"],
            gone=from_ranges(fields["gone"]),
            lost=from_ranges(fields["lost"]),
            terminated=from_ranges(fields["terminated"]),
            returning=from_ranges(fields["returning"]),
            faults=tuple(map(Fault.from_json, fields["faults"])),
            faulty=tuple(fields["faulty"]),
            brief=fields["brief"],
        )


def ranges(numbers: Collection[int]) -> list[list[int]]:
    """``numbers`` as first and last of each run: a host that is lost takes a run of ranks."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return runs


def from_ranges(runs: Iterable[Sequence[int]]) -> frozenset[int]:
    """The inverse of ``ranges``."""
    return frozenset(number for first, last in runs for number in range(first, last + 1))


@dataclass(frozen=True)
class Arrival:
    """A rank at the barrier: who, its number in the iteration and how many took part in that.

    ``keys`` are what its assignment has to know of it.
    """

    initial_rank: int
    rank: int
    world_size: int
    keys: tuple[str, ...] = ()

    def to_json(self) -> str:
        """One line, as the log in the store holds it."""
        return json.dumps([self.initial_rank, self.rank, self.world_size, *self.keys])

    @classmethod
    def from_json(cls, line: str) -> Arrival:
        """The inverse of ``to_json``."""
        initial_rank, rank, world_size, *keys = json.loads(line)
        return cls(initial_rank, rank, world_size, tuple(keys))


@dataclass(frozen=True)
class RestartPlan:
    """The planner's result: the next world as text, and what each rank that arrived gets."""

    world: str
    placements: Mapping[int, Place]


# (the world before, the agreement, who arrived and with which keys) -> Plan; must depend on
# nothing else.
Planner = Callable[[World | None, Agreement, Mapping[int, Sequence[str]]], RestartPlan]


def numbers_lost(
    world: World | None, gone: Iterable[Fault], gone_before: Collection[int]
) -> frozenset[int]:
    """The numbers in ``world`` of those that have gone since it began."""
    lost = {fault.initial_rank for fault in gone if fault.initial_rank not in gone_before}
    if world is None:  # no rank has been given another number yet
        return frozenset(lost)
    return frozenset(n for n, initial in enumerate(world.initial_ranks) if initial in lost)


def numbers_claimed_and_left(
    iteration: int,
    gone: Iterable[Fault],
    arrivals: Collection[Arrival],
    gone_before: Collection[int],
) -> frozenset[int]:
    """The numbers, in ``iteration``, of its members that have gone, where no rank plans for all.

    Most reports carry the number. A rank that died before it had taken its number in, or whose
    death was noticed from afar, has one of the numbers that no rank claims; which one it was
    makes no difference to those that remain.
    """
    lost = {fault.initial_rank: fault for fault in gone if fault.initial_rank not in gone_before}
    known = {
        rank: fault.rank
        for rank, fault in lost.items()
        if fault.rank is not None and fault.iteration == iteration
    }
    claimed = {arrival.initial_rank: arrival.rank for arrival in arrivals}
    known |= {rank: claimed[rank] for rank in lost.keys() & claimed.keys()}
    present = {number for rank, number in claimed.items() if rank not in lost}
    world_size = max((arrival.world_size for arrival in arrivals), default=0)
    free = sorted(set(range(world_size)) - present - set(known.values()))
    missing = sorted(lost.keys() - known.keys())
    return frozenset(known.values()) | frozenset(free[: len(missing)])
