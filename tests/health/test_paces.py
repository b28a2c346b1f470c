"""The rank that waits least is the one that the others wait for, if it is more than noise."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from ncclops.health.paces import LASTS_S, PaceWatch, RankPace, compare
from ncclops.health.stragglers import ADVICE, Straggler
from ncclops.record import receipt_records


def paces(*waited: float, error: float = 0.0, at: float = 1000.0) -> dict[int, RankPace]:
    """A pace of each rank, with twenty fresh units of a second each before ``at``."""
    return {
        rank: RankPace(
            rank=rank,
            iteration=0,
            waited=share,
            error=error,
            first=3,
            since=at - 20,
            at=at,
            fresh=20,
        )
        for rank, share in enumerate(waited)
    }


def test_a_rank_forty_percent_slower() -> None:
    """Steps of 70 ms: the others compute for 50 and wait for 20."""
    found = paces(2 / 7, 0.0, 2 / 7, 2 / 7)
    ratios, certain = zip(*(compare(rank, found) for rank in range(3)), strict=True)
    assert ratios == pytest.approx((1.0, 1.4, 1.0))
    assert certain == (False, True, False)


def test_of_two_ranks_the_faster_one_is_the_measure() -> None:
    assert compare(0, paces(0.0, 0.2))[0] == pytest.approx(1.25)
    assert compare(1, paces(0.0, 0.2))[0] == pytest.approx(1.0)


def test_the_transfer_is_no_waiting() -> None:
    """All spend half of the step in collectives, and two wait there for a tenth of it."""
    assert compare(1, paces(0.6, 0.5, 0.6))[0] == pytest.approx(1 / 0.9)


def test_a_lead_within_its_error_is_none() -> None:
    assert compare(1, paces(0.1, 0.0, 0.1, error=0.01))[1]
    assert not compare(1, paces(0.1, 0.0, 0.1, error=0.02))[1]


def test_one_rank_alone_is_compared_with_nobody() -> None:
    assert compare(0, paces(0.0)) == (1.0, False)


def test_stages_of_a_pipeline_are_not_compared_with_each_other() -> None:
    """Ranks 0 and 1 are one stage, 2 and 3 the next, which has less to do; rank 1 is slow."""
    found = paces(0.2, 0.0, 0.5, 0.5)
    stages = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}
    of_stages = {
        rank: RankPace(rank=rank, iteration=0, waited=pace.waited, error=0.0, peers=stages[rank])
        for rank, pace in found.items()
    }
    ratios = {rank: compare(rank, of_stages)[0] for rank in of_stages}
    assert ratios == {rank: pytest.approx(1.25 if rank == 1 else 1.0) for rank in range(4)}
    nobody = {
        rank: RankPace(rank=rank, iteration=0, waited=pace.waited, error=0.0, peers=())
        for rank, pace in found.items()
    }
    assert compare(1, nobody) == (1.0, False), "a stage of one rank has nobody like it"


def watched(
    watch: PaceWatch, *waited: float, since: float, until: float, elsewhere: Sequence[float] = ()
) -> list[Straggler]:
    """What is found while ranks show these shares every 20 s."""
    found = []
    at = since
    while at < until:
        other = [
            RankPace(rank=100 + number, iteration=0, waited=share, error=0.0)
            for number, share in enumerate(elsewhere)
        ]
        for pace in paces(*waited, at=at).values():
            found += watch.saw(pace, other)
        at += 20
    return found


def test_a_chronic_straggler_is_said_once_and_when_it_is_over() -> None:
    watch = PaceWatch()
    assert watched(watch, 0.3, 0.3, 0.3, since=0, until=100) == []
    (slow,) = watched(watch, 0.3, 0.1, 0.3, since=100, until=400)
    assert (slow.rank, slow.kind, slow.ratio, slow.measured) == (1, "chronic", 1.25, "waiting")
    assert slow.advice == ADVICE
    assert (slow.since, slow.over_s) == (90.0, 70.0), "a median changes late"
    assert (slow.steps_slow, slow.steps_compared) == (80, 180)
    assert watch.suspected(1)
    (over,) = watched(watch, 0.3, 0.3, 0.3, since=400, until=500)
    assert (over.rank, over.kind) == (1, "over")
    assert over.over_s == 290.0
    assert not watch.suspected(1)
    assert watch.finish() == []


def test_what_passes_within_a_minute_is_no_straggler() -> None:
    watch = PaceWatch()
    for number in range(10):
        begin = 200.0 * number
        assert watched(watch, 0.3, 0.1, since=begin, until=begin + LASTS_S - 1) == []
        assert watched(watch, 0.1, 0.3, since=begin + 100, until=begin + 100 + LASTS_S - 1) == []
    assert watch.finish() == [], "slow now and then, each of them"


def test_who_is_slow_stays_slow_until_the_lead_is_half_the_threshold() -> None:
    watch = PaceWatch(threshold=0.1)
    (slow,) = watched(watch, 0.15, 0.0, since=0, until=100)
    assert slow.rank == 1
    assert watched(watch, 0.07, 0.0, since=100, until=200) == []
    (over,) = watched(watch, 0.04, 0.0, since=200, until=300)
    assert over.kind == "over"


def test_a_short_run_is_judged_at_its_end() -> None:
    watch = PaceWatch()
    assert watched(watch, 0.3, 0.0, since=0, until=20) == []
    (slow,) = watch.finish()
    assert (slow.rank, slow.kind, slow.since, slow.over_s) == (1, "chronic", -20.0, 20.0)


def test_ranks_of_other_nodes_are_compared() -> None:
    watch = PaceWatch()
    (slow,) = watched(watch, 0.0, since=0, until=100, elsewhere=[0.3, 0.3])
    assert slow.rank == 0
    assert watched(PaceWatch(), 0.3, since=0, until=100, elsewhere=[0.0, 0.3]) == []


def test_a_new_start_of_the_script_begins_anew() -> None:
    watch = PaceWatch()
    watched(watch, 0.3, 0.0, since=0, until=40)
    again = RankPace(rank=0, iteration=1, waited=0.3, error=0.0, at=41.0, fresh=20)
    assert watch.saw(again) == []
    assert watch.saw(paces(0.0, 0.0, at=42.0)[1]) == [], "of the earlier start"
    assert watch.finish() == []


def test_noise_makes_no_straggler() -> None:
    """Ranks that come last by chance, 5 % of a step each way, over a day of such windows."""
    noise = random.Random(5)
    watch = PaceWatch()
    for look in range(2000):
        shares = [0.3 + noise.gauss(0, 0.01) for _ in range(8)]
        for pace in paces(*shares, error=0.01, at=20.0 * look).values():
            assert watch.saw(pace) == []
    assert watch.finish() == []


def test_a_pace_is_what_its_record_says() -> None:
    line = (
        '{"ts": 9.5, "kind": "pace", "iteration": 2, "unit": "update", "number": 12, "first": 3,'
        ' "since": 2.5, "units": 10, "fresh": 10, "seconds": 0.7, "waited": 0.3, "error": 0.01,'
        ' "peers": [1, 3]}'
    )
    record = receipt_records.decode(line)
    assert isinstance(record, receipt_records.PaceRecord)
    pace = RankPace.of(3, record)
    assert (pace.rank, pace.iteration, pace.unit, pace.at, pace.peers) == (
        3,
        2,
        "update",
        9.5,
        (1, 3),
    )
    assert pace.differs(None)
    assert not pace.differs(pace)
    assert pace.differs(RankPace(rank=3, iteration=2, waited=0.32, error=0.0, peers=(1, 3)))
