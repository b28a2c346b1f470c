"""One to three faults at once among hosts made up by seed: no other host or edge is convicted."""

from __future__ import annotations

import pytest

from tests.preflight.made_edges import judged, with_losses, with_many_ranges

# Each was judged wrongly once: ports beside each other taken for all, losses for a rule or an MTU,
# a round that ended early for a recovery, half the edges slow, a lossy group for one that is dead,
# a host with little bandwidth for the other end of a lossy edge, hosts for their subnet, a rule
# without state for two edges.
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
    5009,
    5041,
    5110,
    5251,
    6065,
    6135,
    20119,
    31135,
    31209,
    31300,
    31324,
    31851,
    50193,
    50485,
    20114,
    20135,
    20161,
    20228,
    20372,
    20133,
    20139,
    20555,
    20756,
    30060,
    30096,
    30210,
    31212,
    31348,
    33034,
    41172,
    41016,
    41217,
    41276,
    41318,
    41398,
    42116,
    42120,
    71159,
    71208,
    81206,
    81355,
)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_planted_is_found_and_nothing_else(seed: int) -> None:
    ((_, made, wrong, lacking),) = judged([seed])
    assert (wrong, lacking) == ([], []), [each.name for each in made.faults]


def test_a_host_of_a_lossy_group_is_not_convicted() -> None:
    """Nothing tells its losses from those of its subnet: of the other host there nothing is known,
    as large packets are lost as well."""
    ((_, _, wrong, _),) = judged([6147])
    assert wrong == []


@pytest.mark.parametrize("ranges", [6, 12, 20])
@pytest.mark.parametrize("seed", range(4))
def test_a_firewall_of_many_ranges_without_state_is_one_cause(seed: int, ranges: int) -> None:
    """Beside an edge that fails for itself. Answers are dropped as well, here and there."""
    verdict = with_many_ranges(seed, ranges).verdict()
    found = {(each.kind, each.shape, each.a) for each in verdict.causes if each.severity == "FAIL"}
    assert found == {("ports", "host-in", (1,)), ("unreachable", "edge", (2,))}


@pytest.mark.parametrize("rate", [0.2, 0.3])
@pytest.mark.parametrize("seed", range(3))
def test_ports_that_are_blocked_are_told_beside_what_their_host_loses(
    seed: int, rate: float
) -> None:
    """And losses alone are no rule for ports."""
    for low, high in ((50000, 65535), (0, 0)):
        verdict = with_losses(seed, rate, low, high).verdict()
        found = {(each.kind, each.shape, each.a) for each in verdict.causes}
        ports = {("ports", "host-in", (1,))} if high else set()
        assert found == {("loss", "host", (1,)), *ports}
