"""Training loops that go on with their objects after a fault."""

from __future__ import annotations

import functools
import itertools
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ncclops import restart
from ncclops.restart._groups.gloo_sockets import handles_on
from ncclops.restart.keep_going import Membership
from ncclops.restart.rank_assignment import ActiveWorldSizeDivisibleBy, ShiftRanks
from ncclops.restart.snapshot import Snapshots
from ncclops.testing import note
from tests.restart.grow_programs import LIMITS
from tests.restart.scenarios import FAST, Worker

STEPS = 12
FAULT_AT = 5

# How a rank faults before step ``FAULT_AT``, once.
IN_STEP: dict[str, Callable[[], object]] = {
    "raises": lambda: 1 / 0,
    "dies": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "leaves": lambda: sys.exit(3),
}


def undisturbed() -> list[float]:
    """The weights after all steps without a fault."""
    weights = torch.zeros(4)
    for step in range(STEPS):
        weights += _gradient(step)
    return weights.tolist()


def _gradient(step: int) -> torch.Tensor:
    return torch.arange(4.0) / 3 + step / 7


class _Worker(Worker):
    @property
    def fault(self) -> str:
        """How this rank is to fault."""
        return str(self.parameters["faults"].get(str(self.rank), ""))

    def first_time(self) -> bool:
        """Whether this is the first call in the job on this rank, in any of its processes."""
        try:
            (self.directory / f"first-{self.rank}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def is_in_loop(self) -> None:
        (self.directory / f"in-loop-{self.rank}").touch()

    def wait_for_others_in_loop(self) -> None:
        others = int(os.environ["WORLD_SIZE"]) - 1
        while len([*self.directory.glob("in-loop-*")]) < others:
            time.sleep(0.01)


class Trainer:
    """A model as small as one can be, the same on all ranks, whatever their number."""

    def __init__(self, worker: _Worker, call: restart.CallWrapper) -> None:
        self._worker, self._call = worker, call
        self.weights, self.step = torch.zeros(4), 0
        self.done: list[int] = []
        self._group: Any = None

    def regroup(self, old: Membership | None, new: Membership) -> None:
        """Make the group, and take the state of the rank that has come furthest."""
        worker = self._worker
        worker.note(
            "regroup",
            old=None if old is None else [old.iteration, old.rank, old.world_size],
            new=[new.iteration, new.rank, new.world_size],
            step=self.step,
            pid=os.getpid(),
        )
        worker.is_in_loop()
        if old is not None and worker.fault == "regroup" and worker.first_time():
            raise ValueError("in regroup")
        if worker.parameters.get("groups") == "kept":
            self._bring_to_members()
        else:
            worker.make_group()
        steps = torch.zeros(new.world_size)
        steps[new.rank] = self.step
        steps = self._summed(steps)
        furthest = int(steps.argmax())
        self.step = int(steps[furthest])
        mine = new.rank == furthest
        self.weights = self._summed(self.weights if mine else torch.zeros(4))

    def _bring_to_members(self) -> None:
        """The default group, the same object if that can be, and what became of one over it."""
        worker = self._worker
        within = timedelta(seconds=worker.parameters.get("within", 20))
        if self._group is not None and worker.parameters.get("cut") == worker.rank:
            self._shut_down_store_of_group()
        done = self._call.init_process_group(worker.parameters["backend"], within=within)
        worker.note(
            "regrouped",
            rung=done.rung.value,
            why=done.why,
            stays=done.objects_stay,
            same=dist.group.WORLD is self._group,
            size=dist.get_world_size(),
            ranks=dist.get_process_group_ranks(dist.group.WORLD),
        )
        self._group = dist.group.WORLD
        everyone = dist.new_group(list(range(dist.get_world_size())))
        ones = torch.ones(1)
        dist.all_reduce(ones, group=everyone)
        assert int(ones) == dist.get_world_size()

    def _shut_down_store_of_group(self) -> None:
        """What the group asks the store for has no answer from now on."""
        loop = self._call._loop
        assert loop is not None
        connections = handles_on(loop.session._connections._of_kept_group)
        assert len(connections) == 1
        for connection in connections:
            with connection:
                connection.shutdown(socket.SHUT_RDWR)

    def train(self) -> list[float]:
        while self.step < STEPS:
            in_step = IN_STEP.get(self._worker.fault)
            if in_step is not None and self.step == FAULT_AT and self._worker.first_time():
                in_step()
            gradient = self._summed(_gradient(self.step)) / dist.get_world_size()
            with self._call.atomic():
                self.weights += gradient
                self.done.append(self.step)
                self.step += 1
        dist.destroy_process_group()
        return self.weights.tolist()

    def _summed(self, numbers: torch.Tensor) -> torch.Tensor:
        """Over all ranks, where their groups want it: a fake GPU computes nothing else."""
        summed = numbers.to(self._worker.ones().device, copy=True)
        dist.all_reduce(summed)
        return summed.cpu()


def keeps_going(base: Worker) -> Any:
    """Ranks train to the end, and say what they have been through.

    The parameter ``faults`` has how each rank faults that does, by its number.
    """
    worker = _Worker(base.rank, base.directory, base.parameters)
    assignments = {"even": restart.Compose(ActiveWorldSizeDivisibleBy(2), ShiftRanks())}
    chosen = worker.parameters.get("assignment")
    options: dict[str, Any] = {"incident_dir": str(worker.directory / "incidents")}
    if chosen is not None:
        options["rank_assignment"] = assignments[chosen]

    def function(call: restart.CallWrapper) -> list[float]:
        worker.note("function", iteration=call.iteration)
        if worker.fault == "before" and worker.first_time():
            worker.wait_for_others_in_loop()
            raise ValueError("before the loop")
        trainer = Trainer(worker, call)
        weights = call.keep_going(trainer.train, trainer.regroup)
        worker.note("trained", weights=weights, steps=trainer.done, pid=os.getpid())
        return weights

    function.__annotations__["call"] = restart.CallWrapper
    return worker.wrap(function, **FAST, **options)()


def trained_before_a_snapshot(base: Worker) -> Any:
    """A rank faults when steps have been made, and none was kept: a snapshot comes later."""
    worker = _Worker(base.rank, base.directory, base.parameters)

    def function(call: restart.CallWrapper) -> list[float]:
        worker.note("function", iteration=call.iteration)
        weights = torch.zeros(4)
        first = 0

        def regroup(old: Membership | None, new: Membership) -> None:
            nonlocal first
            worker.make_group()
            checkpoint = (lambda: None) if worker.parameters["checkpoint"] else None
            restored = Snapshots({"weights": weights}, checkpoint=checkpoint).restore()
            worker.note("restored", goes_on=old is not None)
            first = restored.step or 0

        def train() -> None:
            for step in range(first, STEPS):
                in_step = IN_STEP.get(worker.fault)
                if in_step is not None and step == FAULT_AT and worker.first_time():
                    in_step()
                gradient = _gradient(step)
                dist.all_reduce(gradient)
                weights.add_(gradient / dist.get_world_size())
            dist.destroy_process_group()

        call.keep_going(train, regroup)
        return weights.tolist()

    function.__annotations__["call"] = restart.CallWrapper
    return worker.wrap(function, **FAST)()


def nested(worker: Worker) -> Any:
    """A loop in a loop is refused: what it says."""

    def function(call: restart.CallWrapper) -> str:
        def inner() -> str:
            try:
                call.keep_going(lambda: None, lambda _old, _new: None)
            except RuntimeError as error:
                return str(error)
            return "accepted"

        return call.keep_going(inner, lambda _old, _new: None)

    function.__annotations__["call"] = restart.CallWrapper
    return worker.wrap(function, **FAST)()


def groups_elsewhere(worker: Worker) -> Any:
    """The default group is asked for where it is not to be had: what that says."""

    def said(call: restart.CallWrapper) -> str:
        try:
            call.init_process_group("gloo")
        except RuntimeError as error:
            return str(error)
        return "accepted"

    def function(call: restart.CallWrapper) -> list[str]:
        outside = said(call)
        return [outside, call.keep_going(lambda: said(call), lambda _old, _new: None)]

    function.__annotations__["call"] = restart.CallWrapper
    return worker.wrap(function, **FAST)()


def reduce_until(stop: str) -> None:
    """Until rank 0 sees a file ``stop``."""
    over = torch.zeros(1)
    while not over.item():
        over = torch.tensor([float(dist.get_rank() == 0 and Path(stop).exists())])
        dist.all_reduce(over)
        time.sleep(0.02)


def grows(stop: str) -> Any:
    """Reduce until the file ``stop`` is there; lost ranks come back: how often this was called, the
    memberships, the process."""
    calls = itertools.count()
    memberships: list[tuple[int | None, int]] = []

    def regroup(call: restart.CallWrapper, old: Membership | None, new: Membership) -> None:
        group = call.init_process_group("gloo")
        assert not group.objects_stay and group.rung is restart.Rung.ANEW, "a rank is new"
        dist.barrier()  # see grow_programs.train
        memberships.append((None if old is None else old.world_size, new.world_size))
        note("in", iteration=new.iteration, number=new.rank, size=new.world_size, pid=os.getpid())

    @restart.Wrapper(**LIMITS, grow_timeout=timedelta(seconds=30))
    def function(call: restart.CallWrapper) -> tuple[int, list[tuple[int | None, int]], int]:
        called = next(calls)
        call.keep_going(functools.partial(reduce_until, stop), functools.partial(regroup, call))
        dist.destroy_process_group()
        return called, memberships, os.getpid()

    return function()
