"""What ranks run in tests of torch's watchdog, its heartbeat monitor and blocking wait."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ncclops.testing import note
from ncclops.timeouts.settle import settle
from ncclops.worker.group_timeouts import GroupTimeouts
from tests.fakegpu.nccl_programs import begin, message, sum_over, wait_for

LONG = timedelta(hours=1)
SHORT = timedelta(seconds=3)
HEARTBEAT_S = 2


def engine() -> tuple[tuple[int, ...], bool]:
    """torch's version, and whether "nccl" is the second engine."""
    begin()
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cuda"))
    dist.destroy_process_group()
    version = tuple(map(int, torch.__version__.split("+")[0].split(".")[:2]))
    return version, type(backend).__name__ == "ProcessGroupNCCL2"


def _windows() -> GroupTimeouts:
    return GroupTimeouts(settle({"process_group": LONG, "steady_process_group": SHORT}))


def _make(how: str) -> dist.ProcessGroup | None:
    """A group of ranks 0 and 1 (and one of the others); None: the default group."""
    if how == "mesh":
        return init_device_mesh("cuda", (2, 2), mesh_dim_names=("a", "b")).get_group("b")
    if how == "split":
        return dist.split_group(split_ranks=[[0, 1]], timeout=LONG)
    if how.startswith("new_group"):
        return dist.new_group([0, 1], timeout=LONG)
    return None


def tightened(how: str, never: Path) -> None:
    """Rank 0 waits for rank 1 in a group whose timeout was shortened after it was made."""
    rank = begin(
        "cpu:gloo,cuda:nccl" if how == "mixed" else "nccl", eager=how == "split", timeout=LONG
    )
    windows = _windows()
    if how.endswith("afterwards"):
        windows.tighten()
    group = _make(how)
    sum_over(group)
    windows.look_for_new() if how.endswith("afterwards") else windows.tighten()
    note("tightened")
    if rank == 0:
        sum_over(group)
    wait_for(never)


def under_way() -> float:
    """A collective that began before the timeout was shortened."""
    rank = begin(timeout=LONG)
    sum_over(None)
    if rank == 1:
        time.sleep(3 * SHORT.total_seconds())
        return sum_over(None)
    tensor = torch.zeros(1, device="cuda")
    work = dist.all_reduce(tensor, async_op=True)
    _windows().tighten()
    assert work is not None
    work.wait()
    return float(tensor.cpu())


def failed_collective(go: Path) -> str:
    """Rank 0 has begun a collective which fails while its main thread does something else."""
    rank = begin(timeout=LONG)
    sum_over(None)
    _windows().tighten()
    if rank == 0:
        dist.all_reduce(torch.zeros(1, device="cuda"), async_op=True)
    note("begun")
    wait_for(go)
    time.sleep(SHORT.total_seconds())  # what has been reported ends the process at once, or never
    return "goes on"


def stuck_watchdog(go: Path) -> None:
    """The main thread goes on; from ``go`` on a rule holds up who asks whether work is done."""
    begin(timeout=LONG)
    sum_over(None)
    note("begun")
    wait_for(go)
    dist.all_reduce(torch.zeros(1, device="cuda"), async_op=True)
    time.sleep(6 * HEARTBEAT_S)
    note("goes on")


def late_peer() -> float:
    """All ranks wait in a collective for rank 1."""
    if begin(timeout=LONG) == 1:
        time.sleep(4 * HEARTBEAT_S)
    return sum_over(None)


def blocking_wait(over: Path) -> tuple[str, str]:
    """What a collective that rank 1 does not come to raises, without ``async_op`` and with it."""
    rank = begin(timeout=LONG)
    sum_over(None)
    _windows().tighten()
    if rank == 1:
        wait_for(over)
        return "", ""
    # torch 2.5 prints the tensor; of whole numbers, that takes no kernel that is not simulated
    tensor = torch.zeros(1, dtype=torch.int64, device="cuda")
    at_once = message(lambda: dist.all_reduce(tensor))
    waited = ""
    if at_once == "no error":
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        waited = message(work.wait)
    over.touch()
    return at_once, waited


def nobody_waits() -> str:
    """A collective that is past its timeout, and that no ``wait()`` looks at."""
    rank = begin(timeout=LONG)
    sum_over(None)
    _windows().tighten()
    if rank == 0:
        dist.all_reduce(torch.zeros(1, device="cuda"), async_op=True)
    time.sleep(3 * SHORT.total_seconds())
    if rank == 1:
        dist.all_reduce(torch.zeros(1, device="cuda"))
    torch.cuda.synchronize()
    return f"rank {os.environ['RANK']} goes on"
