"""What a rank runs in tests of snapshots of what is on a GPU."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ncclops import restart as inprocess
from ncclops.restart import snapshot
from ncclops.testing import note

_WITHIN_S = 60.0


class _Adding(torch.optim.Optimizer):
    """A step adds one to each parameter."""

    def step(self, closure: Any = None) -> None:
        del closure
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(1)


def _wait_for(path: Path) -> None:
    end = time.monotonic() + _WITHIN_S
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.01)  # a file announces nothing


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1024, device="cuda"))
        self.register_buffer("average", torch.ones(1024, device="cuda"))


class _Average:
    """What a user's object has on the GPU, once it has trained."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


@inprocess.Wrapper()
def goes_on_while_a_copy_is_under_way(
    released: Path, overlap: bool
) -> tuple[int | None, float, float, list[str]]:
    """What was queued before ``take`` is in the snapshot, and what was queued after it is not."""
    model = _Model()
    optimizer = _Adding(model.parameters(), {})
    own, noted = _Average(), dict[str, Any]()
    state = {"model": model, "optimizer": optimizer, "rng": snapshot.Rng()}
    state |= {"own": own, "noted": noted}
    snapshots = snapshot.Snapshots(state, every=1, overlap=overlap)
    restored = snapshots.restore()
    if restored.step is not None:
        average: torch.Tensor = model.average
        found = model.weight.detach().cpu()[0].item(), average.cpu()[0].item()
        made = (own.state["sum"], noted["sum"], own.state["on host"])
        return restored.step, *found, [each.device.type for each in made]
    own.state = {"sum": torch.ones(4, device="cuda"), "on host": torch.ones(4)}
    noted["sum"] = torch.ones(4, device="cuda")
    torch.cuda.synchronize()
    note("ready")
    _wait_for(released)
    optimizer.step()
    model.average.fill_(5)
    snapshots.take(1)
    optimizer.step()
    model.average.fill_(9)
    note("queued", done=torch.cuda.current_stream().query())
    snapshots.wait()
    torch.cuda.synchronize()
    note("after", weight=model.weight.detach().cpu()[0].item())
    raise RuntimeError("as asked")


@inprocess.Wrapper()
def loses_its_peer_in_a_collective(queued: Path) -> tuple[int | None, float]:
    """Rank 1 fails before the collective of step 3, after which rank 0 has queued its snapshot.

    The abort ends that collective without an error, and the device goes on with what follows. The
    state is equal on all ranks: rank 0's alone would do for both.
    """
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    model = _Model()
    optimizer = _Adding(model.parameters(), {})
    state = {"model": model, "optimizer": optimizer}
    snapshots = snapshot.Snapshots(state, replicated=state.keys(), every=2)  # steps 1 and 3
    restored = snapshots.restore()
    if restored.step is not None:
        weight = model.weight.detach().cpu()[0].item()
        dist.destroy_process_group()
        return restored.step, weight
    for step in range(3):
        if step == 2 and rank == 1:
            _wait_for(queued)
            raise RuntimeError("as asked")
        gradient = torch.ones(1024, device="cuda")
        dist.all_reduce(gradient)
        optimizer.step()
        snapshots.take(step + 1)
        if step == 0:
            snapshots.wait()  # so that the next call reports it, and the third step's may begin
    queued.touch()
    torch.cuda.synchronize()  # ended by the abort
    time.sleep(_WITHIN_S)
    raise AssertionError("it was not interrupted")
