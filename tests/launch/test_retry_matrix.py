"""The start-up matrix: which failure is followed by which start, for scripts of all kinds.

    what failed                     NCCL init  bootstrap barrier  watchdog  how often
    a known start-up error          lazy       skipped            standard  once
    anything else, expert-parallel  lazy       skipped            standard
    anything else                   eager      standard           standard
    what no new start changes                                               never

On NCCL the errors are those of torch's own ProcessGroupNCCL over the fake GPU, before the first
collective has completed; on Gloo the script raises what torch would.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ncclops.diagnose.incident_report import report_incident
from tests.conftest import LIMIT_S, CompletedText, free_port, run_ncclops
from tests.fakegpu.host import Host
from tests.fakegpu.place import HERE, Place
from tests.launch.conftest import Background, Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(320)]

# Each start prints how it was made. FAULT strikes on rank 1 of the first attempt, or with AGAIN of
# each: refused and usage before the first collective, corrupted and own after it.
SCRIPT = """
import json, os, sys
import torch, torch.distributed as dist
TEXTS = {
    "refused": "NCCL error in: /p/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, remote process"
    " exited or there was a network error, NCCL version 2.28.9\\nncclRemoteError: A call failed"
    " possibly due to a network error or a remote process exiting prematurely.\\nLast error:\\n"
    "socketPollConnect: connect to 10.0.0.5<45678> returned Connection refused, exceeded error"
    " retry count (35)",
    "usage": "NCCL error in: /p/torch/csrc/distributed/c10d/NCCLUtils.cpp:92, invalid usage (run"
    " with NCCL_DEBUG=WARN for details), NCCL version 2.29.7\\nncclInvalidUsage: This usually"
    " reflects invalid usage of NCCL library.",
    "corrupted": "CUDA error: an illegal memory access was encountered",
    "own": "an error of the script's own",
}
fault, backend = os.environ["FAULT"], os.environ["BACKEND"]
strikes = "AGAIN" in os.environ or os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
if not strikes and "FAKEGPU_CONTROL" in os.environ:
    with open(f"rules{os.getpid()}", "w"):
        os.replace(f"rules{os.getpid()}", os.environ["FAKEGPU_CONTROL"])
device = torch.device("cpu")
if backend == "nccl":
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
start = {
    "init": os.environ.get("NCCLOPS_NCCL_INIT"),
    "barrier": os.environ.get("NCCLOPS_BOOTSTRAP_BARRIER"),
    "watchdog": {n: v for n, v in os.environ.items() if n.startswith("TORCH_NCCL_")},
}
print(json.dumps(start), flush=True)
named = {"device_id": device} if "DEVICE_ID" in os.environ else {}
dist.init_process_group(backend, **named)
print("eager" if dist.group.WORLD.bound_device_id is not None else "lazy", flush=True)

def strike(*kinds):
    if strikes and fault in kinds and dist.get_rank() == 1:
        error = dist.DistBackendError if "NCCL" in TEXTS[fault] else RuntimeError
        raise error(TEXTS[fault])

if backend == "gloo":
    strike("refused", "usage")
dist.all_reduce(torch.ones(1, device=device))
if backend == "nccl":
    torch.cuda.synchronize()
strike("corrupted", "own")
dist.barrier()
dist.destroy_process_group()
"""
RULES = {
    "refused": "ncclCommInitRank* rank=1 error=ncclRemoteError",
    "usage": "ncclCommInitRank* rank=1 error=ncclInvalidUsage",
}
FIRST = (None, None)
LAZY, EAGER = ("lazy", "skipped"), ("eager", "standard")


@dataclass(frozen=True)
class Kind:
    """A backend, whether the script names its device, and the mode of restarts."""

    backend: str
    device_id: bool
    mode: str

    def __str__(self) -> str:
        named = "with device_id" if self.device_id else "without device_id"
        return f"{self.backend} {named} {self.mode}"


KINDS = [
    Kind(backend, device_id, mode)
    for backend, device_id in (("gloo", False), ("nccl", False), ("nccl", True))
    for mode in ("process", "in-process")
]
# Where the rows do not differ by it, one kind in each of the two modes stands for all; in the gate
# the first of them runs over two nodes, below.
SOME = [KINDS[0], KINDS[5]]
each_kind = pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind == SOME[1] else pytest.mark.extended)
        for kind in (*SOME, *(kind for kind in KINDS if kind not in SOME))
    ],
    ids=str,
)
one_kind = pytest.mark.parametrize(
    "kind", [pytest.param(SOME[0], marks=pytest.mark.extended), SOME[1]], ids=str
)


class Job:
    """A job of two ranks in ``directory``."""

    def __init__(self, request: pytest.FixtureRequest, directory: Path) -> None:
        self._request = request
        self._directory = directory
        self.run = Run(directory / "run")

    def launch(self, kind: Kind, fault: str, *options: str, again: bool = False) -> CompletedText:
        """Run the script with ``fault``."""
        script = self._directory / "train.py"
        script.write_text(SCRIPT)
        variables = {"FAULT": fault, "BACKEND": kind.backend}
        variables |= {"DEVICE_ID": "1"} if kind.device_id else {}
        variables |= {"AGAIN": "1"} if again else {}
        given: dict[str, Any] = {"env": variables}
        profile = "local-cpu"
        if kind.backend == "nccl":
            place: Place = self._request.getfixturevalue("fake_gpu_place")
            host: Host = self._request.getfixturevalue("host")
            if fault in RULES:
                host.set(RULES[fault])
            given = {"env": host.environment | variables, "python": place.python, "limit_s": 300}
            profile = "single-node-h200"
        arguments = ["launch", "--run-dir", "run", "--nproc-per-node", "2"]
        arguments += ["--profile", profile, "--restart", kind.mode, *options, str(script)]
        return run_ncclops(self._directory, *arguments, **given)

    def starts(self, rank: int) -> list[dict[str, Any]]:
        return starts(self.run, rank)

    def rows(self, rank: int) -> list[tuple[str | None, str | None]]:
        return rows(self.run, rank)


def starts(run: Run, rank: int) -> list[dict[str, Any]]:
    """How each start of the script was made on ``rank``."""
    lines = run.stdout(rank).splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def rows(run: Run, rank: int) -> list[tuple[str | None, str | None]]:
    return [(start["init"], start["barrier"]) for start in starts(run, rank)]


@pytest.fixture
def job(request: pytest.FixtureRequest, starts_processes: None, tmp_path: Path) -> Job:
    return Job(request, tmp_path)


def check_second_start(job: Job, kind: Kind, row: tuple[str, str]) -> None:
    """All ranks came up once more, in new processes, as ``row`` says, and the job is done."""
    (retry,) = job.run.named("retry")
    assert (retry["init"], retry["barrier"], retry["watchdog"]) == (*row, "standard")
    assert retry["action"] == "retry"
    assert (job.run.verdict["attempts"], job.run.verdict["ranks_lost"]) == (2, [])
    for rank in (0, 1):
        first, *_, last = job.starts(rank)
        assert (first["init"], first["barrier"]) == FIRST
        assert job.rows(rank)[-1] == row
        assert last["watchdog"] == first["watchdog"]
        made = [line for line in job.run.stdout(rank).splitlines() if line in LAZY + EAGER]
        # torch's second engine makes communicators at once, whatever is asked for.
        at_once = "eager" if HERE.has_second_engine else row[0]
        assert made[-1] == (at_once if kind.backend == "nccl" else "lazy")


@each_kind
def test_a_known_start_up_error_is_retried_lazily(job: Job, kind: Kind) -> None:
    done = job.launch(kind, "refused")
    assert done.returncode == 0, done.stderr
    check_second_start(job, kind, LAZY)
    (retry,) = job.run.named("retry")
    assert retry["row"] == "startup-error"


@one_kind
@pytest.mark.extended  # `test_in_process.py` has it, with an error that a script words
def test_and_only_once(job: Job, kind: Kind) -> None:
    done = job.launch(kind, "refused", again=True)
    assert done.returncode == 1
    assert (job.run.verdict["outcome"], job.run.verdict["attempts"]) == ("failed", 2)
    assert job.rows(1)[-1] == LAZY
    assert len(job.run.named("retry")) == 1


@pytest.mark.parametrize(
    ("kind", "lane"),
    [
        pytest.param(SOME[0], "generic", id=f"{SOME[0]}", marks=pytest.mark.extended),
        pytest.param(SOME[1], "generic", id=f"{SOME[1]}"),
        # This row differs from the one of a start-up error by what it is for.
        pytest.param(
            KINDS[2],
            "expert-parallel",
            id=f"{KINDS[2]} expert-parallel",
            marks=pytest.mark.extended,
        ),
    ],
)
def test_another_failure_is_retried_as_the_lane_says(job: Job, kind: Kind, lane: str) -> None:
    """By the operator's order, or because the rank's CUDA context is lost."""
    options = [] if lane == "generic" else ["--profile", "expert-parallel"]
    fault = "corrupted"
    if kind.mode == "process":
        fault, options = "own", [*options, "--max-restarts", "1"]
    done = job.launch(kind, fault, *options)
    assert done.returncode == 0, done.stderr
    check_second_start(job, kind, EAGER if lane == "generic" else LAZY)
    (retry,) = job.run.named("retry")
    assert retry["row"] == lane


@one_kind
@pytest.mark.extended
def test_what_no_new_start_changes_is_started_once(job: Job, kind: Kind) -> None:
    done = job.launch(kind, "usage")
    assert done.returncode == 1
    assert job.run.named("retry") == []
    assert job.run.verdict["attempts"] == 1
    assert [job.rows(rank) for rank in (0, 1)] == [[FIRST]] * 2
    check_story(job.run, "run", in_torch=kind.backend == "nccl")


def check_story(run: Run, where: str, *, in_torch: bool = False) -> None:
    """What is told of the usage error of rank 1, and that the next command works."""
    story = run.verdict["story"]
    assert story["what"].startswith(f"rank 1 on {socket.gethostname()} raised ")
    assert "invalid usage" in story["what"]
    line = story["code"][-1]
    assert Path(line["file"]).name == "train.py"
    assert "dist." in line["text"] if in_torch else line["function"] == "strike"
    assert (story["class"], story["rank"]) == ("invalid-usage", 1)
    assert all(step["kind"] != "attempt" for step in story["tried"])
    assert story["stopped"].startswith("invalid-usage")
    ncclops, *command = story["next_command"].split()
    assert (ncclops, command[0]) == ("ncclops", "incident"), story["next_command"]
    assert where in command[1]
    assert report_incident(Path(command[1]), int(command[2])).culprit.rank == 1


@pytest.fixture
def two_nodes(background: Callable[..., Background], tmp_path: Path) -> Callable[..., list[Run]]:
    """``two_nodes(fault, mode)`` runs a rank on each of two nodes, to their end."""

    def run(fault: str, mode: str) -> list[Run]:
        script, port = tmp_path / "train.py", free_port()
        script.write_text(SCRIPT)
        agents = [
            background(
                *("launch", "--profile", "local-cpu", "--run-dir", f"node-{number}"),
                *("--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", "1"),
                *("--master-addr", "127.0.0.1", "--master-port", str(port)),
                *("--set", f"FAULT={fault}", "--set", "BACKEND=gloo", "--restart", mode),
                *("--warm-start", script),
            )
            for number in range(2)
        ]
        for agent in agents:
            agent.wait(LIMIT_S)
        return [Run(tmp_path / f"node-{number}") for number in range(2)]

    return run


@pytest.mark.extended
def test_over_two_nodes_a_known_start_up_error_is_retried_lazily(
    two_nodes: Callable[..., list[Run]],
) -> None:
    for rank, run in enumerate(two_nodes("refused", "process")):
        assert (run.verdict["outcome"], run.verdict["attempts"]) == ("completed", 2)
        (retry,) = run.named("retry")
        assert (retry["row"], retry["init"], retry["barrier"]) == ("startup-error", *LAZY)
        assert rows(run, rank) == [FIRST, LAZY]


@pytest.mark.extended
def test_over_two_nodes_what_no_new_start_changes_is_told_alike(
    two_nodes: Callable[..., list[Run]],
) -> None:
    for rank, run in enumerate(two_nodes("usage", "in-process")):
        assert (run.verdict["outcome"], run.verdict["attempts"]) == ("failed", 1)
        assert rows(run, rank) == [FIRST]
        check_story(run, "node-1")
