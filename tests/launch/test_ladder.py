"""The timeouts of a run keep their order, whatever a profile names."""

from __future__ import annotations

from datetime import timedelta

import pytest

from ncclops.errors import UsageError
from ncclops.launch.ladder import build_ladder
from ncclops.profiles import Timeouts, list_profiles, load_profiles

MINUTE = timedelta(minutes=1)


def test_the_rest_follows_the_group_timeout() -> None:
    ladder = build_ladder(Timeouts(process_group=100 * MINUTE))
    assert (ladder.soft, ladder.hard, ladder.barrier) == (80 * MINUTE, 90 * MINUTE, 120 * MINUTE)
    assert ladder.completion >= ladder.process_group


@pytest.mark.parametrize(
    "timeouts",
    [
        Timeouts(soft=9 * MINUTE, hard=8 * MINUTE),
        Timeouts(hard=20 * MINUTE, process_group=10 * MINUTE),
        Timeouts(barrier=5 * MINUTE),
    ],
)
def test_a_step_out_of_order_names_both_numbers(timeouts: Timeouts) -> None:
    with pytest.raises(UsageError, match=r"\(\d+m\) must be shorter than \w+ \(\d+m\)"):
        build_ladder(timeouts)


def test_every_shipped_profile_has_a_ladder() -> None:
    for summary in list_profiles():
        build_ladder(load_profiles([summary.name]).timeouts)
