"""Training that keeps its state in snapshots, for tests: deterministic, on Gloo."""

from __future__ import annotations

import hashlib
import random
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ncclops import restart as inprocess
from ncclops.restart import snapshot
from ncclops.testing import note, place

SHORT = timedelta(milliseconds=100)
TIMES: dict[str, Any] = {
    "soft_timeout": timedelta(seconds=20),
    "hard_timeout": timedelta(seconds=40),
    "heartbeat_timeout": timedelta(seconds=5),
    "barrier_timeout": timedelta(seconds=80),
    "monitor_process_interval": SHORT,
    "progress_watchdog_interval": SHORT,
    "monitor_thread_interval": 2 * SHORT,
    "heartbeat_interval": SHORT,
}
wrapped = inprocess.Wrapper(**TIMES)


def digest_of(*states: Any) -> str:
    """Of the bits of all tensors in ``states``."""
    whole = hashlib.sha256()
    for state in states:
        for name, value in sorted(state.items(), key=str):
            if isinstance(value, torch.Tensor):
                local = value.to_local() if hasattr(value, "to_local") else value
                whole.update(f"{name}".encode() + local.detach().numpy().tobytes())
            elif isinstance(value, dict):
                whole.update(digest_of(value).encode())
    return whole.hexdigest()[:16]


class Sampler:
    """Draws with a generator of its own, and counts: both are state."""

    def __init__(self, rank: int) -> None:
        self.generator = random.Random(rank)
        self.drawn = 0

    def draw(self) -> int:
        self.drawn += 1
        return self.generator.randrange(1000)

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.getstate(), "drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.setstate(state["generator"])
        self.drawn = state["drawn"]


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: list[int]) -> None:
    """The same on all ranks: each number gives a row of the global batch."""
    rows = [torch.rand(8, generator=torch.Generator().manual_seed(each)) for each in numbers]
    batch = torch.stack(rows)
    optimizer.zero_grad()
    (model(batch) - batch).square().mean().backward()
    optimizer.step()


@wrapped
def replicas(steps: int, every: int | None) -> str:
    """Every rank computes the same, and the ranks meet: the loss of one changes no number."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model, optimizer = model_and_optimizer()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    torch.manual_seed(1)
    snapshots = snapshot.Snapshots(
        {"model": model, "optimizer": optimizer, "scheduler": scheduler, "rng": snapshot.Rng()},
        replicated=["model", "optimizer", "scheduler"],
        every=every,
    )
    restored = snapshots.restore()
    note("restored", step=restored.step, source=restored.source.value, told=str(restored))
    note(
        "holds",
        descriptors=len(list(Path("/proc/self/fd").iterdir())),
        threads=sorted(each.name for each in threading.enumerate()),
    )
    for step in range(restored.step or 0, steps):
        place("step")
        numbers = torch.randint(10_000, (6,)).tolist()  # the process's generator is state
        step_of(model, optimizer, numbers)
        scheduler.step()
        with torch.no_grad():
            for parameter in model.parameters():
                dist.all_reduce(parameter, dist.ReduceOp.MAX)  # of equal numbers: no rounding
        place("reduced")
        snapshots.take(step + 1)
        place("taken")
    note("overhead", **vars(snapshots.overhead))
    dist.barrier()
    dist.destroy_process_group()
    return digest_of(model.state_dict(), optimizer.state_dict()["state"])


def _own_state(steps: int, directory: Path | None) -> tuple[int, int]:
    """What a rank draws is its own, and kept by a partner; a checkpoint is the last resort."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    sampler, total = Sampler(rank), torch.zeros((), dtype=torch.int64)

    def checkpoint() -> int | None:
        if directory is None:
            return None
        total.fill_(123)
        return 2

    snapshots = snapshot.Snapshots(
        {"sampler": sampler, "total": total}, every=1, checkpoint=checkpoint
    )
    restored = snapshots.restore()
    note(
        "restored",
        step=restored.step,
        source=restored.source.value,
        rank=rank,
        elsewhere={k: v.value for k, v in restored.elsewhere.items()},
        passed_over=restored.passed_over,
    )
    for step in range(restored.step or 0, steps):
        place("step")
        drawn = torch.tensor(sampler.draw())
        dist.all_reduce(drawn)
        total += drawn
        snapshots.take(step + 1)
    dist.destroy_process_group()
    return int(total), sampler.drawn


own_state = wrapped(_own_state)


@inprocess.Wrapper(
    **TIMES,
    rank_assignment=inprocess.Compose(
        inprocess.rank_assignment.MaxActiveWorldSize(3), inprocess.rank_assignment.ShiftRanks()
    ),
)
def own_state_with_reserve(steps: int, directory: Path | None) -> tuple[int, int]:
    """Three ranks run, the others are reserves."""
    return _own_state(steps, directory)


@inprocess.Wrapper(
    **TIMES,
    rank_assignment=inprocess.Compose(
        inprocess.rank_assignment.ActiveWorldSizeDivisibleBy(2),
        inprocess.rank_assignment.ShiftRanks(),
    ),
)
def sharded(steps: int) -> str:
    """FSDP2 over pairs of ranks, each of which has a part of everything; pairs are replicas."""
    # A second of each process that imports this module: ranks of the other programs, and pytest.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    pairs = dist.get_world_size() // 2
    mesh = init_device_mesh("cpu", (pairs, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = {"model": model, "optimizer": optimizer}
    snapshots = snapshot.Snapshots(
        state, replicated=state.keys(), shard=str(mesh.get_local_rank("shard")), every=1
    )
    restored = snapshots.restore()
    note("restored", step=restored.step, source=restored.source.value)
    for step in range(restored.step or 0, steps):
        place("step")
        step_of(model, optimizer, [step * 10 + each for each in range(6)])
        place("reduced")
        snapshots.take(step + 1)
    dist.barrier()
    dist.destroy_process_group()
    return digest_of(model.state_dict(), optimizer.state_dict()["state"])
