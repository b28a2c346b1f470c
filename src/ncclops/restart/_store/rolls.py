"""Rolls: which ranks have come, each in one message, and who of them looks whether all have.

A rank that comes sets its bit in its group's number, and the sum shows whether it is the last of
the group: then it reads the numbers of all groups. Where there are more than forty groups, it reads
the numbers of the forty that its own belongs to, and only the first that sees all their ranks come
reads the others. That all have come stays true, so of the first ones of all forties the last sees
the whole. Should it die before it has read, the report of its death reads, and sees no less. Where
a loss was counted, each that sees enough counted goes on: the numbers alone prove nothing then, and
the first might itself be one that was reported before and is about to end.

A rank whose connection breaks while it sets its bit does not know whether the bit is set, and must
not add it twice. It writes itself into the log ``again``, and what is in there is counted like a
loss, maybe too often.

========================  =========================================================================
key, below the name       meaning
========================  =========================================================================
``<g>``                   which ranks of group *g* have come, and how many were lost meanwhile: see
                          ``_store.arrival_bitmap``
``again`` (log)           ranks whose connection broke when they set their bit
``all/<g>``               in jobs of more than 1,600 ranks: how many have seen that all ranks of the
                          40 groups from *g* have come
========================  =========================================================================
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from ncclops.restart._store import arrival_bitmap as bitmap
from ncclops.restart._store.client import AdditionUnknown, StoreClient


class Roll:
    """The roll ``name`` of ``size`` ranks, without ``absent``, which do not take part."""

    def __init__(
        self, store: StoreClient, name: str, size: int, absent: Collection[int] = ()
    ) -> None:
        self._store, self._name, self._size, self._absent = store, name, size, absent

    def sign(self, rank: int) -> int | None:
        """Note that ``rank`` has come: its group's number then.

        None: whether the number has it is not known. It is in the log, and to be counted.
        """
        try:
            return self._store.add(self._key(bitmap.group_of(rank)), bitmap.arrival(rank))
        except AdditionUnknown:
            self._store.append(f"{self._name}/again", str(rank))
            return None

    def again(self) -> set[int]:
        """The ranks that do not know whether their bit is set."""
        return set(map(int, self._store.read_log(f"{self._name}/again")))

    def count(self, ranks: Collection[int]) -> None:
        """See that ``ranks``, all who have set no bit or may not have, are counted."""
        for group, count in Counter(map(bitmap.group_of, ranks)).items():
            key = self._key(group)
            uncounted = count - bitmap.losses(self._store.add(key, 0))
            if uncounted > 0:
                self._store.add(key, uncounted * bitmap.LOSS, repeatable=True)

    def is_to_look(self, rank: int, number: int) -> bool:
        """Whether ``rank``, whose bit made ``number`` of its group's, looks at all groups.

        False if a rank has yet to come, or another one looks.
        """
        group = bitmap.group_of(rank)
        if not bitmap.may_be_complete(number, bitmap.expected(group, self._size, self._absent)):
            return False
        beside = bitmap.beside(group, self._size)
        if beside == bitmap.groups(self._size):
            return True
        numbers = self._numbers(beside)
        if numbers is None:
            return False
        if any(map(bitmap.losses, numbers.values())):
            return True
        try:
            return self._store.add(self._all_come(beside), 1) == 1
        except AdditionUnknown:
            return True

    def present(self) -> set[int] | None:
        """Which ranks have set their bits; None if the numbers show that some have yet to."""
        numbers = self._numbers(bitmap.groups(self._size))
        if numbers is None:
            return None
        return {rank for group, number in numbers.items() for rank in bitmap.arrived(group, number)}

    def signed(self) -> set[int]:
        """Which ranks have set their bits so far, or do not know."""
        there = self.again()
        for group in bitmap.groups(self._size):
            number = self._store.add(self._key(group), 0, repeatable=True)
            there.update(bitmap.arrived(group, number))
        return there

    def signed_beside(self, ranks: Collection[int]) -> set[int]:
        """Like ``signed``, of the groups of ``ranks`` alone, and of forty at most."""
        there = self.again()
        for group in sorted(set(map(bitmap.group_of, ranks)))[: bitmap.GROUPS_TOGETHER]:
            for number in self._store.read_counts([self._key(group)]) or ():
                there.update(bitmap.arrived(group, number))
        return there

    def keys_of(self, rank: int) -> list[str]:
        """The keys that the first of its group to come to a later roll deletes of an old one."""
        group = bitmap.group_of(rank)
        beside = bitmap.beside(group, self._size)
        is_one_of_forties = group == beside.start and beside != bitmap.groups(self._size)
        return [self._key(group), *([self._all_come(beside)] if is_one_of_forties else [])]

    def _numbers(self, groups: range) -> dict[int, int] | None:
        """Those of ``groups`` with ranks; None if they show that some have yet to come."""
        counts = {group: bitmap.expected(group, self._size, self._absent) for group in groups}
        expected = {group: count for group, count in counts.items() if count}
        numbers = self._store.read_counts([self._key(group) for group in expected])
        if numbers is None or not all(map(bitmap.may_be_complete, numbers, expected.values())):
            return None
        return dict(zip(expected, numbers, strict=True))

    def _key(self, group: int) -> str:
        return f"{self._name}/{group}"

    def _all_come(self, beside: range) -> str:
        return f"{self._name}/all/{beside.start}"
