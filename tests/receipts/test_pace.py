"""How much a rank waits is summed over units of work: steps, else updates, else stretches."""

from __future__ import annotations

from typing import Any

import pytest

from ncclops.receipts.pace import LEAST_UNITS, Pace, Unit, UnitKind

SECOND = 1_000_000_000


class Rank:
    """A rank whose units take a second, of which it waits for a quarter."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.pace = Pace(self.records.append)
        self.now = 0

    def run(self, units: int, kind: UnitKind = "step", waited_s: float = 0.25) -> None:
        for _ in range(units):
            self.now += 1
            if not self.pace.ends(kind, self.now * SECOND):
                continue
            length, counts = self.pace.begin(self.now * SECOND)
            if counts:
                at = 1000.0 + self.now
                self.pace.add(Unit(kind, self.now, at, length / SECOND, waited_s))


def test_the_first_units_do_not_count_and_a_record_has_ten() -> None:
    rank = Rank()
    rank.run(LEAST_UNITS + 1)
    assert rank.records == []
    rank.run(1)
    (record,) = rank.records
    assert record == {
        "unit": "step",
        "number": 12,
        "first": 3,
        "since": 1003.0,
        "units": 10,
        "fresh": 10,
        "seconds": 1.0,
        "waited": 0.25,
        "error": 0.0,
    }


def test_records_are_about_the_last_fifty_units_and_say_how_many_are_new() -> None:
    rank = Rank()
    rank.run(62)
    rank.run(60, waited_s=0.5)
    assert {record["fresh"] for record in rank.records} == {10}
    assert [record["units"] for record in rank.records[:6]] == [10, 20, 30, 40, 50, 50]
    assert rank.records[5]["waited"] == 0.25
    assert rank.records[-1]["waited"] == 0.5
    assert rank.records[-1]["first"] == 73


def test_a_single_odd_unit_changes_nothing() -> None:
    rank = Rank()
    rank.run(7)
    rank.run(1, waited_s=1.0)
    rank.run(4)
    assert rank.records[0]["waited"] == 0.25


def test_units_with_a_declared_phase_do_not_count() -> None:
    rank = Rank()
    rank.run(7)
    rank.pace.phase(begins=True)
    rank.run(20, waited_s=0.0)
    rank.pace.phase(begins=False)
    rank.run(6)
    (record,) = rank.records
    assert (record["first"], record["number"], record["error"]) == (3, 33, 0.0)


@pytest.mark.parametrize("better", ["update", "step"])
def test_the_best_units_that_a_script_shows_are_taken(better: UnitKind) -> None:
    rank = Rank()
    rank.run(20, "stretch")
    rank.run(15, better)
    rank.run(15, "stretch")
    assert [record["unit"] for record in rank.records] == ["stretch", better]


def test_updates_in_quick_succession_are_one_unit() -> None:
    pace = Pace(lambda fields: None)
    assert pace.ends("update", SECOND)
    pace.begin(SECOND)
    assert not pace.ends("update", SECOND + 1_000_000)
    assert pace.ends("update", SECOND + 60_000_000)
    assert pace.ends("step", SECOND + 1_000_000), "a step is what the script says it is"


def test_nothing_is_left_of_an_earlier_start() -> None:
    rank = Rank()
    rank.run(11)
    rank.pace.restart()
    rank.run(11)
    assert rank.records == []
    rank.run(1)
    assert rank.records[0]["first"] == 14
