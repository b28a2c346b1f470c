"""What a fault leaves behind, of real jobs: every rank's snapshot, or why there is none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ncclops.capture.flight_recorder import SOURCES
from ncclops.flight_recorders import GLOO, NCCL, SECOND_OF_NCCL
from ncclops.record import snapshot_files
from ncclops.record.paths import INCIDENT
from tests.conftest import CompletedText, run_ncclops
from tests.diagnose.conftest import LINE_OF, read, write_profile, write_training
from tests.fakegpu import place as fake_gpu
from tests.lanes import Lane, LaneProcess, lanes

Ncclops = Callable[..., CompletedText]
Profile = Callable[..., Path]

RANKS = 4
ON_BOTH = lanes("mixed", extended=("gloo",))
# One after the other in one job, each after the restart in place that the one before has led to. A
# rank that is lost is the last one, so that the others keep their numbers.
FAULTS = ("raise:1", "hang:2", "crash:3", "gil:2", "kill:0")


def report_of(ncclops: Ncclops, *arguments: str) -> dict[str, Any]:
    done = ncclops("incident", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def expect_complete(incident: Path, absent_of: dict[int, set[str]], ranks: int = RANKS) -> None:
    """Each rank left all its files, but for those that its missing.json explains."""
    for rank in range(ranks):
        directory = snapshot_files.rank_dir(incident, rank)
        have = {path.name for path in directory.iterdir()}
        absent = absent_of.get(rank, set())
        assert set(snapshot_files.COMPLETE) - have == absent, f"rank {rank}: {have}"
        if absent:
            missing = read(directory / snapshot_files.MISSING)
            assert missing["reason"]
            assert set(missing["files"]) >= absent


class Faulted:
    """The run with all ``FAULTS``, and what `ncclops incident` says of each."""

    def __init__(self, directory: Path, ncclops: Ncclops) -> None:
        self.directory, self._ncclops = directory, ncclops

    def incident(self, fault: str) -> Path:
        return self.directory / "run" / "incidents" / str(FAULTS.index(fault))

    def page(self, fault: str) -> dict[str, Any]:
        return report_of(self._ncclops, str(self.directory / "run"), str(FAULTS.index(fault)))


_made: dict[Lane, Path] = {}  # the job of all faults, by lane


@pytest.fixture
def faulted(
    lane: Lane,
    lane_process: LaneProcess,
    starts_processes: None,
    tmp_path_factory: pytest.TempPathFactory,
    ncclops_in_process: Ncclops,
) -> Faulted:
    if lane not in _made:
        directory = tmp_path_factory.mktemp("faulted")
        # Not shorter: on a busy machine a healthy rank may be slow for seconds.
        profile = write_profile(directory, "5s", "8s", lane)
        options = ("launch", "--run-dir", "run", "--nproc-per-node", str(RANKS))
        done = run_ncclops(
            directory,
            *(*options, "--profile", profile, write_training(directory)),
            env=lane_process.environment | {"FAULT": " ".join(FAULTS)},
            python=lane_process.python,
        )
        assert done.returncode == 0, done.stderr
        _made[lane] = directory
    return Faulted(_made[lane], ncclops_in_process)


@ON_BOTH
def test_an_exception_leaves_a_snapshot_of_every_rank(faulted: Faulted, lane: Lane) -> None:
    incident = faulted.incident("raise:1")
    expect_complete(incident, {})
    record = read(incident / INCIDENT)
    assert record["cause"] == "exception"
    assert record["phases_ms"]["collect"] > 0
    groups = read(snapshot_files.rank_dir(incident, 0) / snapshot_files.GROUPS)
    (world,) = groups
    assert (world["desc"], world["ranks"]) == ("default_pg", [0, 1, 2, 3])
    assert world["last_op"]["op"] == "all_reduce"
    assert world["last_enqueued"] == world["last_op"]["seq"] >= 6
    flight = read(snapshot_files.rank_dir(incident, 0) / snapshot_files.FLIGHT)
    assert flight["rank"] == 0
    nccl = SECOND_OF_NCCL if fake_gpu.HERE.has_second_engine else NCCL
    assert flight["source"] == SOURCES[nccl if lane.needs_gpus else GLOO]
    entries = flight["dump"]["entries"]
    assert [entry["collective_seq_id"] for entry in entries] == list(range(1, len(entries) + 1))
    assert any(frame["name"] == "reduce_gradients" for frame in entries[-1]["frames"])
    process = read(snapshot_files.rank_dir(incident, 0) / snapshot_files.PROCESS)
    assert process["source"] == "monitor-process"
    assert process["threads"][0]["tid"] == process["pid"] == flight["pid"]

    page = faulted.page("raise:1")
    assert page["schema"] == "ncclops.incident/1"
    assert page["culprit"]["rank"] == 1
    assert page["culprit"]["frame"]["line"] == LINE_OF["raise Runtime"]
    assert "RuntimeError: out of the blue" in page["sentence"]
    assert page["classification"]["class"] == "user-error"
    assert page["decision"]["what"].startswith("restarted in place, on all 4 ranks")


@ON_BOTH
def test_a_hang_is_blamed_on_the_rank_that_never_came(
    faulted: Faulted, lane: Lane, ncclops_in_process: Ncclops
) -> None:
    incident = faulted.incident("hang:2")
    expect_complete(incident, {})
    page = faulted.page("hang:2")
    assert page["culprit"]["rank"] == 2
    assert page["culprit"]["frame"]["line"] == LINE_OF["time.sleep"]
    assert (
        page["culprit"]["host"]
        == read(snapshot_files.rank_dir(incident, 2) / snapshot_files.FLIGHT)["host"]
    )
    assert "never entered all_reduce #7" in page["sentence"]
    assert page["sentence"].startswith("rank 2 on ")
    at = {tuple(each["ranks"]): each["frame"]["line"] for each in page["clusters"]}
    assert at[2,] == LINE_OF["time.sleep"]
    assert LINE_OF[".item" if lane.needs_gpus else "dist.all_reduce"] in at.values()
    people = ncclops_in_process("incident", str(faulted.directory / "run"), "1")
    assert people.returncode == 0
    assert "what to do next" in people.stdout


@ON_BOTH
def test_a_rank_that_crashes_in_c_is_blamed_with_its_line(faulted: Faulted) -> None:
    """Its last output has its stacks, and so the line."""
    page = faulted.page("crash:3")
    assert page["culprit"]["rank"] == 3
    assert page["culprit"]["frame"]["line"] == LINE_OF["string_at"]
    assert "SIGSEGV" in page["sentence"]
    assert page["classification"]["class"] == "process-crash"


@ON_BOTH
def test_a_rank_that_hangs_with_the_gil_held_is_seen_from_outside(faulted: Faulted) -> None:
    """Its monitor process sees what it can, then ends it; the others are not held up."""
    incident = faulted.incident("gil:2")
    expect_complete(
        incident, {2: {snapshot_files.FLIGHT, snapshot_files.GROUPS, snapshot_files.GPU}}, ranks=3
    )
    stacks = (snapshot_files.rank_dir(incident, 2) / snapshot_files.STACKS).read_text()
    assert f'train.py", line {LINE_OF["sleep(1000)"]} in load_batch' in stacks
    process = read(snapshot_files.rank_dir(incident, 2) / snapshot_files.PROCESS)
    assert process["state"] == "S"
    assert process["python_ran_s_ago"] > 1
    page = faulted.page("gil:2")
    assert page["culprit"]["rank"] == 2
    assert page["culprit"]["frame"]["line"] == LINE_OF["sleep(1000)"]
    assert page["ranks_lost"] == [2]


@ON_BOTH
def test_a_rank_that_is_killed_leaves_nothing_and_is_blamed(faulted: Faulted) -> None:
    incident = faulted.incident("kill:0")
    gone = {snapshot_files.FLIGHT, snapshot_files.GROUPS, snapshot_files.GPU, snapshot_files.STACKS}
    expect_complete(incident, {0: gone}, ranks=2)
    page = faulted.page("kill:0")
    assert page["culprit"]["rank"] == 0
    assert "SIGKILL" in page["sentence"]
    assert page["decision"]["what"] == "restarted in place, on 1 of 2 ranks"


ALWAYS = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")

def load_batch(step):
    if dist.get_rank() == 1 and step == 3: raise RuntimeError("CUDA out of memory")

for step in range(6):
    load_batch(step)
    dist.all_reduce(torch.ones(4))
"""


@pytest.mark.slow
@pytest.mark.extended
def test_restarts_in_place_that_cannot_help(
    ncclops: Ncclops, ncclops_in_process: Ncclops, tmp_path: Path
) -> None:
    """The same fault again in new processes: shown is the fault, decided the escalation."""
    script = tmp_path / "train.py"
    script.write_text(ALWAYS)
    line = next(n for n, text in enumerate(ALWAYS.splitlines(), 1) if "raise" in text)
    done = ncclops(
        "launch", "--run-dir", "run", "--nproc-per-node", "2", "--profile", "local-cpu", script
    )
    assert done.returncode == 1
    incidents = tmp_path / "run" / "incidents"
    latest = max(int(path.name) for path in incidents.iterdir())
    # Ranks leave of themselves, or a restart later when they see that the others have left.
    left = sorted({int(path.parent.name) for path in incidents.glob("*/left-rank*.json")})
    assert (left[0], left[-1]) == (3, latest)
    fault = max(set(range(latest)) - set(left))  # of the new processes
    for asked, expected_number, decided, why in (
        (0, 0, "restarted in place, on all 2 ranks", "every rank was healthy"),
        (2, 2, "no further restart in place, but new processes (attempt 2)", "3 times at"),
        (3, 2, "no further restart in place, but new processes (attempt 2)", "3 times at"),
        (None, fault, "the run ended: failed", "again in new processes"),
    ):
        page = report_of(ncclops_in_process, "run", *([] if asked is None else [str(asked)]))
        assert page["sentence"].startswith("rank 1 on ")
        assert "raised RuntimeError: CUDA out of memory at" in page["sentence"]
        assert page["culprit"]["rank"] == 1
        assert page["culprit"]["frame"]["line"] == line
        assert page["classification"]["class"] == "gpu-oom"
        assert page["number"] == expected_number
        assert page["left_in"] == (
            None if asked == expected_number else latest if asked is None else 3
        )
        assert page["decision"]["what"].startswith(decided), f"incident {asked}"
        assert why in page["decision"]["why"]
    assert "the ranks left in incident" in ncclops_in_process("incident", "run").stdout


def test_without_a_run_or_an_incident_there_is_one_line(
    ncclops_in_process: Ncclops, tmp_path: Path
) -> None:
    assert "no runs in runs/" in ncclops_in_process("incident").stderr
    assert "no runs in runs/" in ncclops_in_process("where").stderr
    run = tmp_path / "run"
    run.mkdir()
    done = ncclops_in_process("incident", "run")
    assert (done.returncode, done.stdout) == (2, "")
    (run / "events.jsonl").touch()
    assert "has no incidents" in ncclops_in_process("incident", "run").stderr
    assert "is alive on this machine" in ncclops_in_process("where", "run").stderr
    (run / "incidents" / "3").mkdir(parents=True)
    assert "no incident 1: it has 3" in ncclops_in_process("incident", "run", "1").stderr
    assert "the run ended before it was written" in ncclops_in_process("incident", "run").stderr
