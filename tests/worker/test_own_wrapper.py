"""A script that wraps its function itself is not wrapped a second time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import CompletedText
from tests.lanes import IN_SCRIPT, lanes
from tests.launch.conftest import Run

Ncclops = Callable[..., CompletedText]
Script = Callable[..., Path]
OnlyRun = Callable[[], Run]

OURS = (
    IN_SCRIPT
    + """
import torch.distributed as dist
from ncclops import receipt, restart as inprocess
print("top", flush=True)

def monitor_processes():
    import psutil
    return sum("_monitor.main" in " ".join(c.cmdline()) for c in psutil.Process().children())

@inprocess.Wrapper(initialize=inprocess.initialize.RetryController(max_iterations=3))
def train(call: inprocess.CallWrapper):
    dist.init_process_group(**lane)
    print("train", call.iteration, monitor_processes(), flush=True)
    for step in range(5):
        dist.barrier()
        receipt.step(step)
        if step == 2 and call.iteration == 0 and dist.get_rank() == 1:
            raise RuntimeError("once")
    receipt.end()
    dist.destroy_process_group()
    return "result"

if __name__ == "__main__":
    print("main", os.environ["RANK"], flush=True)
    print(train(), flush=True)
"""
)


@lanes("nccl-eager", extended=("gloo",))
def test_its_own_wrapper_restarts_it_and_everything_is_recorded(
    ncclops: Ncclops, script: Script, only_run: OnlyRun
) -> None:
    done = ncclops("launch", "--nproc-per-node", "2", script(OURS))
    assert done.returncode == 0, done.stderr
    run = only_run()
    once = "top\nmain 0\ntrain 0 1\ntrain 1 1\nresult\n"
    assert run.stdout(0) == "top\n" + once, "left where the wrapper is applied, then started anew"
    assert {event["wrapper"] for event in run.named("own-wrapper")} == {"ncclops.restart"}
    (fault,) = run.named("fault")
    assert (fault["rank"], fault["cause"]) == (1, "RuntimeError: once")
    (restart,) = run.named("restart")
    assert restart["phases_ms"]["abort"] > 0
    assert run.verdict["receipt"]["steps"] == 5
    assert list((run.path / "incidents").iterdir())


# Stands for the other package, which is not installed here: decorating is all we look at.
STAND_IN = """
class Wrapper:
    def __init__(self, *, enabled=True): self.enabled = enabled
    def __call__(self, fn): return lambda: ("wrapped" if self.enabled else "plain", fn())
"""


@pytest.mark.parametrize(("enabled", "seen"), [("True", "wrapped"), ("False", "plain")])
@pytest.mark.extended
def test_the_wrapper_it_is_compatible_with_is_noticed(
    enabled: str, seen: str, ncclops: Ncclops, script: Script, only_run: OnlyRun, tmp_path: Path
) -> None:
    """One that is switched off is none."""
    package = tmp_path / "nvidia_resiliency_ext" / "inprocess"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").write_text(STAND_IN)
    source = (
        "import nvidia_resiliency_ext.inprocess as inprocess\n"
        f"print(inprocess.Wrapper(enabled={enabled})(lambda: 1)())\n"
    )
    done = ncclops("launch", "--nproc-per-node", "1", script(source))
    assert done.returncode == 0, done.stderr
    assert only_run().stdout(0) == f"('{seen}', 1)\n"
    recorded = [event["wrapper"] for event in only_run().named("own-wrapper")]
    assert recorded == (["nvidia_resiliency_ext.inprocess"] if seen == "wrapped" else [])


# With 0 s, the new process comes when the others have returned, and they wait for its end.
COMES_BACK = (
    IN_SCRIPT
    + """
import atexit, signal, sys, time
from datetime import timedelta
from pathlib import Path
import torch.distributed as dist
from ncclops import restart as inprocess

def wait_for(name):
    deadline = time.monotonic() + 60
    while not Path(name).exists() and time.monotonic() < deadline:
        time.sleep(0.05)

print("top", flush=True)
seconds = float(sys.argv[1])
late = "NCCLOPS_RETURNING" in os.environ and seconds == 0

@inprocess.Wrapper(grow_timeout=timedelta(seconds=seconds))
def train(call: inprocess.CallWrapper):
    dist.init_process_group(**lane)
    print("train", call.iteration, "of", dist.get_world_size(), flush=True)
    if call.iteration == 0 and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    dist.destroy_process_group()

if late:
    atexit.register(Path("left").touch)
    wait_for("done")
train()
print("done", flush=True)
if seconds == 0:
    Path("done").touch()
    wait_for("left")
"""
)


@lanes("gloo", extended=("nccl-eager",))
@pytest.mark.extended
def test_a_lost_rank_comes_back_to_its_own_wrapper(
    ncclops: Ncclops, script: Script, only_run: OnlyRun
) -> None:
    """The script's `grow_timeout` alone asks for it; the others keep their processes."""
    options = ("--restart", "in-process", "--nproc-per-node", "2")
    done = ncclops("launch", *options, script(COMES_BACK), "60")
    assert done.returncode == 0, done.stderr
    run = only_run()
    assert run.stdout(0) == "top\ntop\ntrain 0 of 2\ntrain 1 of 2\ndone\n"
    assert run.stdout(1) == "top\ntop\ntrain 0 of 2\ntop\ntrain 1 of 2\ndone\n"
    (restart,) = run.named("restart")
    assert (restart["ranks_lost"], restart["ranks_returned"]) == ([1], [1])
    assert (run.verdict["attempts"], run.verdict["ranks_lost"]) == (1, [])
    assert run.verdict["reason"] == "2 workers exited 0"


@pytest.mark.extended
def test_a_process_that_comes_back_to_its_own_wrapper_too_late_ends_well(
    ncclops: Ncclops, script: Script, only_run: OnlyRun, tmp_path: Path
) -> None:
    """Ours has ended, as the script wraps itself, and by now its own has, too."""
    done = ncclops("launch", "--nproc-per-node", "2", script(COMES_BACK), "0")
    assert done.returncode == 0, done.stderr
    run = only_run()
    assert run.stdout(0) == "top\ntop\ntrain 0 of 2\ntrain 1 of 1\ndone\n"
    assert run.stdout(1) == "top\ntop\ntrain 0 of 2\ntop\n"
    assert run.stderr(1) == ""
    assert (tmp_path / "left").exists()
    assert run.verdict["ranks_lost"] == [1]
