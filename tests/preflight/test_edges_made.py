"""One to three faults at once among hosts made up by seed: no other host or edge is convicted."""

from __future__ import annotations

import pytest

from tests.preflight.made_edges import judged

# Each was judged wrongly once: ports beside each other taken for all, losses for a rule or an MTU,
# a round that ended early for a recovery, half the edges slow.
SEEDS = (
    8,
    12,
    17,
    21,
    28,
    34,
    39,
    49,
    53,
    55,
    80,
    113,
    131,
    138,
    147,
    148,
    207,
    221,
    256,
    395,
    1142,
    2310,
)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_planted_is_found_and_nothing_else(seed: int) -> None:
    ((_, made, wrong, lacking),) = judged([seed])
    assert (wrong, lacking) == ([], []), [each.name for each in made.faults]
