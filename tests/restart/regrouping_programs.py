"""DDP that goes on after a fault, over a group that is reconfigured or made anew."""

from __future__ import annotations

import copy
import json
import os
import signal
import threading
import time
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ncclops import restart
from ncclops.restart._groups.recorder import recorded
from tests.fakegpu.gpus import take_gpu
from tests.restart.scenarios import FAST, Worker

WIDTH, LAYERS = 16, 3


def _plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def _loss(model: nn.Module, rank: int) -> torch.Tensor:
    torch.manual_seed(1 + rank)
    value: torch.Tensor = model(torch.rand(4, WIDTH)).square().sum()
    return value


def expected(ranks: list[int]) -> list[float]:
    """What ``_gradients`` finds where all went well, of each layer: the mean over the ranks."""
    model = _plain()
    sum((_loss(model, rank) for rank in ranks), torch.zeros(())).backward()
    return [value / len(ranks) for value in _sizes(model)]


def _sizes(model: nn.Sequential) -> list[float]:
    return [float(p.grad.abs().sum()) for p in model.parameters() if p.grad is not None]


class Trainer:
    """``initial`` is the rank at launch, of which the batch is."""

    def __init__(self, call: restart.CallWrapper, faults: list[str], initial: int) -> None:
        self._call, self._faults, self._initial = call, faults, initial
        self.made, self.rungs = 0, list[str]()
        self._ddp: Any = None

    def regroup(self, _old: restart.Membership | None, _new: restart.Membership) -> None:
        group = self._call.init_process_group("gloo")
        self.rungs.append(group.rung.value)
        if self._initial == 1 and self._fault() == "making":
            raise ValueError("as asked")
        if group.objects_stay:
            group.renew(self._ddp)
        else:
            self.made += 1
            self._ddp = DistributedDataParallel(copy.deepcopy(_plain()))

    def train(self) -> list[float]:
        """In each iteration, rank 1 fails in the place that is next; the gradients after all."""
        for number in range(3):
            place = self._fault()
            if place is not None and number == 1 and self._initial == 1:
                self._fail_in(place)
            self._ddp.zero_grad()
            _loss(self._ddp, self._initial).backward()
        found = _sizes(self._ddp.module)
        dist.barrier()
        return found

    def _fault(self) -> str | None:
        return dict(enumerate(self._faults)).get(self._call.iteration)

    def _fail_in(self, place: str) -> None:
        """The other ranks wait for this one in a backward pass."""
        layer = self._ddp.module[1]
        if place == "forward":
            layer.register_forward_pre_hook(_raise)
        else:
            layer.register_full_backward_hook(_raise)
        _loss(self._ddp, self._initial).backward()


def _raise(module: nn.Module, *_: Any) -> None:
    module._forward_pre_hooks.clear()
    module._backward_hooks.clear()
    raise ValueError("as asked")


def dies_in_a_reconfiguration(worker: Worker) -> Any:
    """Four ranks restart twice; rank 2 dies ``after_ms`` after it has begun to get its group after
    the second. How the others have come to theirs, by iteration."""
    rungs: list[tuple[int, str, int]] = []

    def die() -> None:
        time.sleep(worker.parameters["after_ms"] / 1000)
        os.kill(os.getpid(), signal.SIGKILL)

    def function(call: restart.CallWrapper) -> list[tuple[int, str, int]]:
        def regroup(_old: restart.Membership | None, new: restart.Membership) -> None:
            if worker.rank == 2 and new.iteration == 2:
                threading.Thread(target=die, daemon=True).start()
            group = call.init_process_group("gloo")
            rungs.append((new.iteration, group.rung.value, new.world_size))

        def loop() -> list[tuple[int, str, int]]:
            dist.all_reduce(torch.ones(1))
            if call.iteration < 2 and worker.rank == 0:
                raise ValueError("as asked")
            while call.iteration <= 2:
                dist.all_reduce(torch.ones(1))
            dist.barrier()
            return rungs

        return call.keep_going(loop, regroup)

    function.__annotations__["call"] = restart.CallWrapper
    return worker.wrap(function, **FAST)()


def ddp_goes_on(worker: Worker) -> Any:
    """Two ranks: what the last gradients are, how often DDP was made, and the rungs."""

    def function(call: restart.CallWrapper) -> dict[str, Any]:
        trainer = Trainer(call, worker.parameters["faults"], worker.rank)
        gradients = call.keep_going(trainer.train, trainer.regroup)
        dist.destroy_process_group()
        return {"gradients": gradients, "made": trainer.made, "rungs": trainer.rungs}

    function.__annotations__["call"] = restart.CallWrapper
    return worker.wrap(function, **FAST)()


class Scaled(nn.Module):
    """A model of what a fake GPU computes."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(SCALED, device=device))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return (self.weights * batch).sum()


SCALED, STEPS = 5, 6


class _OnGpus:
    """Training over NCCL, by DDP or without what that imports. Ranks fail: ``faults`` says who dies
    or raises, maybe in a batch of messages, by the step before which."""

    def __init__(self, worker: Worker, call: restart.CallWrapper) -> None:
        self._worker, self._call = worker, call
        self._device = take_gpu(worker.rank)
        self._model = Scaled(self._device)
        self._ddp: Any = None
        # A process that takes the place of a lost rank comes later.
        self._faults = {} if call.iteration else dict(worker.parameters["faults"])
        self.steps, self.sizes = 0, dict[int, int]()

    def regroup(self, _old: restart.Membership | None, new: restart.Membership) -> None:
        given = self._worker.parameters
        within = timedelta(seconds=given.get("within", 20))
        how = {name: given[name] for name in ("shrink", "reconfigure") if name in given}
        group = self._call.init_process_group("nccl", device_id=self._device, within=within, **how)
        assert (dist.get_rank(), dist.get_world_size()) == (new.rank, new.world_size)
        ranks = dist.get_process_group_ranks(dist.group.WORLD)
        assert ranks == list(range(new.world_size))
        said = recorded("nccl")["pg_config"].get(dist.group.WORLD.group_name, {}).get("ranks", "[]")
        assert json.loads(said) in ([], ranks), f"{said}: by that a hang would be explained"
        self._worker.note("regrouped", rung=group.rung.value, why=group.why, size=new.world_size)
        if self._ddp is not None and group.objects_stay:
            group.renew(self._ddp)
        elif given["ddp"]:
            self._ddp = DistributedDataParallel(self._model)
        self._agree_on_state(new)
        if new.world_size > 1:
            self._use_other_groups(new)

    def _agree_on_state(self, new: restart.Membership) -> None:
        """A fault may find one rank before the end of a step, and another one after it."""
        steps = torch.zeros(new.world_size)
        steps[new.rank] = self.steps
        steps = self._summed(steps)
        furthest = int(steps.argmax())
        mine = self._model.weights.detach().cpu()
        weights = self._summed(mine if new.rank == furthest else torch.zeros(SCALED))
        self.steps = int(steps[furthest])
        with torch.no_grad():
            self._model.weights.copy_(weights.to(self._device))

    def _summed(self, numbers: torch.Tensor) -> torch.Tensor:
        summed = numbers.to(self._device)
        dist.all_reduce(summed)
        return summed.cpu()

    def _use_other_groups(self, new: restart.Membership) -> None:
        """A group beside it, and messages between two ranks."""
        everyone = dist.new_group(list(range(new.world_size)))
        total = torch.ones(1, device=self._device)
        dist.all_reduce(total, group=everyone)
        number = torch.full((1,), float(new.iteration), device=self._device)
        if new.rank == 0:
            dist.send(number, 1)
        elif new.rank == 1:
            number.zero_()
            dist.recv(number, 0)
        assert (float(total.cpu()), float(number.cpu())) == (new.world_size, new.iteration)

    def train(self) -> list[float]:
        while self.steps < STEPS:
            self._fail_if_asked()
            gradient = self._mean_gradient().cpu()  # it is there, or this rank restarts
            with self._call.atomic(), torch.no_grad():
                self._model.weights += gradient.to(self._device)
                self.sizes[self.steps] = dist.get_world_size()
                self.steps += 1
        found: list[float] = self._model.weights.detach().cpu().tolist()
        dist.destroy_process_group()
        return found

    def _mean_gradient(self) -> torch.Tensor:
        batch = torch.full((SCALED,), float(self._worker.rank + self.steps))
        model = self._model if self._ddp is None else self._ddp
        model.zero_grad()
        model(batch.to(self._device)).backward()
        gradient = self._model.weights.grad
        assert gradient is not None
        if self._ddp is None:
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()
        return gradient

    def _fail_if_asked(self) -> None:
        who, how = self._faults.get(str(self.steps), (None, ""))
        if self._worker.rank != who:
            return
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        self._faults.clear()
        with ExitStack() as stack:
            if how == "raises in a batch":
                stack.enter_context(dist._coalescing_manager(device=self._device))
                dist.isend(torch.ones(1, device=self._device), 0)
            raise ValueError("as asked")


def on_gpus(worker: Worker) -> Any:
    """Three ranks or more: the weights after all steps, and the size of the world in each."""

    def function(call: restart.CallWrapper) -> dict[str, Any]:
        trainer = _OnGpus(worker, call)
        weights = call.keep_going(trainer.train, trainer.regroup)
        return {"weights": weights, "sizes": trainer.sizes}

    function.__annotations__["call"] = restart.CallWrapper
    incidents = str(worker.directory / "incidents")
    grow = timedelta(seconds=40) if worker.parameters.get("grow") else None
    return worker.wrap(function, incident_dir=incidents, grow_timeout=grow, **FAST)()
