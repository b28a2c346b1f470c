"""Further trainings for ``scripts/soak_recovery.py``, and the script that `ncclops launch` runs.

    recovery_shapes.py SHAPE DIRECTORY STEPS

See ``recovery_training.py``. Here are ``compiled``, by torch.compile, within DDP, or around it as
``compiled-outer``, with ``aot`` without inductor; ``parts``: DDP with PowerSGD, ZeRO, activation
checkpoints, a loader whose workers stay, and ``join``; ``mesh``: FSDP2 and tensor parallelism in a
mesh of two dimensions, whose optimizers step in the backward pass, with checkpoints that are
written in the background; and ``pipeline``: a rank for each stage.
"""

from __future__ import annotations

import os
import shutil
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler

from ncclops import restart
from tests.restart.recovery_training import (
    ROWS,
    WIDTH,
    Noisy,
    Passes,
    Plan,
    Trainer,
    Whole,
    enter,
    keep_going,
    make_model,
    wrapped_by_ddp,
)


class Compiled(Trainer):
    """The module that torch.compile makes is what is kept: its names begin with ``_orig_mod``.

    All its code is compiled in the first step of a process, and of each call of the function.
    """

    def further_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        self.compiled = torch.compile(self.model, backend=self._compile)
        return {"compiled": self.compiled}

    def replicated(self) -> list[str]:
        return ["model", "optimizer", "compiled"]

    def distribute(self) -> None:
        super().distribute()
        assert isinstance(self.forward, DistributedDataParallel)
        if "outer" in self.words:
            self.ddp = self.forward
            self.forward = torch.compile(self.ddp, backend=self._compile)
        else:
            self.forward.module = self.compiled

    def _compile(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        self.plan.strike("compiling", self.step)
        if "aot" in self.words:
            from torch._dynamo.backends.debugging import aot_eager

            return aot_eager(graph, inputs)
        from torch._inductor.compile_fx import compile_fx

        return compile_fx(graph, inputs)


class Kept:
    """The state of PowerSGD's hook: errors, and factors that the next step begins with."""

    NAMES = ("error_dict", "p_memory_dict", "q_memory_dict", "iter")

    def __init__(self, hook: power_sgd.PowerSGDState) -> None:
        self.hook = hook

    def state_dict(self) -> dict[str, Any]:
        state = {name: getattr(self.hook, name) for name in self.NAMES}
        return state | {"random": self.hook.rng.get_state()[1]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in self.NAMES:
            setattr(self.hook, name, state[name])
        kind, _, *rest = self.hook.rng.get_state()
        self.hook.rng.set_state((kind, state["random"], *rest))


class Checkpointed(nn.Module):
    """Two halves, the activations of which are computed once more, with the same dropout."""

    def __init__(self) -> None:
        super().__init__()
        layers = list(make_model())
        self.halves = nn.ModuleList([nn.Sequential(*layers[:3]), nn.Sequential(*layers[3:])])

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        for half in self.halves:
            batch = checkpoint(half, batch, use_reentrant=False)
        return batch


class StayingPasses(Passes):
    """With workers that stay from pass to pass; noise would be of what they have drawn before."""

    loader: DataLoader[torch.Tensor] | None = None

    def next_batch(self) -> torch.Tensor:
        if self._batches is None:
            self._sampler.set_epoch(self._at["pass"])
            if self.loader is None:
                self.loader = DataLoader(
                    self._data,
                    ROWS,
                    sampler=self._sampler,
                    num_workers=2,
                    persistent_workers=True,
                    generator=self._generator,
                )
            self._batches = iter(self.loader)
            for _ in range(self._at["done"]):
                next(self._batches)
        return super().next_batch()


class Quiet(Noisy):
    """Without noise."""

    def __getitem__(self, row: int) -> torch.Tensor:
        return torch.sin(row * torch.arange(1, WIDTH + 1))


class Parts(Trainer):
    """What DDP can have beside it."""

    def make_data(self) -> Passes:
        data = StayingPasses(self.rank, int(os.environ["WORLD_SIZE"]))
        data._data = Quiet()
        data._sampler = DistributedSampler(data._data, int(os.environ["WORLD_SIZE"]), self.rank)
        return data

    def distribute(self) -> None:
        self.model, self.state = Checkpointed(), {}
        self._begin()
        self.hook = power_sgd.PowerSGDState(
            None, 2, start_powerSGD_iter=3, warm_start=True, use_error_feedback=True, random_seed=1
        )
        self.forward = ddp = wrapped_by_ddp(self.model, self.device)
        ddp.register_comm_hook(self.hook, power_sgd.powerSGD_hook)
        self.zero = ZeroRedundancyOptimizer(
            self.model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-2
        )
        self.optimizer = self.zero
        own = self.zero.optim  # of this rank: ZeRO's own state_dict() is a collective
        self.begins_with({**self.state, "optimizer": own, "hook": Kept(self.hook)})

    def replicated(self) -> list[str]:
        return ["model"]

    def train_step(self, step: int) -> None:
        if step % 7 != 3:
            super().train_step(step)
            return
        assert isinstance(self.forward, DistributedDataParallel)
        self.zero.zero_grad()
        batch = self.data.next_batch()
        with Join([self.forward]):  # all have as many inputs: nobody waits
            self.plan.strike("forward", step)
            (self.forward(batch) - batch).square().mean().backward()
            self.plan.strike("backward", step)
        self.zero.step()
        self.plan.strike("optimizer", step)


class Mesh(Trainer):
    """Two dimensions, of shards and of tensor parallelism."""

    saving: Any = None

    def distribute(self) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            parallelize_module,
        )

        ranks = dist.get_world_size()
        mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("shard", "tensor"))
        self.model = make_model()
        self.model[2] = nn.Identity()  # ranks of one tensor have one batch, and other generators
        parallelize_module(
            self.model, mesh["tensor"], {"0": ColwiseParallel(), "3": RowwiseParallel()}
        )
        self.forward = fully_shard(self.model, mesh=mesh["shard"])
        self.state = {}
        self._begin()
        self.optimizers = {
            name: torch.optim.AdamW([each], lr=1e-2) for name, each in self.model.named_parameters()
        }
        of = {id(each): self.optimizers[name] for name, each in self.model.named_parameters()}

        def step_and_free(parameter: torch.Tensor) -> None:
            of[id(parameter)].step()
            of[id(parameter)].zero_grad()

        for each in self.model.parameters():
            each.register_post_accumulate_grad_hook(step_and_free)
        del self.state["optimizer"]
        optimizers = {f"optimizer.{name}": each for name, each in self.optimizers.items()}
        self.begins_with({**self.state, **optimizers})

    def make_data(self) -> Any:
        data = super().make_data()
        data._generator.seed(self.rank // 2)
        return data

    def replicated(self) -> list[str]:
        return []

    def train_step(self, step: int) -> None:
        batch = self.data.next_batch()
        loss = (self.forward(batch) - batch).square().mean()
        self.plan.strike("forward", step)
        loss.backward()
        self.plan.strike("backward", step)
        self.plan.strike("optimizer", step)

    def save(self) -> None:
        """In the background, by torch.distributed.checkpoint; the one before is to be complete."""
        import torch.distributed.checkpoint as dcp

        if self.saving is not None:
            self.saving.result()
        path = self.directory / f"checkpoint-{self.step}"
        if self.rank == 0:
            shutil.rmtree(path, ignore_errors=True)
        dist.barrier()
        self.saving = dcp.async_save({"model": self.model.state_dict()}, checkpoint_id=path)
        super().save()


class Pipeline(Trainer):
    """A layer on each rank."""

    def distribute(self) -> None:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        torch.manual_seed(self.rank)
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1))
        self.state = {}
        self._begin()
        ranks = dist.get_world_size()
        stage = PipelineStage(self.model, self.rank, ranks, self.device)
        self.schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
        self.forward = self.model

    def make_data(self) -> Any:
        data = super().make_data()
        data._generator.seed(0)  # the first stage's input is the last one's target
        return data

    def replicated(self) -> list[str]:
        return []

    def train_step(self, step: int) -> None:
        assert self.optimizer is not None
        batch = self.data.next_batch()
        self.optimizer.zero_grad()
        last = self.rank == dist.get_world_size() - 1
        self.plan.strike("forward", step)
        self.schedule.step(*[batch] * (self.rank == 0), **({"target": batch} if last else {}))
        self.plan.strike("backward", step)
        self.optimizer.step()
        self.plan.strike("optimizer", step)


KINDS = {
    "whole": Whole,
    "compiled": Compiled,
    "parts": Parts,
    "mesh": Mesh,
    "pipeline": Pipeline,
}


def main() -> None:
    torch.set_num_threads(1)
    shape, directory, steps = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    kind = next((each for word, each in KINDS.items() if word in shape.split("-")), Trainer)

    def make() -> Trainer:
        return kind(shape, directory, steps, Plan(directory))

    if "keep-going" in shape:
        soft_s = 50 if "compiled" in shape else 8
        limits: dict[str, Any] = {
            "soft_timeout": timedelta(seconds=soft_s),
            "hard_timeout": timedelta(seconds=soft_s + 6),
            "barrier_timeout": timedelta(seconds=60),
            "grow_timeout": None if "shrink" in shape else timedelta(seconds=30),
        }
        keep_going(restart.Wrapper(**limits), make)
    else:
        enter(make())


if __name__ == "__main__":
    main()
