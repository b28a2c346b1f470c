"""``scripts/simulate_goodput.py``: what it simulates agrees with what can be computed."""

from __future__ import annotations

import dataclasses
import math
import random
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.scripts_of_repository import load_script

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
DAY_S = 86400.0


@pytest.fixture(scope="module")
def simulation() -> ModuleType:
    return load_script("simulate_goodput")


@pytest.fixture(scope="module")
def inputs(simulation: ModuleType) -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads(simulation.INPUTS.read_text(encoding="utf-8"))
    return found


def test_a_job_that_restarts_from_checkpoints_is_as_fast_as_computed(
    simulation: ModuleType, inputs: dict[str, Any]
) -> None:
    """Daly's complete model (2006): faults at a constant rate, in recoveries and saves too."""
    job = simulation.job_of(inputs, "checkpoint", "llama3", 16384)
    job = dataclasses.replace(job, mix={"node": 1.0}, rate=1 / 3000, checkpoint_interval=900.0)
    recovery = sum(job.times[name] for name in ("job_detect", "job_requeue", "checkpoint_load"))
    a_segment = job.checkpoint_interval + job.times["checkpoint_stall"]
    takes = math.exp(job.rate * recovery) * (math.exp(job.rate * a_segment) - 1) / job.rate
    length = 40_000 / job.rate
    outcome = simulation.Run(job, length, random.Random(0)).play()
    # 40,000 faults: the simulated share is off by some thousandths.
    assert outcome.useful / length == pytest.approx(job.checkpoint_interval / takes, rel=0.01)


@pytest.mark.parametrize("mix", ["llama3", "byterobust"])
def test_no_second_is_lost_or_counted_twice(
    simulation: ModuleType, inputs: dict[str, Any], mix: str
) -> None:
    length = 20 * DAY_S
    for way in simulation.WAYS:
        for gpus in (512, 16384):
            job = simulation.job_of(inputs, way, mix, gpus)
            outcome = simulation.Run(job, length, random.Random(gpus)).play()
            assert outcome.useful + sum(outcome.lost.values()) == pytest.approx(length)
            assert all(seconds >= -1e-6 for seconds in outcome.lost.values())
            assert sum(job.mix.values()) == pytest.approx(1)


def test_without_faults_only_checkpoints_and_snapshots_cost(
    simulation: ModuleType, inputs: dict[str, Any]
) -> None:
    for way in simulation.WAYS:
        job = dataclasses.replace(simulation.job_of(inputs, way, "llama3", 512), rate=1e-15)
        outcome = simulation.Run(job, DAY_S, random.Random(0)).play()
        assert {name for name, lost in outcome.lost.items() if lost} <= {"checkpoints", "snapshots"}


def test_every_figure_says_where_it_is_from(inputs: dict[str, Any]) -> None:
    """And the causes of Llama 3's table are as many as its interruptions."""
    figures = [inputs["rate"], *inputs["mix"].values()]
    for table in ("times", "shares", "nodes"):
        figures += inputs[table].values()
    for each in figures:
        assert each["basis"] in ("measured", "published", "assumed")
        assert each["source"]
    assert all(each["source"] for each in inputs["reported"])
    counts = sum(cause["count"] for cause in inputs["mix"]["llama3"]["causes"])
    assert counts == inputs["rate"]["interruptions"]


def test_tables_are_read_between_their_sizes(simulation: ModuleType) -> None:
    table = [[100, 1.0], [10000, 100.0]]
    at = [simulation.value_at(table, gpus) for gpus in (10, 100, 1000, 10000, 10**6)]
    assert at == pytest.approx([1, 1, 10, 100, 100])
    assert simulation.value_at(7.0, 512) == 7
