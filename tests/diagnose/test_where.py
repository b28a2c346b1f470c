"""`ncclops where` looks at running jobs and leaves them as they are."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ncclops.record import snapshot_files
from ncclops.record.paths import RunPaths
from tests.conftest import CompletedText
from tests.diagnose.conftest import DEADLINE_S, LINE_OF, read, until
from tests.lanes import Lane, lanes
from tests.launch.conftest import Background

Ncclops = Callable[..., CompletedText]
Profile = Callable[..., Path]
Start = Callable[..., Background]


def launch(start: Start, profile: Path, training: Path, fault: str, ranks: int = 2) -> Background:
    """A job of ``ranks`` that stands still, under its timeouts for long enough."""
    os.environ["FAULT"] = fault
    try:
        options = ("--nproc-per-node", str(ranks), "--run-dir", "runs/hung", "--profile", profile)
        return start("launch", *options, training)
    finally:
        del os.environ["FAULT"]


def look(ncclops_in_process: Ncclops, *arguments: str) -> dict[str, Any]:
    done = ncclops_in_process("where", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def until_the_others_wait(
    ncclops_in_process: Ncclops, run: Path, *ranks: int, line: int = LINE_OF["dist.all_reduce"]
) -> dict[str, Any]:
    """Look until ``ranks`` wait in ``line``: the fault comes a moment before that."""

    def looked() -> dict[str, Any] | None:
        seen = look(ncclops_in_process)
        at = {each["rank"]: each["frame"] and each["frame"]["line"] for each in seen["ranks"]}
        return seen if all(at[rank] == line for rank in ranks) else None

    until((run.parent.parent / "faulted").exists, "the fault")
    return until(looked, "the others to wait")


@lanes("nccl", extended=("gloo",))
@pytest.mark.slow
def test_a_hang_is_seen_and_the_job_goes_on(
    ncclops_in_process: Ncclops,
    background: Start,
    training: Path,
    profile: Profile,
    tmp_path: Path,
    lane: Lane,
) -> None:
    """On a GPU it is the device that waits for the others, and the main thread for the device."""
    waits = LINE_OF[".item" if lane.needs_gpus else "dist.all_reduce"]
    job = launch(background, profile("5m", "6m"), training, "hang:1", ranks=3)
    run = tmp_path / "runs" / "hung"
    seen = until_the_others_wait(ncclops_in_process, run, 0, 2, line=waits)
    assert seen["schema"] == "ncclops.where/1"
    assert (seen["answered"], seen["silent"], seen["missing"]) == ([0, 1, 2], [], [])
    at = {each["rank"]: each["frame"]["line"] for each in seen["ranks"]}
    assert at == {0: waits, 1: LINE_OF["time.sleep"], 2: waits}
    assert [each["ranks"] for each in seen["clusters"]] == [[0, 2], [1]]

    def last() -> list[tuple[int, bool]]:
        ranks = look(ncclops_in_process, "runs/hung")["ranks"]
        return [
            (each["last_operation"]["seq"], each["last_operation"]["pending"]) for each in ranks
        ]

    # torch's watchdog lets go of what is completed ten times a second.
    until(lambda: not last()[1][1], "rank 1's operation to be let go of")
    assert last() == [(7, True), (6, False), (7, True)]
    taken = tmp_path / seen["pictures"]
    assert set(snapshot_files.COMPLETE) <= {
        p.name for p in snapshot_files.rank_dir(taken, 0).iterdir()
    }

    people = ncclops_in_process("where", "runs/hung")
    assert "2 ranks (0, 2)" in people.stdout
    assert "last entered all_reduce number 7 of default_pg, not completed" in people.stdout

    (tmp_path / "go-on").touch()
    assert job.wait(DEADLINE_S) == 0
    for rank in range(3):
        assert (run / "ranks" / str(rank) / "stdout.log").read_text() == "finished\n"
    assert not (run / "incidents").exists(), "a look is no fault"


@pytest.mark.slow
@pytest.mark.extended
def test_a_rank_that_holds_its_gil_is_seen(
    ncclops_in_process: Ncclops, background: Start, training: Path, profile: Profile, tmp_path: Path
) -> None:
    job = launch(background, profile("5m", "6m"), training, "gil:1")
    run = tmp_path / "runs" / "hung"
    seen = until_the_others_wait(ncclops_in_process, run, 0)
    assert (seen["answered"], seen["silent"]) == ([0], [1])
    (silent,) = [each for each in seen["ranks"] if each["rank"] == 1]
    assert silent["frame"]["line"] == LINE_OF["sleep(1000)"]
    assert "GIL" in silent["reason"]
    # Twice the signal, and the process is as it was.
    assert look(ncclops_in_process, "runs/hung")["silent"] == [1]
    pid = read(RunPaths(run).rank(1).snapshot_server)["pid"]
    os.kill(pid, 0)
    job.send_signal(signal.SIGTERM)
    job.wait(DEADLINE_S)


@pytest.mark.slow
def test_a_stopped_rank_is_seen_from_outside(
    ncclops_in_process: Ncclops, background: Start, training: Path, profile: Profile, tmp_path: Path
) -> None:
    """It must not find a signal waiting for it when it goes on."""
    job = launch(background, profile("5m", "6m"), training, "stop:1")
    run = tmp_path / "runs" / "hung"
    seen = until_the_others_wait(ncclops_in_process, run, 0)
    assert (seen["answered"], seen["missing"]) == ([0], [1])
    (stopped,) = [each for each in seen["ranks"] if each["rank"] == 1]
    assert stopped["state"] == "stopped"
    os.kill(read(RunPaths(run).rank(1).snapshot_server)["pid"], signal.SIGCONT)
    assert job.wait(DEADLINE_S) == 0
