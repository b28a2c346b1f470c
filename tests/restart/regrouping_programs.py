"""DDP that goes on after a fault, over a group that is reconfigured or made anew."""

from __future__ import annotations

import copy
import os
import signal
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ncclops import restart
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
        if group.objects_stay:
            group.renew(self._ddp)
        else:
            self.made += 1
            self._ddp = DistributedDataParallel(copy.deepcopy(_plain()))

    def train(self) -> list[float]:
        """In each iteration, rank 1 fails in the place that is next; the gradients after all."""
        for number in range(3):
            place = dict(enumerate(self._faults)).get(self._call.iteration)
            if place is not None and number == 1 and self._initial == 1:
                self._fail_in(place)
            self._ddp.zero_grad()
            _loss(self._ddp, self._initial).backward()
        found = _sizes(self._ddp.module)
        dist.barrier()
        return found

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
