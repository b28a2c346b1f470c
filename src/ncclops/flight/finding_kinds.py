"""What a finding of the flight recorders is."""

from __future__ import annotations

from enum import StrEnum
from typing import Self


class FindingKind(StrEnum):
    """The kinds of findings, the gravest first: the order in which they explain each other.

    The values are what documents say.
    """

    RANK_DIED = "rank-died"
    ORDER_MISMATCH = "order-mismatch"
    OP_MISMATCH = "op-mismatch"
    SHAPE_MISMATCH = "shape-mismatch"
    DTYPE_MISMATCH = "dtype-mismatch"
    ROOT_MISMATCH = "root-mismatch"
    CROSS_GROUP_DEADLOCK = "cross-group-deadlock"
    EXTRA_CALL = "extra-call"
    NEVER_ARRIVED = "never-arrived"
    STALLED = "stalled"

    @classmethod
    def of_mismatch(cls, differs: str) -> Self:
        """Of calls that differ in ``differs``: order, op, shape, dtype or root."""
        return cls(f"{differs}-mismatch")

    @property
    def is_mismatch(self) -> bool:
        """Whether ranks made different calls."""
        return self in _MISMATCHES


_MISMATCHES = frozenset(
    {
        FindingKind.ORDER_MISMATCH,
        FindingKind.OP_MISMATCH,
        FindingKind.SHAPE_MISMATCH,
        FindingKind.DTYPE_MISMATCH,
        FindingKind.ROOT_MISMATCH,
    }
)
