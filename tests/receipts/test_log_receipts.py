"""Workers' output read as it passes: whole lines, whatever the pieces in which it comes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ncclops.receipts.log_receipts import PrintedReceipts
from ncclops.receipts.observation import Observation

RUN = Path("/run")
OUT = RUN / "ranks" / "3" / "stdout.log"
NANOGPT = b"iter 0: loss 4.1, time 200.00ms\niter 1: loss 4.0, time 100.00ms\n"


def steps(*pieces: bytes, end: bool = True) -> list[tuple[int, int | None]]:
    """Rank and step of what is seen in ``pieces``."""
    seen: list[tuple[int, int | None]] = []

    def deliver(rank: int, observations: Sequence[Observation]) -> None:
        seen.extend((rank, each.step) for each in observations if each.kind == "step")

    receipts = PrintedReceipts(RUN, deliver)
    receipts.follow({OUT: 3})
    for piece in pieces:
        receipts.feed(OUT, piece)
    if end:
        receipts.end()
    return seen


def test_steps_are_those_of_the_rank_whose_file_it_is() -> None:
    assert steps(NANOGPT) == [(3, 0), (3, 1)]


@given(st.lists(st.integers(0, len(NANOGPT)), max_size=6))
def test_the_pieces_make_no_difference(cuts: list[int]) -> None:
    bounds = [0, *sorted(cuts), len(NANOGPT)]
    pieces = [NANOGPT[a:b] for a, b in pairwise(bounds)]
    assert steps(*pieces) == steps(NANOGPT)


def test_an_unfinished_line_is_one_once_its_process_has_ended() -> None:
    assert steps(NANOGPT.rstrip(), end=False) == [(3, 0)]
    assert steps(NANOGPT.rstrip()) == [(3, 0), (3, 1)]


@pytest.mark.parametrize("end", [b"\n", b"\r", b"\r\n"])
def test_a_progress_bar_is_read_at_each_of_its_drawings(end: bytes) -> None:
    assert steps(NANOGPT.replace(b"\n", end), end=False) == [(3, 0), (3, 1)]


def test_what_never_ends_a_line_is_not_kept_for_ever() -> None:
    assert steps(b"x" * 200_000, b"\n", NANOGPT) == [(3, 0), (3, 1)]
