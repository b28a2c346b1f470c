"""Timeouts are long while ranks may compile and tighten afterwards, on every group and rank."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import LIMIT_S, REPOSITORY, CompletedText, clean_environ, free_port
from tests.lanes import Lane, lanes
from tests.launch.conftest import Run

EXAMPLE = REPOSITORY / "docs" / "examples" / "train_fsdp2.py"

Ncclops = Callable[..., CompletedText]
OnlyRun = Callable[[], Run]

_GROUPS = ("default_pg", "mesh_replicate", "mesh_shard")


def lines_of(output: str, when: str) -> dict[str, str]:
    """What the script has seen of its groups at a moment, by their description."""
    found = re.findall(rf"{when}: (.+) (\S+) s$", output, re.MULTILINE)
    return dict(found)


@lanes("nccl", extended=("gloo",))
@pytest.mark.slow
def test_each_group_tightens_after_warm_up_and_is_wide_again_after_a_restart(
    ncclops: Ncclops, only_run: OnlyRun, lane: Lane
) -> None:
    """FSDP2 on a mesh of two dimensions; one of its groups has a timeout of its own."""
    done = ncclops(
        "launch", "--nproc-per-node", "4", "--profile", lane.profile, "--profile",
        "compile-sensitive", "--timeout", "groups.mesh_sh*=5m",
        EXAMPLE, "--fail-once-at", "3",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    marker = "compiling: default_pg"
    iterations = only_run().stdout(0).split(marker)[1:]
    assert len(iterations) == 2
    for output in (marker + iteration for iteration in iterations):
        assert lines_of(output, "compiling") == dict.fromkeys(_GROUPS, "7200")
        steady = {"default_pg": "2700", "mesh_replicate": "2700", "mesh_shard": "300"}
        assert lines_of(output, "warm") == steady
        assert lines_of(output, "later") == steady | {"made later": "2700"}
    changes = only_run().named("group-timeout")
    assert all(change["applied"] for change in changes)
    for rank in range(4):
        of_rank = [change for change in changes if change["rank"] == rank]
        assert [(change["desc"], change["from_s"], change["to_s"]) for change in of_rank] == [
            ("default_pg", 7200, 2700),
            ("mesh_replicate", 7200, 2700),
            ("mesh_shard", 7200, 300),
        ] * 2
    warm = only_run().named("compile-warmup")
    assert sorted(event["rank"] for event in warm) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert only_run().verdict["receipt"]["verdict"] == "healthy"


@pytest.mark.extended
def test_debug_level_detail_is_noticed(ncclops: Ncclops, only_run: OnlyRun) -> None:
    """There torch changes nothing, and says so only to who reads the timeout back."""
    done = ncclops(
        "launch", "--nproc-per-node", "1", "--restart", "process", "--profile", "local-cpu",
        "--profile", "compile-sensitive", "--set", "TORCH_DISTRIBUTED_DEBUG=DETAIL", EXAMPLE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert lines_of(done.stdout, "warm")["default_pg"] == "7200"
    changes = only_run().named("group-timeout")
    assert changes
    assert all(change["applied"] is False and "DETAIL" in change["why"] for change in changes)


# Two ranks with windows of their own. Rank 1 never reports its warm-up; in the end it stays away
# from a collective.
LONELY = """
import sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from ncclops.timeouts.settle import settle
from ncclops.worker.group_timeouts import GroupTimeouts
from ncclops.worker.timeout_phases import TimeoutPhases

rank, port = int(sys.argv[1]), int(sys.argv[2])
timeouts = settle({
    "process_group": timedelta(hours=1), "steady_process_group": timedelta(seconds=3)
})
groups = GroupTimeouts(timeouts)
phases = TimeoutPhases(timeouts, groups, timedelta(seconds=1))
store = dist.TCPStore("127.0.0.1", port, 2, rank == 0)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(hours=1))
own = dist.new_group([0, 1], timeout=timedelta(seconds=2))
if rank == 0:
    phases._end_warmup(timedelta(seconds=1))
for step in range(2):
    print("steady" if groups.is_steady else "wide", flush=True)
    dist.all_reduce(torch.ones(1))
    phases._step(step)
print("steady" if groups.is_steady else "wide", flush=True)
if rank == 1:
    sys.stdin.read()
else:
    print(own._get_backend(torch.device("cpu")).options._timeout.total_seconds())
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        print("3000ms" in str(error), flush=True)
"""


@pytest.mark.slow
def test_a_rank_that_does_not_report_does_not_delay_the_others(tmp_path: Path) -> None:
    """Two steps show as well that no rank compiles; what is shorter stays; the change acts."""
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", LONELY, str(rank), str(port)],
            cwd=tmp_path,
            env=clean_environ(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    with ranks[0], ranks[1]:
        try:
            output, _ = ranks[0].communicate(timeout=LIMIT_S)
        finally:
            for process in ranks:
                process.kill()
    assert output.split() == ["wide", "wide", "steady", "2.0", "True"]


# Both ranks declare a phase that is longer than their groups' timeouts, or rank 0 alone does. It
# takes longer than those; rank 1 waits for it.
PHASE = """
import sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from ncclops.timeouts.settle import settle
from ncclops.worker.group_timeouts import GroupTimeouts
from ncclops.worker.timeout_phases import TimeoutPhases

rank, port, on_all = (int(each) for each in sys.argv[1:])
timeouts = settle({"process_group": timedelta(hours=1)})
phases = TimeoutPhases(timeouts, GroupTimeouts(timeouts))
store = dist.TCPStore("127.0.0.1", port, 2, rank == 0)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(hours=1))
dist.distributed_c10d._set_pg_timeout(timedelta(seconds=3))
group = dist.group.WORLD._get_backend(torch.device("cpu"))
for _ in range(2):
    if rank == 0 or on_all:
        phases._declare(timedelta(minutes=5))
        phases._declare(timedelta(minutes=1))  # within it
        phases._declare(None)
    print(group.options._timeout.total_seconds(), flush=True)
    if rank == 0:
        time.sleep(5) if on_all else store.wait(["ended"])
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError:
        store.set("ended", "1")
        print("ended", flush=True)
        break
    phases._declare(None)
    print(group.options._timeout.total_seconds(), flush=True)
"""


@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.parametrize("on_all", [True, False])
def test_collectives_that_begin_in_a_phase_last_as_long_as_it_may(on_all: bool) -> None:
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PHASE, str(rank), str(port), str(int(on_all))],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=clean_environ(),
        )
        for rank in range(2)
    ]
    (declares, said), (waits, _) = [rank.communicate(timeout=LIMIT_S) for rank in ranks]
    assert said.count("ncclops: a phase of up to 5m is declared, and torch ends a") == 1
    if on_all:
        assert declares == waits == "300.0\n3.0\n" * 2
    else:
        assert waits == "3.0\nended\n"
