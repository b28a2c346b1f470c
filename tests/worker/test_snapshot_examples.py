"""The examples with snapshots go on to the same bits after a fault, under ``ncclops launch``."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.conftest import REPOSITORY, CompletedText

pytestmark = pytest.mark.slow

Ncclops = Callable[..., CompletedText]


def run(ncclops: Ncclops, example: str, fault: str, *arguments: str) -> str:
    """What a run of ``example`` prints, with ``fault`` in it."""
    done = ncclops(
        "launch", "--nproc-per-node", "2", "--profile", "local-cpu", "--tee", "all",
        REPOSITORY / "docs" / "examples" / f"{example}.py", *arguments,
        env={"SNAPSHOT_FAULT": fault, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "ncclops: receipt: healthy" in done.stderr
    return done.stdout


def result_of(output: str) -> str:
    (found,) = re.findall(r"result ([0-9a-f]{16})", output)
    return found


@pytest.mark.parametrize(
    "example",
    [
        pytest.param("snapshot_ddp", marks=pytest.mark.extended),
        pytest.param("snapshot_fsdp2", marks=pytest.mark.extended),
        "snapshot_trainer",
    ],
)
def test_a_fault_changes_no_bit_of_the_result(ncclops: Ncclops, example: str) -> None:
    undisturbed = run(ncclops, example, "none:0:0")
    assert undisturbed.count("no state to restore") == 2
    disturbed = run(ncclops, example, "raise:1:25")
    steps = re.findall(r"restored: step (\d+) from memory \(all ranks: memory 2\)", disturbed)
    assert len(steps) == 2, "in the same processes, each from its own memory"
    assert len(set(steps)) == 1
    assert 1 <= int(steps[0]) <= 25
    assert result_of(disturbed) == result_of(undisturbed)


@pytest.mark.extended
def test_fewer_ranks_have_other_shards_and_go_on_from_the_checkpoint(ncclops: Ncclops) -> None:
    output = run(ncclops, "snapshot_fsdp2", "kill:1:25", "--checkpoint-every", "10")
    (told,) = re.findall(r"restored: step 20 from checkpoint \(all ranks: checkpoint 1\).*", output)
    assert "nobody has the own state of rank 0" in told
    assert result_of(output)


def test_objects_that_are_kept_go_on_to_the_same_bits(ncclops: Ncclops) -> None:
    undisturbed = run(ncclops, "keep_going_ddp", "none:0:0")
    disturbed = run(ncclops, "keep_going_ddp", "raise:1:25")
    assert disturbed.count("begins at step 0") == 2
    steps = re.findall(r"goes on at step (\d+)", disturbed)
    assert len(steps) == 2
    assert len(set(steps)) == 1
    assert 1 <= int(steps[0]) <= 25
    assert result_of(disturbed) == result_of(undisturbed)
    killed = run(ncclops, "keep_going_ddp", "kill:1:25")
    (after,) = re.findall(r"rank 0 of 2 goes on at step (\d+)", killed)
    assert f"rank 1 of 2 begins at step {after}," in killed, "a new process, in its place"
    assert result_of(killed) == result_of(undisturbed)
