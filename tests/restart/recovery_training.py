"""A training that random faults strike, for ``scripts/soak_recovery.py``: run by `ncclops launch`.

All that it goes on from is in snapshots, and every sum is rounded the same way, so its result is
that of an undisturbed run to the last bit.

    recovery_training.py SHAPE DIRECTORY STEPS

``DIRECTORY`` has ``plan.json``, and gets what has struck, checkpoints, and each rank's result.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import hashlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ncclops import receipt, restart
from ncclops.restart import snapshot

SAVE_EVERY = 20
ROWS, WIDTH = 8, 16


class OutOfLuck(Exception):
    """An exception of the script's own."""


# None of them is a plain mistake, which ends a job early in its run.
EXCEPTIONS = (RuntimeError, ValueError, OSError, ConnectionResetError, OutOfLuck, MemoryError)


class Plan:
    """Faults, each of which strikes once in a run: ``[number, rank, step, place, kind]``."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._rank = int(os.environ["RANK"])
        self._faults = json.loads((directory / "plan.json").read_text())

    def strike(self, place: str, step: int) -> None:
        """Whatever is planned for here."""
        for number, rank, at, where, kind in self._faults:
            if (rank, where) != (self._rank, place) or not self._is_due(number, place, step, at):
                continue
            with contextlib.suppress(FileExistsError):
                self._mark(number).touch(exist_ok=False)
                _strike(kind, f"{place} of step {step}")

    def _is_due(self, number: int, place: str, step: int, at: int) -> bool:
        if place == "starting":  # in the restart for the fault before
            return self._mark(number - 1).exists()
        if place == "restoring":  # the step is the one to go on with
            return step >= at - 3
        return step == at

    def _mark(self, number: int) -> Path:
        return self._directory / f"struck-{number}"


def _strike(kind: str, where: str) -> None:
    print(f"fault: {kind} in {where}", flush=True)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "hang":
        time.sleep(3600)
    elif kind == "gil-hang":
        ctypes.PyDLL(None).sleep(3600)
    elif kind == "exit":
        sys.exit(3)
    elif kind == "returns":
        raise SystemExit
    else:
        raise EXCEPTIONS[int(kind.removeprefix("raise-"))](f"planned: {where}")


class Shuffled:
    """A rank's share of a data set, shuffled anew for each pass by a generator of its own."""

    def __init__(self, rank: int) -> None:
        self._generator = random.Random(rank)
        self._order: list[int] = []

    def next_batch(self) -> torch.Tensor:
        """Some rows."""
        if len(self._order) < ROWS:
            self._order = list(range(64))
            self._generator.shuffle(self._order)
        rows, self._order = self._order[:ROWS], self._order[ROWS:]
        seeds = torch.tensor(rows, dtype=torch.float32).view(ROWS, 1)
        return torch.sin(seeds * torch.arange(1, WIDTH + 1))

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self._generator.getstate(), "order": self._order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._generator.setstate(state["generator"])
        self._order = list(state["order"])


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(WIDTH, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, WIDTH)
    return nn.Sequential(*layers)


def wrapped_by_ddp(model: nn.Module, device: torch.device) -> DistributedDataParallel:
    """Whose buckets stay as they are from the first step on: so do the orders of its sums."""
    given = {} if device.type == "cpu" else {"init_sync": False}
    return DistributedDataParallel(model, find_unused_parameters=True, **given)


class OnHost(nn.Module):
    """Parameters and gradients are on the device, products are computed on the host: the fake GPU
    computes sums, and no products."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        weights = {name: each.cpu() for name, each in self.layers.named_parameters()}
        return torch.func.functional_call(self.layers, weights, batch)


class Trainer:
    """What trains, and its state."""

    def __init__(self, shape: str, directory: Path, steps: int, plan: Plan) -> None:
        self.shape, self.directory, self.steps, self.plan = shape, directory, steps, plan
        self.rank = int(os.environ["RANK"])
        self.device = torch.device("cpu")
        if shape == "nccl":
            self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(self.device)
        self.model = make_model()
        self.optimizer: torch.optim.Optimizer | None = None
        self.forward: nn.Module
        self.data = Shuffled(self.rank)
        self.state: dict[str, Any] = {}
        self.beginning: dict[str, Any] = {}
        self.step = 0

    def distribute(self) -> None:
        """Over the ranks of the default group."""
        if self.shape == "fsdp2":
            from torch.distributed.fsdp import fully_shard

            self.forward = fully_shard(self.model)
        if self.optimizer is None:
            self._begin()
        if self.shape != "fsdp2":
            self.forward = wrapped_by_ddp(self.model, self.device)

    def _begin(self) -> None:
        """What there is at first, before DDP takes over rank 0's parameters, which may have been
        trained where this process is new."""
        if self.shape == "nccl":
            self.model = OnHost(self.model).to(self.device)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2, foreach=False)
        else:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        torch.manual_seed(self.rank)  # dropout differs from rank to rank
        self.state = {
            "model": self.model,
            "optimizer": self.optimizer,
            "data": self.data,
            "rng": snapshot.Rng(),
        }
        self.beginning = copy.deepcopy({k: v.state_dict() for k, v in self.state.items()})

    def restore(self) -> None:
        """The newest step that all have."""
        self.plan.strike("restoring", self.step)
        self.snapshots = snapshot.Snapshots(
            self.state,
            replicated=[] if self.shape == "fsdp2" else ["model", "optimizer"],
            every=1,
            checkpoint=self.load,
        )
        restored = self.snapshots.restore()
        self.step = restored.step or 0
        print(f"rank {self.rank} of {os.environ['WORLD_SIZE']}: {restored}", flush=True)
        self.plan.strike("restoring", self.step)

    def train(self) -> None:
        """To the last step."""
        strike = self.plan.strike
        assert self.optimizer is not None
        while self.step < self.steps:
            step = self.step
            strike("step", step)
            batch = self.data.next_batch()
            self.optimizer.zero_grad()
            loss = (self.forward(batch) - batch).square().mean()
            strike("forward", step)
            loss.backward()
            strike("backward", step)
            self.optimizer.step()
            strike("optimizer", step)
            self.snapshots.take(step + 1)
            strike("taken", step)
            receipt.step(step)
            self.step += 1
            if self.step % SAVE_EVERY == 0:
                self.save()

    def save(self) -> None:
        """A file for each rank and step: the last resort."""
        path = self.directory / f"saved-{self.step}-{self.rank}"
        draft = path.with_suffix(".new")
        torch.save({name: each.state_dict() for name, each in self.state.items()}, draft)
        draft.replace(path)

    def load(self) -> int:
        """The newest that all ranks have, or the beginning: objects that stay have trained."""
        steps = range(self.steps // SAVE_EVERY * SAVE_EVERY, 0, -SAVE_EVERY)
        for step in steps:
            paths = [self.directory / f"saved-{step}-{r}" for r in range(dist.get_world_size())]
            if all(path.exists() for path in paths):
                self._put_back(torch.load(paths[self.rank], weights_only=False))
                return step
        self._put_back(copy.deepcopy(self.beginning))
        return 0

    def _put_back(self, states: Any) -> None:
        for name, each in self.state.items():
            each.load_state_dict(states[name])

    def finish(self) -> None:
        """This rank's result."""
        whole = hashlib.sha256()
        assert self.optimizer is not None
        tensors = dict(self.model.state_dict())
        for number, states in self.optimizer.state_dict()["state"].items():
            tensors |= {f"{number} {name}": each for name, each in states.items()}
        for name, tensor in sorted(tensors.items()):
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            whole.update(name.encode() + torch.as_tensor(local).detach().cpu().numpy().tobytes())
        whole.update(repr(torch.rand(4)).encode() + repr(self.data.state_dict()).encode())
        (self.directory / f"result-{self.rank}").write_text(whole.hexdigest()[:16])


def enter(trainer: Trainer) -> None:
    """The classic way: called again after each fault."""
    trainer.plan.strike("starting", 0)
    dist.init_process_group("nccl" if trainer.shape == "nccl" else "gloo")
    trainer.distribute()
    trainer.restore()
    trainer.train()
    dist.barrier()
    trainer.finish()
    receipt.end()
    del trainer.forward
    gc.collect()
    dist.destroy_process_group()


def keep_going(wrap: Callable[..., Any], make: Callable[[], Trainer]) -> None:
    """Objects stay alive."""

    def main(call: restart.CallWrapper) -> None:
        trainer = make()

        def regroup(old: restart.Membership | None, new: restart.Membership) -> None:
            trainer.plan.strike("starting", 0)
            group = call.init_process_group("gloo")
            if not group.objects_stay:
                trainer.distribute()
            else:
                group.renew(trainer.forward)
            trainer.restore()

        call.keep_going(trainer.train, regroup)
        dist.barrier()
        trainer.finish()
        receipt.end()
        del trainer.forward
        dist.destroy_process_group()

    main.__annotations__["call"] = restart.CallWrapper
    wrap(main)()


if __name__ == "__main__":
    torch.set_num_threads(1)
    shape, directory, steps = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])

    def make() -> Trainer:
        return Trainer(shape, directory, steps, Plan(directory))

    if shape == "keep-going":
        limits: dict[str, Any] = {
            "soft_timeout": timedelta(seconds=8),
            "hard_timeout": timedelta(seconds=14),
            "barrier_timeout": timedelta(seconds=60),
            "grow_timeout": timedelta(seconds=30),
        }
        keep_going(restart.Wrapper(**limits), make)
    else:
        enter(make())
