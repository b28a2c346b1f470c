"""Ranks wait in vain once all that are left wait for peers, and none of them moves."""

from __future__ import annotations

import pytest

from ncclops.health.in_vain import InVain, Wait

Looks = list[tuple[float, dict[int, Wait]]]


@pytest.mark.parametrize(
    ("looks", "in_vain"),
    [
        pytest.param(
            [(t, {1: Wait(7, 2.0), 2: Wait(9, 5.0)}) for t in range(4)], True, id="all wait"
        ),
        pytest.param([(t, {1: Wait(7, 2.0)}) for t in range(3)], False, id="not for long"),
        pytest.param(
            [(t, {1: Wait(7, 2.0), 2: Wait(0, 5.0)}) for t in range(9)], False, id="one does not"
        ),
        pytest.param([(t, {1: Wait(7 + t // 3, 2.0)}) for t in range(9)], False, id="it moves"),
        pytest.param(
            [(t, {1: Wait(7, 2.0 + t / 5)}) for t in range(9)], False, id="it uses CPU time"
        ),
        pytest.param([(t, {1: Wait(7, None)}) for t in range(9)], False, id="it cannot be seen"),
        pytest.param(
            [(0, {1: Wait(7, 2.0), 2: Wait(0, 5.0)}), *((t, {1: Wait(7, 2.0)}) for t in (1, 2, 3))],
            False,
            id="another one has just ended",
        ),
        pytest.param([(t, {}) for t in range(9)], False, id="none is left"),
    ],
)
def test_when_ranks_wait_in_vain(looks: Looks, *, in_vain: bool) -> None:
    judge = InVain()
    assert [judge.look(waits, now) for now, waits in looks][-1] is in_vain
