"""Which ranks have arrived at a barrier, as bits of numbers that forty ranks share.

Bit *i* of a group's number stands for the group's rank *i*, which sets it when it arrives. The bits
from 40 on count the group's ranks that were lost. A rank sets its bit by adding to the number, and
the store answers with the sum, which shows whether the group may be complete: so arriving is one
message, and only the last rank of each group reads other groups' numbers: those of the forty groups
that its own belongs to, and one rank of those forty groups reads the numbers of all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

# The store adds in 64 bits with a sign: 23 are left for losses. Only ranks that count the same loss
# at the same moment count it twice.
RANKS_PER_KEY = 40
GROUPS_TOGETHER = 40
LOSS = 1 << RANKS_PER_KEY


def group_of(initial_rank: int) -> int:
    """The group of a rank, which names the key of its number."""
    return initial_rank // RANKS_PER_KEY


def groups(world_size: int) -> range:
    """All groups of ``world_size`` initial ranks."""
    return range(-(-world_size // RANKS_PER_KEY))


def beside(group: int, world_size: int) -> range:
    """The groups, ``group`` among them, that the last rank of each reads."""
    first = group - group % GROUPS_TOGETHER
    return range(first, min(first + GROUPS_TOGETHER, len(groups(world_size))))


def arrival(initial_rank: int) -> int:
    """What a rank adds to its group's number, once in each iteration."""
    return 1 << initial_rank % RANKS_PER_KEY


def arrived(group: int, number: int) -> Iterator[int]:
    """The ranks that have arrived, ascending."""
    first = group * RANKS_PER_KEY
    return (first + bit for bit in range(RANKS_PER_KEY) if number >> bit & 1)


def losses(number: int) -> int:
    """How many losses were counted."""
    return number >> RANKS_PER_KEY


def may_be_complete(number: int, expected: int) -> bool:
    """False if a rank has yet to arrive; true proves nothing, as losses may be counted twice."""
    return (number & (LOSS - 1)).bit_count() + losses(number) >= expected


def expected(group: int, world_size: int, gone_before: Collection[int]) -> int:
    """How many ranks of the group take part in an iteration that ``gone_before`` do not see."""
    first = group * RANKS_PER_KEY
    members = range(first, min(first + RANKS_PER_KEY, world_size))
    return sum(rank not in gone_before for rank in members)
