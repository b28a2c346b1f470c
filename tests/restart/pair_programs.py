"""Ranks in pairs, whose groups are beside the default one, go on after faults."""

from __future__ import annotations

import functools
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ncclops import restart
from ncclops.restart._groups import advised, kept_beside
from ncclops.restart._groups.gloo_sockets import gloo_connections
from ncclops.testing import note
from tests.fakegpu.gpus import take_gpu
from tests.restart.grow_programs import LIMITS
from tests.restart.keep_going_programs import reduce_until
from tests.restart.scenarios import FAST, Worker

STEPS = 3
KEPT_IS_RULED_OUT = """
[[advisory]]
id = "torch-keeps-badly"
title = "groups that are kept lose messages"
rules_out = ["kept"]
when = { torch = [">=2"], restart = ["in-process"] }
"""


class Pairs:
    """Initial ranks 2n and 2n + 1 are a pair.

    ``faults`` has, by iteration, in which scene which rank faults, and how. It does once all others
    are where the scene wants them.
    """

    def __init__(self, worker: Worker, call: restart.CallWrapper) -> None:
        self._worker, self._call = worker, call
        self._faults = worker.parameters["faults"]
        if worker.rank == worker.parameters.get("advised"):
            found = advised.ruled_out(KEPT_IS_RULED_OUT, {"torch": torch.__version__, "nccl": None})
            setattr(advised, "ruled_out_here", lambda: found)  # noqa: B010 - of this process
        self._device = take_gpu(worker.rank) if worker.has_gpu else torch.device("cpu")
        self._mine: Any = None
        self._partners: list[int] = []

    def regroup(self, _old: restart.Membership | None, new: restart.Membership) -> None:
        given, call = self._worker.parameters, self._call
        device = self._device if given["eager"] else None
        call.init_process_group(given["backend"], device_id=device)
        initial = [0.0] * new.world_size
        initial[new.rank] = self._worker.rank
        initial = self._sum(*initial).tolist()
        for pair in sorted({int(rank) // 2 for rank in initial}):
            members = [n for n, rank in enumerate(initial) if rank // 2 == pair]
            group = call.new_group(members, given["backend"], group_desc=f"pair {pair}")
            if self._worker.rank // 2 == pair:
                same, self._mine = group is self._mine, group
                self._partners = [int(initial[n]) for n in members]
                assert dist.get_process_group_ranks(group) == members
                assert dist.get_group_rank(group, new.rank) == members.index(new.rank)
            else:
                assert group == dist.GroupMember.NON_GROUP_MEMBER
        self._worker.note("grouped", same=same, connections=self._connections())

    def _connections(self) -> list[int]:
        """The inodes of the sockets of this rank's pair."""
        epolls = {each.epoll for each in kept_beside._groups if each.group is self._mine}
        found = gloo_connections({epoll for epoll in epolls if epoll is not None})
        inodes = [os.fstat(each.fileno()).st_ino for each in found]
        for each in found:
            each.close()
        return inodes

    def _sum(self, *numbers: float, group: Any = None) -> torch.Tensor:
        summed = torch.tensor(numbers, device=self._device)
        dist.all_reduce(summed, group=group)
        return summed.cpu()

    def _reduce_in_pair(self) -> None:
        summed = self._sum(1.0 + self._worker.rank, group=self._mine)
        assert summed == sum(1 + rank for rank in self._partners)

    def train(self) -> int:
        for _ in range(STEPS):
            self._reduce_in_pair()
            assert self._sum(1.0) == dist.get_world_size()
        if (fault := self._faults.get(str(self._call.iteration))) is not None:
            self._play(*fault)
        dist.barrier()
        dist.destroy_process_group()
        return self._call.iteration

    def _play(self, scene: str, who: int, how: str) -> None:
        """The others of pair 1, ranks 2 and 3, differ in what they have done with their group."""
        rank = self._worker.rank
        if rank == who:
            self._wait_for_others()
            if how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("as asked")
        if scene == "async" and rank == 2:
            self._start_in_pair()
        self._ready(rank).touch()
        if scene == "waiting" and rank == 2:
            self._reduce_in_pair()
        if scene == "waiting":
            time.sleep(100)
        if scene == "messages" and rank // 2 == 1:
            self._exchange()
        self._sum(1.0)

    def _start_in_pair(self) -> None:
        self._work = dist.all_reduce(torch.ones(1), group=self._mine, async_op=True)

    def _exchange(self) -> None:
        """A message, and then a collective, of which alone the recorder knows."""
        tensor = torch.ones(1)
        if self._worker.rank == 2:
            dist.send(tensor, group_dst=1, group=self._mine)
        else:
            dist.recv(tensor, group_src=0, group=self._mine)
        self._reduce_in_pair()

    def _ready(self, rank: int) -> Path:
        return self._worker.directory / f"ready-{self._call.iteration}-{rank}"

    def _wait_for_others(self) -> None:
        faults = self._faults.items()
        died = {
            who for n, (_, who, how) in faults if how == "dies" and int(n) < self._call.iteration
        }
        others = set(range(self._worker.parameters["size"])) - died - {self._worker.rank}
        while not all(self._ready(rank).exists() for rank in others):
            time.sleep(0.01)
        time.sleep(0.2)  # where they are then announces nothing


def pairs(worker: Worker) -> Any:
    """Ranks go through the scenes: how many faults there were."""

    def function(call: restart.CallWrapper) -> int:
        each = Pairs(worker, call)
        return call.keep_going(each.train, each.regroup)

    function.__annotations__["call"] = restart.CallWrapper
    incidents = str(worker.directory / "incidents")
    return worker.wrap(function, incident_dir=incidents, **FAST)()


def in_a_mesh(worker: Worker) -> Any:
    """Four ranks in a mesh of two by two: rank 1 raises, and then rank 3 dies."""

    def function(call: restart.CallWrapper) -> int:
        mine: dict[str, Any] = {}

        def regroup(_old: restart.Membership | None, new: restart.Membership) -> None:
            call.init_process_group("gloo")
            pairs, rest = divmod(new.world_size, 2)
            shape = (pairs, 2) if rest == 0 else (1, new.world_size)
            mesh = call.init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
            before = mine.copy()
            mine.update({name: mesh[name].get_group() for name in ("replicate", "shard")})
            places = {name: mesh.get_local_rank(name) for name in mine}
            assert places == {"replicate": new.rank // shape[1], "shard": new.rank % shape[1]}
            kept = sorted(name for name in before if before[name] is mine[name])
            worker.note("grouped", kept=kept, shape=mesh.shape)

        def train() -> int:
            for group in mine.values():
                total = torch.ones(1)
                dist.all_reduce(total, group=group)
                assert int(total) == group.size()
            dist.barrier()
            if (call.iteration, worker.rank) == (0, 1):
                time.sleep(0.2)  # the recorder has the barrier on all ranks
                raise ValueError("as asked")
            if (call.iteration, worker.rank) == (1, 3):
                os.kill(os.getpid(), signal.SIGKILL)
            while call.iteration < 2:
                time.sleep(0.01)
            dist.destroy_process_group()
            return call.iteration

        return call.keep_going(train, regroup)

    function.__annotations__["call"] = restart.CallWrapper
    return worker.wrap(function, **FAST)()


def grows(stop: str) -> Any:
    """Four ranks in pairs, until the file ``stop`` is there; lost ranks come back."""
    mine: list[Any] = []

    def regroup(
        call: restart.CallWrapper, _old: restart.Membership | None, new: restart.Membership
    ) -> None:
        call.init_process_group("gloo")
        numbers = range(new.world_size)  # three, where a rank comes back late
        pairs = [[n for n in numbers if n // 2 == pair] for pair in (0, 1)]
        groups = [call.new_group(pair, "gloo") for pair in pairs]
        mine.append(groups[new.rank // 2])
        total = torch.ones(1)
        dist.all_reduce(total, group=mine[-1])
        assert int(total) == len(pairs[new.rank // 2])
        dist.barrier()
        note("in", iteration=new.iteration, number=new.rank, same=mine[-1] in mine[:-1])

    @restart.Wrapper(**LIMITS, grow_timeout=timedelta(seconds=30))
    def function(call: restart.CallWrapper) -> None:
        call.keep_going(functools.partial(reduce_until, stop), functools.partial(regroup, call))
        dist.destroy_process_group()

    return function()
