"""A training that random faults strike, for ``scripts/soak_recovery.py``: run by `ncclops launch`.

All that it goes on from is in snapshots, and every sum is rounded the same way, so its result is
that of an undisturbed run to the last bit.

    recovery_training.py SHAPE DIRECTORY STEPS

``DIRECTORY`` has ``plan.json``, and gets what has struck, checkpoints, and each rank's result.
``SHAPE`` is made of words, with hyphens between: ``ddp`` or ``fsdp2``; ``nccl``, on the fake GPU;
``whole``, with what else trainings consist of; ``keep-going``, for objects that stay alive; and
``shrink``, where no lost rank comes back.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import hashlib
import itertools
import json
import math
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from ncclops import receipt, restart
from ncclops.restart import snapshot

SAVE_EVERY = 20
EVALUATE_EVERY, EVALUATED = 5, 3
SLOW_S = 3.0
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
        if place in ("starting", "loading", "compiling"):  # in the restart for the fault before
            return self._mark(number - 1).exists()
        if place == "restoring":  # the step is the one to go on with
            return step >= at - 3
        return step == at

    def _mark(self, number: int) -> Path:
        return self._directory / f"struck-{number}"


def _strike(kind: str, where: str) -> None:
    print(f"fault: {kind} in {where}", flush=True)
    if kind == "slow":  # no fault
        time.sleep(SLOW_S)
    elif kind == "later":  # while the snapshot is checked, and copied to the partner
        threading.Timer(random.Random(where).uniform(0, 0.02), _strike, ("kill", where)).start()
    elif kind == "kill":
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


class Noisy(Dataset[torch.Tensor]):
    """Rows with noise of each generator that a worker of a loader has."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, row: int) -> torch.Tensor:
        noise = torch.rand(WIDTH) * random.random() * numpy.random.random()
        return torch.sin(row * torch.arange(1, WIDTH + 1)) + noise


class Passes:
    """A rank's share of a data set, in an order that a sampler makes of the number of the pass,
    read by a worker whose seed is of that number, too."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._data = Noisy()
        self._sampler = DistributedSampler(self._data, ranks, rank)
        self._generator = torch.Generator()
        self._at = {"pass": 0, "done": 0}
        self._batches: Any = None

    def next_batch(self) -> torch.Tensor:
        """Some rows."""
        if self._batches is None:
            self._sampler.set_epoch(self._at["pass"])
            self._generator.manual_seed(self._at["pass"])
            loader = DataLoader(
                self._data, ROWS, sampler=self._sampler, num_workers=1, generator=self._generator
            )
            self._batches = itertools.islice(loader, self._at["done"], None)
        batch: torch.Tensor | None = next(self._batches, None)
        if batch is None:
            self.load_state_dict({"pass": self._at["pass"] + 1, "done": 0})
            return self.next_batch()
        self._at["done"] += 1
        return batch

    def state_dict(self) -> dict[str, int]:
        return dict(self._at)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._at, self._batches = dict(state), None


class Struck:
    """``data`` whose state cannot be read or put back when a fault is planned for that."""

    def __init__(self, data: Shuffled | Passes, trainer: Trainer) -> None:
        self._data, self._trainer = data, trainer

    def state_dict(self) -> dict[str, Any]:
        self._trainer.plan.strike("taking", self._trainer.step)
        return self._data.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._trainer.plan.strike("loading", self._trainer.step)
        self._data.load_state_dict(state)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(WIDTH, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, WIDTH)
    return nn.Sequential(*layers)


def wrapped_by_ddp(model: nn.Module, device: torch.device) -> DistributedDataParallel:
    """Whose buckets stay as they are from the first step on: so do the orders of its sums."""
    given = {} if device.type == "cpu" else {"init_sync": False}
    return DistributedDataParallel(model, find_unused_parameters=True, **given)


def summed(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Gradients are not divided by the number of ranks."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    future: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda of: of.value()[0])
    return future


summed.__annotations__.clear()  # torch compares them with types, and they are text


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
        self.words = shape.split("-")
        self.directory, self.steps, self.plan = directory, steps, plan
        self.rank = int(os.environ["RANK"])
        self.device = torch.device("cpu")
        if "nccl" in self.words:
            self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(self.device)
        self.model = make_model()
        self.optimizer: torch.optim.Optimizer | None = None
        self.forward: nn.Module
        self.data = self.make_data()
        self.state: dict[str, Any] = {}
        self.beginning: dict[str, Any] = {}
        self.step = 0

    def make_data(self) -> Shuffled | Passes:
        """This rank's; where ranks are lost for good, that of all."""
        return Shuffled(0 if "shrink" in self.words else self.rank)

    def distribute(self) -> None:
        """Over the ranks of the default group."""
        if "fsdp2" in self.words:
            from torch.distributed.fsdp import fully_shard

            self.model, self.state = make_model(), {}  # FSDP2 does not go on
            self.forward = fully_shard(self.model)
        if not self.state:
            self._begin()
        if "fsdp2" not in self.words:
            self.forward = ddp = wrapped_by_ddp(self.model, self.device)
            if "shrink" in self.words:
                ddp.register_comm_hook(None, summed)

    def _begin(self) -> None:
        """What there is at first, before DDP takes over rank 0's parameters, which may have been
        trained where this process is new. May be interrupted anywhere: ``state`` is set last."""
        if "nccl" in self.words:
            self.model = OnHost(make_model()).to(self.device)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2, foreach=False)
        else:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        # Dropout differs from rank to rank.
        seed = 0 if "shrink" in self.words else self.rank
        torch.manual_seed(seed)
        random.seed(seed)
        self.data = self.make_data()  # objects of before may have read of it
        numpy.random.seed(seed)
        state = {
            "model": self.model,
            "optimizer": self.optimizer,
            "data": Struck(self.data, self),
            "rng": snapshot.Rng(),
            **self.further_state(self.optimizer),
        }
        self.begins_with(state)

    def begins_with(self, state: dict[str, Any]) -> None:
        self.beginning = copy.deepcopy({k: state_of(v) for k, v in state.items()})
        self.state = state

    def further_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return {}

    def replicated(self) -> list[str]:
        if "fsdp2" in self.words:
            return []
        return [*self.state] if "shrink" in self.words else ["model", "optimizer"]

    def restore(self) -> None:
        """The newest step that all have."""
        self.plan.strike("restoring", self.step)
        self.snapshots = snapshot.Snapshots(
            self.state,
            replicated=self.replicated(),
            every=1,
            domain=os.environ["GROUP_RANK"],  # several nodes may be on this machine
            checkpoint=self.load,
        )
        restored = self.snapshots.restore()
        self.step = restored.step or 0
        print(f"rank {self.rank} of {os.environ['WORLD_SIZE']}: {restored}", flush=True)
        self.plan.strike("restoring", self.step)

    def train(self) -> None:
        """To the last step."""
        while self.step < self.steps:
            step = self.step
            self.plan.strike("step", step)
            self.train_step(step)
            self.snapshots.take(step + 1)
            self.plan.strike("taken", step)
            receipt.step(step)
            self.step += 1
            if self.step % SAVE_EVERY == 0:
                self.save()

    def train_step(self, step: int) -> None:
        """One update."""
        assert self.optimizer is not None
        batch = self.data.next_batch()
        self.optimizer.zero_grad()
        loss = (self.forward(batch) - batch).square().mean()
        if "shrink" in self.words:  # the sum is then the same with any number of ranks
            loss = loss * (dist.get_rank() == 0)
        self.plan.strike("forward", step)
        loss.backward()
        self.plan.strike("backward", step)
        self.optimizer.step()
        self.plan.strike("optimizer", step)

    def save(self) -> None:
        """A file for each rank and step: the last resort."""
        path = self.directory / f"saved-{self.step}-{self.rank}"
        draft = path.with_suffix(".new")
        torch.save({name: state_of(each) for name, each in self.state.items()}, draft)
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
            if isinstance(each, dict):
                each.update(states[name])
            else:
                each.load_state_dict(states[name])

    def finish(self) -> None:
        """This rank's result."""
        whole = hashlib.sha256()
        for name, each in self.state.items():
            add_to(whole, name, state_of(each))
        path = self.directory / f"result-{self.rank}"
        path.write_text(whole.hexdigest()[:16])


class Whole(Trainer):
    """With accumulation, a schedule, scaled losses, an average of the weights, a loader with a
    worker, generators of three libraries, values that are no tensors, and evaluations."""

    schedule: torch.optim.lr_scheduler.LRScheduler
    scaler: torch.amp.GradScaler
    average: AveragedModel

    def make_data(self) -> Passes:
        return Passes(self.rank, int(os.environ["WORLD_SIZE"]))

    def further_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        self.schedule = torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [
                torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10),
                torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps),
            ],
            milestones=[10],
        )
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=5)
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.notes: dict[str, Any] = {"best": None, "evaluated": {}, "name": "whole"}
        return {
            "schedule": self.schedule,
            "scaler": self.scaler,
            "average": self.average,
            "notes": self.notes,
        }

    def replicated(self) -> list[str]:
        return ["model", "optimizer", "schedule", "scaler", "average", "notes"]

    def train_step(self, step: int) -> None:
        strike, optimizer = self.plan.strike, self.optimizer
        assert optimizer is not None and isinstance(self.forward, DistributedDataParallel)
        optimizer.zero_grad()
        for last in (False, True):
            batch = self.data.next_batch() * random.random() * numpy.random.random()
            with contextlib.nullcontext() if last else self.forward.no_sync():
                loss = (self.forward(batch) - batch).square().mean()
                if step % 17 == 5:
                    loss = loss * torch.inf  # this update is left out
                strike("forward", step)
                self.scaler.scale(loss / 2).backward()
        strike("backward", step)
        self.scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(optimizer)
        strike("optimizer", step)
        self.scaler.update()
        self.schedule.step()
        self.average.update_parameters(self.model)
        if step % EVALUATE_EVERY == EVALUATED:
            self.evaluate(step)

    def evaluate(self, step: int) -> None:
        """All ranks, without a step."""
        self.forward.eval()
        self.average.eval()
        total = torch.zeros(())
        with torch.no_grad():
            for number in range(20):
                batch = torch.cos(number * torch.arange(WIDTH * ROWS).view(ROWS, WIDTH))
                total += (self.average(batch) - self.forward(batch)).square().mean()
                if number == 10:
                    self.plan.strike("evaluating", step)
            dist.all_reduce(total)
        self.forward.train()
        self.notes["best"] = min(total.item(), self.notes["best"] or math.inf)
        self.notes["evaluated"] = {**self.notes["evaluated"], step: total.item()}


def state_of(each: Any) -> Any:
    return dict(each) if isinstance(each, dict) else each.state_dict()


def add_to(whole: Any, name: str, value: Any) -> None:
    """A state to the hash of all."""
    if isinstance(value, dict):
        for key, each in value.items():
            add_to(whole, f"{name}.{key}", each)
    elif isinstance(value, torch.Tensor):
        local = value.to_local() if hasattr(value, "to_local") else value
        whole.update(name.encode() + local.detach().cpu().numpy().tobytes())
    else:
        whole.update(f"{name} {value!r}".encode())


def enter(trainer: Trainer) -> None:
    """The classic way: called again after each fault."""
    trainer.plan.strike("starting", 0)
    dist.init_process_group("nccl" if "nccl" in trainer.words else "gloo")
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
            if "nccl" in trainer.words:
                group = call.init_process_group("nccl", device_id=trainer.device, shrink=True)
            else:
                group = call.init_process_group("gloo")
            if not group.objects_stay or "fsdp2" in trainer.words:
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
