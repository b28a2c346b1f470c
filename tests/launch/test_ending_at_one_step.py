"""A stop never cuts a collective, where there is a point at which it does not have to."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import pytest

from ncclops.agent.team_stop import Way, find_way
from ncclops.record.progress import Progress, Warmup
from tests.conftest import LIMIT_S
from tests.fakegpu.host import Host
from tests.lanes import IN_SCRIPT, Lane, lanes
from tests.launch.conftest import Background, Run

Script = Callable[[str], Path]
Start = Callable[..., Background]

RANKS = 3
# Each rank writes down where it is: before and after each collective.
TRAINING = (
    IN_SCRIPT
    + """
import os, random, sys, time
import torch, torch.distributed as dist
from ncclops import receipt
reports = sys.argv[1] == "reports"
dist.init_process_group(**lane)
rank, log = dist.get_rank(), open(f"log-{os.environ['RANK']}", "w", buffering=1)
uneven = random.Random(rank)
model = torch.nn.Linear(8, 8, device=device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
if reports:
    @receipt.on_stop
    def save():
        dist.barrier()  # collectives still work
        log.write(f"{n} saved\\n")
for n in range(10**9):
    model(torch.ones(4, 8, device=device)).sum().backward()
    for part in range(3):
        log.write(f"{n} {part} in\\n")
        dist.all_reduce(torch.ones(1000, device=device))
        log.write(f"{n} {part} out\\n")
    if uneven.random() < 0.1:
        time.sleep(0.01)
    optimizer.step()
    if reports:
        receipt.step(n)
    if n == 5 and rank == 0:
        open("trains", "w").close()
"""
)


def burn() -> None:
    os.nice(10)  # in the way of the ranks, and no more than that
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        pass


@pytest.fixture
def load() -> Iterator[Callable[[], None]]:
    """``load()`` starts two processes that keep two cores busy."""
    burners: list[ForkProcess] = []

    def begin() -> None:
        for _ in range(2):
            burners.append(ForkProcess(target=burn))
            burners[-1].start()

    yield begin
    for burner in burners:
        burner.kill()
        burner.join()


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} does not appear"
        time.sleep(0.02)  # no event: another process's file


def last_lines(tmp_path: Path) -> set[str]:
    return {(tmp_path / f"log-{rank}").read_text().splitlines()[-1] for rank in range(RANKS)}


def start_training(
    start: Start, lane: Lane, script: Path, *arguments: str, **options: Any
) -> Background:
    return start(
        *("launch", "--profile", lane.profile, "--nproc-per-node", str(RANKS), "--run-dir", "run"),
        *arguments[:-1],
        script,
        arguments[-1],
        **options,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lane", "restart", "reports"),
    [
        pytest.param("gloo", "in-process", "reports", marks=pytest.mark.extended),
        pytest.param("gloo", "none", "reports", marks=pytest.mark.extended),
        pytest.param("gloo", "process", "reports", marks=pytest.mark.extended),
        pytest.param("gloo", "in-process", "silent", marks=pytest.mark.extended),
        pytest.param("gloo", "none", "silent", marks=pytest.mark.extended),
        pytest.param("nccl", "in-process", "reports", marks=pytest.mark.extended),
        pytest.param("nccl", "none", "silent", marks=pytest.mark.extended),
        ("nccl-eager", "in-process", "silent"),
    ],
    indirect=["lane"],
)
def test_all_ranks_end_at_the_same_point_and_none_within_a_collective(
    background: Start,
    script: Script,
    tmp_path: Path,
    load: Callable[[], None],
    lane: Lane,
    restart: str,
    reports: str,
) -> None:
    launcher = start_training(background, lane, script(TRAINING), "--restart", restart, reports)
    wait_for(tmp_path / "trains")
    load()  # now, and not while torch is imported
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(LIMIT_S) == 128 + signal.SIGTERM
    run = Run(tmp_path / "run")
    (agreed,) = run.named("stop-agreed")
    if reports == "reports":
        assert last_lines(tmp_path) == {f"{agreed['step']} saved"}
    else:
        assert last_lines(tmp_path) == {f"{agreed['update'] - 1} 2 out"}
    assert [worker["exit_code"] for worker in run.verdict["workers"]] == [0] * RANKS
    assert run.named("stop-forced") == []


@lanes("nccl")
def test_no_rank_leaves_before_its_gpu_has_done_what_others_wait_for(
    background: Start, script: Script, tmp_path: Path, lane: Lane, host: Host
) -> None:
    """Rank 1's GPU is 20 steps behind its host; rank 0 saves what both have reduced.

    torch's watchdog would have the process wait at its end; with blocking wait there is none.
    """
    host.set("device:allreduce rank=1 delay=0.1")
    source = """
import torch.distributed as dist
from ncclops import receipt
dist.init_process_group(**lane)
@receipt.on_stop
def save():
    if dist.get_rank() == 0: print("saved", gradients.sum().item(), flush=True)
done = []
for n in range(10**9):
    dist.all_reduce(gradients := torch.ones(8, device=device))
    done.append(torch.cuda.current_stream().record_event())
    if n >= 20: done[n - 20].synchronize()
    receipt.step(n)
    if n == 5: open("trains", "w").close()
"""
    launcher = background(
        *("launch", "--profile", lane.profile, "--nproc-per-node", "2", "--run-dir", "run"),
        *("--restart", "none", "--warm-start", "--set", "TORCH_NCCL_BLOCKING_WAIT=1"),
        script(IN_SCRIPT + source),
    )
    wait_for(tmp_path / "trains")
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(LIMIT_S) == 128 + signal.SIGTERM
    run = Run(tmp_path / "run")
    assert run.named("stop-forced") == []
    assert [worker["exit_code"] for worker in run.verdict["workers"]] == [0, 0]
    assert run.stdout(0) == "saved 16.0\n"


@lanes("nccl", extended=("gloo",))
@pytest.mark.parametrize(
    ("each_time", "grace", "reason"),
    [
        ("", "2s", "the grace time is over"),
        ('print("step", n, "loss 1.0", flush=True)', "1h", "no rank reports steps"),
    ],
    ids=["silent", "prints steps and hangs"],
)
def test_where_no_point_comes_groups_are_aborted_before_processes_are_signalled(
    background: Start,
    script: Script,
    tmp_path: Path,
    quick_profile: Path,
    each_time: str,
    grace: str,
    reason: str,
) -> None:
    """Neither steps nor optimizers: a script that only evaluates, say, or updates by itself.

    Of one that prints steps it is known: it is not waited for (``stop_grace`` is an hour), also
    where it hangs.
    """
    profile = quick_profile.read_text().replace("2s", grace)
    quick_profile.write_text(profile)
    source = f"""
import time, torch.distributed as dist
dist.init_process_group(**lane)
for n in range(10**9):
    dist.all_reduce(torch.ones(1000, device=device))
    {each_time}
    if n == 5: open("trains", "w").close()
    if n == 5 and dist.get_rank() == 1 and {bool(each_time)}: time.sleep(1000)
"""
    with (tmp_path / "said").open("w") as said_there:
        launcher = background(
            *("launch", "--profile", quick_profile, "--nproc-per-node", "2", "--run-dir", "run"),
            script(IN_SCRIPT + source),
            stderr=said_there,
        )
    wait_for(tmp_path / "trains")
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(LIMIT_S) == 128 + signal.SIGTERM
    run = Run(tmp_path / "run")
    names = [record["event"] for record in run.events]
    assert names.index("stop-requested") < names.index("stop-forced")
    assert run.named("stop-forced")[0]["ranks"] == [0, 1]
    assert run.named("stop-forced")[0]["reason"].startswith(reason)
    recorded = [(tmp_path / f"run/ranks/{rank}/worker.jsonl").read_text() for rank in range(2)]
    assert all('"groups-aborted"' in lines for lines in recorded)
    assert "did not exit cleanly" in run.verdict["reason"]
    said = (tmp_path / "said").read_text()
    # Twice where SIGTERM comes before the first printed step has been read.
    advice = "with `ncclops.receipt.step(n)` in its loop a script ends after a step"
    assert said.count(advice) in ((1, 2) if each_time else (1,))
    assert "to end after" not in said, "there is no step or update to name"


def page(step: int | None = None, *, updates: int = 0, callbacks: int = 0) -> Progress:
    return Progress(
        pid=1,
        iteration=0,
        step=step,
        steps=0 if step is None else step + 1,
        started_ns=0,
        step_ns=0,
        tick_ns=0,
        main_ns=None,
        warmup=Warmup.OVER,
        warmup_ns=0,
        phase=None,
        phase_began_ns=0,
        phase_limit=timedelta(0),
        left=False,
        ended=False,
        updates=updates,
        updates_before=0,
        stop_callbacks=callbacks,
        wait=0,
        collectives=None,
        awaited=None,
    )


@pytest.mark.parametrize(
    ("seen", "grouped", "handles", "way"),
    [
        pytest.param([page(3), page(4)], True, False, Way.STEPS, id="all report steps"),
        pytest.param([page(3), page()], True, False, Way.UNSETTLED, id="one is still in its first"),
        pytest.param([page(), page()], True, False, Way.EITHER, id="no rank has begun"),
        pytest.param([page(), page()], False, False, Way.SIGNAL, id="nothing to cut"),
        pytest.param([None, None], False, False, Way.SIGNAL, id="not our workers"),
        pytest.param(
            [page(updates=2), page(updates=3)], True, False, Way.UPDATES, id="reports no steps"
        ),
        pytest.param(
            [page(9, updates=9), page(updates=9)], True, False, Way.UPDATES, id="rank 0 reports"
        ),
        pytest.param(
            [page(1, updates=2), page(updates=1)], True, False, Way.UNSETTLED, id="may catch up"
        ),
        pytest.param([page(3)], True, True, Way.SIGNAL, id="saves in its handler"),
        pytest.param([page(3, callbacks=1)], True, True, Way.STEPS, id="saves in its callback"),
        pytest.param([page(3), None], True, False, Way.UNSETTLED, id="one has no page"),
    ],
)
def test_how_ranks_can_be_stopped(
    seen: list[Progress | None], grouped: bool, handles: bool, way: Way
) -> None:
    assert find_way(seen, grouped=grouped, handles_sigterm=handles) is way


def test_ranks_that_have_printed_steps_come_to_no_first_one() -> None:
    """Unless they have restarted in place: then a first one may still come."""
    ways = [
        find_way([replace(page(), iteration=n)], grouped=True, handles_sigterm=False, trains=True)
        for n in range(2)
    ]
    assert ways == [Way.NONE, Way.EITHER]
