"""Ranks in few words."""

from __future__ import annotations

from collections.abc import Collection


def rank_list(ranks: Collection[int]) -> str:
    """``0, 1, 3-7``: in order, three and more in a row as a range."""
    runs: list[tuple[int, int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    return ", ".join(_run(first, last) for first, last in runs)


def ranks_named(ranks: Collection[int]) -> str:
    """``rank 3``, or ``ranks 0, 3-7``."""
    return f"rank{'s' * (len(ranks) != 1)} {rank_list(ranks)}"


def _run(first: int, last: int) -> str:
    if first == last:
        return str(first)
    return f"{first}{'-' if last > first + 1 else ', '}{last}"
