"""Snapshots over real faults: real processes, Gloo, and results that are equal to the last bit."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from ncclops.testing import Fault, JobFactory, JobResult

from .snapshot_programs import own_state, replicas, sharded

STEPS = 30


def restored(result: JobResult, iteration_from: int = 1) -> list[tuple[int | None, str]]:
    """(step, source) of each restore after the first, of all ranks."""
    found = []
    for rank in result.ranks:
        notes = [note.fields for note in result.notes_of("restored", rank)]
        found += [(each["step"], each["source"]) for each in notes[iteration_from:]]
    return found


@pytest.mark.slow
def test_an_exception_costs_one_step(ncclops_job: JobFactory) -> None:
    undisturbed = ncclops_job(replicas, world_size=2, args=(STEPS, 1)).run()
    fault = Fault.exception(rank=1, at="step", n=7)
    result = ncclops_job(replicas, world_size=2, args=(STEPS, 1), faults=[fault]).run()
    assert result.value == undisturbed.value
    assert restored(result) == [(6, "memory"), (6, "memory")]
