"""What a fault leaves behind, of real jobs: every rank's snapshot, or why there is none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ncclops.record import snapshots
from ncclops.record.paths import INCIDENT
from tests.conftest import CompletedText
from tests.diagnose.conftest import LINE_OF, read

Ncclops = Callable[..., CompletedText]
Profile = Callable[..., Path]

RANKS = 4
IN_PLACE = ("--nproc-per-node", str(RANKS), "--run-dir", "run")


def told(ncclops: Ncclops, *arguments: str) -> dict[str, Any]:
    done = ncclops("incident", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def expect_complete(incident: Path, of_the_rank: dict[int, set[str]]) -> None:
    """Each rank left all its files, but for those that its missing.json explains."""
    for rank in range(RANKS):
        directory = snapshots.rank_dir(incident, rank)
        have = {path.name for path in directory.iterdir()}
        absent = of_the_rank.get(rank, set())
        assert set(snapshots.COMPLETE) - have == absent, f"rank {rank}: {have}"
        if absent:
            missing = read(directory / snapshots.MISSING)
            assert missing["reason"]
            assert set(missing["files"]) >= absent


@pytest.mark.slow
def test_an_exception(ncclops: Ncclops, training: Path, profile: Profile, tmp_path: Path) -> None:
    done = ncclops(
        "launch", *IN_PLACE, "--profile", profile("20s", "30s"), training, env={"FAULT": "raise:1"}
    )
    assert done.returncode == 0, done.stderr
    incident = tmp_path / "run" / "incidents" / "0"
    expect_complete(incident, {})
    record = read(incident / INCIDENT)
    assert record["cause"] == "exception"
    assert record["phases_ms"]["collect"] > 0
    groups = read(snapshots.rank_dir(incident, 0) / snapshots.GROUPS)
    (world,) = groups
    assert (world["desc"], world["ranks"]) == ("default_pg", [0, 1, 2, 3])
    assert world["last_op"]["op"] == "all_reduce"
    assert world["last_enqueued"] == world["last_op"]["seq"] >= 6
    flight = read(snapshots.rank_dir(incident, 0) / snapshots.FLIGHT)
    assert flight["rank"] == 0
    assert flight["source"] == "_dump_fr_trace"
    entries = flight["dump"]["entries"]
    assert [entry["collective_seq_id"] for entry in entries] == list(range(1, len(entries) + 1))
    assert any(frame["name"] == "reduce_gradients" for frame in entries[-1]["frames"])
    process = read(snapshots.rank_dir(incident, 0) / snapshots.PROCESS)
    assert process["source"] == "guardian"
    assert process["threads"][0]["tid"] == process["pid"] == flight["pid"]

    page = told(ncclops, "run")
    assert page["schema"] == "ncclops.incident/1"
    assert page["culprit"]["rank"] == 1
    assert page["culprit"]["frame"]["line"] == LINE_OF["raise Runtime"]
    assert "RuntimeError: out of the blue" in page["sentence"]
    assert page["classification"]["class"] == "user-error"
    assert page["decision"]["what"].startswith("restarted in place, on all 4 ranks")


@pytest.mark.slow
def test_a_hang(ncclops: Ncclops, training: Path, profile: Profile, tmp_path: Path) -> None:
    done = ncclops("launch", *IN_PLACE, "--profile", profile(), training, env={"FAULT": "hang:2"})
    assert done.returncode == 0, done.stderr
    incident = tmp_path / "run" / "incidents" / "0"
    expect_complete(incident, {})
    page = told(ncclops, "run", "0")
    assert page["culprit"]["rank"] == 2
    assert page["culprit"]["frame"]["line"] == LINE_OF["time.sleep"]
    assert (
        page["culprit"]["host"] == read(snapshots.rank_dir(incident, 2) / snapshots.FLIGHT)["host"]
    )
    assert "rank 2 never entered all_reduce #7" in page["sentence"]
    at = {tuple(each["ranks"]): each["frame"]["line"] for each in page["clusters"]}
    assert at[2,] == LINE_OF["time.sleep"]
    assert LINE_OF["dist.all_reduce"] in at.values()
    people = ncclops("incident", "run")
    assert people.returncode == 0
    assert "what to do next" in people.stdout


@pytest.mark.slow
def test_a_hang_with_the_gil_held(
    ncclops: Ncclops, training: Path, profile: Profile, tmp_path: Path
) -> None:
    """Its guardian sees what it can, then ends it; the others are not held up."""
    done = ncclops("launch", *IN_PLACE, "--profile", profile(), training, env={"FAULT": "gil:2"})
    assert done.returncode == 0, done.stderr
    incident = tmp_path / "run" / "incidents" / "0"
    expect_complete(incident, {2: {snapshots.FLIGHT, snapshots.GROUPS, snapshots.GPU}})
    stacks = (snapshots.rank_dir(incident, 2) / snapshots.STACKS).read_text()
    assert f'train.py", line {LINE_OF["sleep(1000)"]} in load_batch' in stacks
    process = read(snapshots.rank_dir(incident, 2) / snapshots.PROCESS)
    assert process["state"] == "S"
    assert process["python_ran_s_ago"] > 1
    page = told(ncclops, "run")
    assert page["culprit"]["rank"] == 2
    assert page["culprit"]["frame"]["line"] == LINE_OF["sleep(1000)"]
    assert page["ranks_lost"] == [2]


@pytest.mark.slow
def test_a_rank_that_is_killed(
    ncclops: Ncclops, training: Path, profile: Profile, tmp_path: Path
) -> None:
    options = ("launch", *IN_PLACE, "--profile", profile("20s", "30s"))
    done = ncclops(*options, training, env={"FAULT": "kill:0"})
    assert done.returncode == 0, done.stderr
    incident = tmp_path / "run" / "incidents" / "0"
    gone = {snapshots.FLIGHT, snapshots.GROUPS, snapshots.GPU, snapshots.STACKS}
    expect_complete(incident, {0: gone})
    page = told(ncclops, "run")
    assert page["culprit"]["rank"] == 0
    assert "SIGKILL" in page["sentence"]
    assert page["decision"]["what"] == "restarted in place, on 3 of 4 ranks"


@pytest.mark.slow
def test_a_rank_that_crashes_in_c(
    ncclops: Ncclops, training: Path, profile: Profile, tmp_path: Path
) -> None:
    """Its last words have its stacks, and so the line."""
    options = ("launch", *IN_PLACE, "--profile", profile("20s", "30s"))
    done = ncclops(*options, training, env={"FAULT": "crash:2"})
    assert done.returncode == 0, done.stderr
    page = told(ncclops, "run")
    assert page["culprit"]["rank"] == 2
    assert page["culprit"]["frame"]["line"] == LINE_OF["string_at"]
    assert "SIGSEGV" in page["sentence"]
    assert page["classification"]["class"] == "process-crash"


ALWAYS = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")

def load_batch(step):
    if dist.get_rank() == 1 and step == 3: raise ValueError("no such shard")

for step in range(6):
    load_batch(step)
    dist.all_reduce(torch.ones(4))
"""


@pytest.mark.slow
def test_restarts_in_place_that_cannot_help(ncclops: Ncclops, tmp_path: Path) -> None:
    """Three times the same, new processes, once more: told is the fault, decided the escalation."""
    script = tmp_path / "train.py"
    script.write_text(ALWAYS)
    line = next(n for n, text in enumerate(ALWAYS.splitlines(), 1) if "raise" in text)
    done = ncclops("launch", *IN_PLACE, "--profile", "local-cpu", script)
    assert done.returncode == 1
    incidents = tmp_path / "run" / "incidents"
    first_leaving, latest = 3, max(int(path.name) for path in incidents.iterdir())
    assert (incidents / str(first_leaving) / "left-rank0.json").exists()
    for asked, told_is, decided, why in (
        (0, 0, "restarted in place, on all 4 ranks", "every rank was healthy"),
        (2, 2, "no further restart in place, but new processes (attempt 2)", "3 times in a row"),
        (3, 2, "no further restart in place, but new processes (attempt 2)", "3 times in a row"),
        (None, latest - 1, "the run ended: failed", "again in new processes"),
    ):
        page = told(ncclops, "run", *([] if asked is None else [str(asked)]))
        assert page["sentence"].startswith("rank 1 on ")
        assert "raised ValueError: no such shard at" in page["sentence"]
        assert page["culprit"]["rank"] == 1
        assert page["culprit"]["frame"]["line"] == line
        assert page["classification"]["class"] == "user-error"
        assert page["number"] == told_is
        assert page["left_in"] == (None if asked == told_is else latest if asked is None else 3)
        assert page["decision"]["what"].startswith(decided), f"incident {asked}"
        assert why in page["decision"]["why"]
    assert "the ranks left in incident" in ncclops("incident", "run").stdout


@pytest.mark.slow
def test_a_team_that_the_agent_ends(
    ncclops: Ncclops, training: Path, profile: Profile, tmp_path: Path
) -> None:
    """Without restarts in place it is the agent that has snapshots taken, before SIGTERM."""
    options = ("launch", *IN_PLACE, "--restart", "none", "--profile", profile("20s", "30s"))
    done = ncclops(*options, training, env={"FAULT": "raise:1"})
    assert done.returncode == 1
    incident = tmp_path / "run" / "incidents" / "0"
    page = told(ncclops, "run")
    assert page["culprit"]["rank"] == 1
    assert page["culprit"]["frame"]["line"] == LINE_OF["raise Runtime"]
    assert page["decision"]["what"] == "the run ended: failed"
    for rank in range(RANKS):  # which of the others are still there is a matter of chance
        directory = snapshots.rank_dir(incident, rank)
        assert (directory / snapshots.STACKS).exists() or read(directory / snapshots.MISSING)[
            "reason"
        ]


def test_what_there_is_not(ncclops: Ncclops, tmp_path: Path) -> None:
    assert "no runs in runs/" in ncclops("incident").stderr
    assert "no runs in runs/" in ncclops("where").stderr
    run = tmp_path / "run"
    run.mkdir()
    done = ncclops("incident", "run")
    assert (done.returncode, done.stdout) == (2, "")
    (run / "events.jsonl").touch()
    assert "has no incidents" in ncclops("incident", "run").stderr
    assert "is alive on this machine" in ncclops("where", "run").stderr
    (run / "incidents" / "3").mkdir(parents=True)
    assert "no incident 1: it has 3" in ncclops("incident", "run", "1").stderr
    assert "snapshots and no incident.json" in ncclops("incident", "run").stderr
