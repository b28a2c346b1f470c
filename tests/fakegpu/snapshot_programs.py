"""What a rank runs in tests of snapshots of what is on a GPU."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
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


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1024, device="cuda"))
        self.register_buffer("average", torch.ones(1024, device="cuda"))


@inprocess.Wrapper()
def goes_on_while_a_copy_is_under_way(
    released: Path, overlap: bool
) -> tuple[int | None, float, float]:
    """What was queued before ``take`` is in the snapshot, and what was queued after it is not."""
    model = _Model()
    optimizer = _Adding(model.parameters(), {})
    snapshots = snapshot.Snapshots(
        {"model": model, "optimizer": optimizer, "rng": snapshot.Rng()}, every=1, overlap=overlap
    )
    restored = snapshots.restore()
    if restored.step is not None:
        average: torch.Tensor = model.average
        return restored.step, model.weight.detach().cpu()[0].item(), average.cpu()[0].item()
    torch.cuda.synchronize()
    note("ready")
    end = time.monotonic() + _WITHIN_S
    while not released.exists() and time.monotonic() < end:
        time.sleep(0.01)  # the test announces nothing else
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
