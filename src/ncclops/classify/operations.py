"""The operations in which ranks were when torch's watchdog gave up, side by side.

A watchdog's time-out names its group, its operation's number in that group, what it is and its
size. Ranks of a group must agree on all of that for a number; where they do not, nobody was late.
Before torch 2.4 it named no group: then sizes may differ between the groups of pipeline stages,
which count alike, and only different kinds at one number say that the ranks disagreed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ncclops.classify.model import Hit

# [PG ID 0 PG GUID 0(default_pg) Rank 3] … WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=4, …
_OPERATION = re.compile(
    r"(?:PG GUID (?P<group>[\w()-]+) |\[)Rank \d+\][^\n]*?WorkNCCL\(SeqNum=(?P<number>\d+), "
    r"OpType=(?P<kind>\w+)(?:, NumelIn=(?P<size>\d+))?"
)
# Operations to which every rank gives as much; of the others a rank may have more than the next.
_EQUAL_SIZES = {"ALLREDUCE", "ALLREDUCE_COALESCED", "REDUCE", "BROADCAST"}


def disagreeing(hits: Iterable[Hit]) -> set[int]:
    """The orders of hits whose operation is another one than a different rank's of that number."""
    seen: dict[tuple[str | None, str], dict[tuple[str, str | None], list[Hit]]] = {}
    for hit in hits:
        if (found := _OPERATION.search(hit.text)) is not None:
            sized = found["group"] is not None and found["kind"] in _EQUAL_SIZES
            size = found["size"] if sized else None
            operations = seen.setdefault((found["group"], found["number"]), {})
            operations.setdefault((found["kind"], size), []).append(hit)
    return {
        hit.order
        for operations in seen.values()
        if len(operations) > 1 and len({h.rank for same in operations.values() for h in same}) > 1
        for same in operations.values()
        for hit in same
    }
