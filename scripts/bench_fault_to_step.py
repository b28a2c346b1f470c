"""From a fault to the next completed step: ncclops, and nvidia-resiliency-ext (NVRx) beside it.

    python scripts/bench_fault_to_step.py [--peer-python PYTHON] [--ranks 2] [--mib 48] [--repeat 3]
    scripts/fake_gpu python scripts/bench_fault_to_step.py --backend nccl
    FAKE_GPU_TORCH=2.14.0 scripts/fake_gpu python scripts/bench_fault_to_step.py --ddp --ranks 3

Every rank trains the same model on the CPU, with one thread, and reduces its gradients over
``--backend``; model and optimizer state together have ``--mib``. Rank 1 raises in the middle
between two checkpoints, three times in each job. ``next`` is the time until the last rank has
completed a step again, whichever that is, and ``same`` until it has done the step that failed. Ways
take turns within each repetition; what is printed are medians, and their ratios to NVRx with its
defaults, where it takes part.

A checkpoint is written by ``torch.save`` to local disk every ``--checkpoint-every`` steps, and read
from what the system keeps of it in memory: the best case of a reload. ``--peer-python`` is an
interpreter that can import ``nvidia_resiliency_ext`` and the same torch; with ``--best-ms`` its
intervals are that short.

With "group kept" the default group comes from ``CallWrapper.init_process_group``, and a table by
rungs says how long that took: 2.14.0 reconfigures it on Gloo, older ones make it anew. ``--ddp``
reduces the gradients by DDP, which goes on there, and elsewhere is made anew. ``torch._dynamo``,
which torch imports with the first optimizer, is imported before the wrapped function is called, as
docs/restart.md recommends; ``--imported-late`` leaves it to torch.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Optional

from bench_restart import IN_PROCESS, free_port, rendezvous_server
from bench_restart_worker import peer_of

FAULTS = 3
_LAYERS = 4
_BATCH = 64
_WARM_UP = 3  # checkpoints before the first fault
_DEADLINE_S = 180.0

_OBJECTS, _GROUP = "snapshots, objects kept", "snapshots, objects and group kept"

# Each a peer of ``bench_restart_worker.peer_of``, and where state comes from.
OURS = (
    ("ncclops", "checkpoint"),
    ("ncclops", "snapshots"),
    ("ncclops", _OBJECTS),
    ("ncclops", _GROUP),
)


def main() -> None:
    """Measure and print; or be one rank."""
    if sys.argv[1:2] == ["rank"]:
        _Rank(json.loads(sys.argv[2])).run()
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mib", type=float, default=48.0, help="of model and optimizer state")
    parser.add_argument("--checkpoint-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--ddp", action="store_true", help="gradients are reduced by DDP")
    parser.add_argument("--imported-late", action="store_true", help="torch._dynamo, by torch")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--peer-python", help="an interpreter with NVRx")
    parser.add_argument("--best-ms", type=float, default=10, help="NVRx's intervals")
    options = parser.parse_args()
    ways = [*OURS]
    if options.peer_python:
        ways += [(f"nvrx-best-{options.best_ms:g}ms", "checkpoint"), ("nvrx-default", "checkpoint")]
    found: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for _ in range(options.repeat):
        for way in ways:
            for what, taken in _job(options, *way):
                found[way][what].append(taken)
    _show(found, ways)
    _show_rungs(found)


def _show_rungs(found: dict[tuple[str, str], dict[str, list[float]]]) -> None:
    """What the group, and what holds it, took after a fault, by the rung."""
    taken = {what: times for of_way in found.values() for what, times in of_way.items()}
    rungs = [what for what in taken if what not in ("next", "same")]
    print("\n| the group and what holds it | faults | median | most |\n|---|---|---|---|")
    for rung in sorted(rungs):
        times = [1000 * each for each in taken[rung]]
        print(
            f"| {rung} | {len(times)} | {statistics.median(times):.1f} ms | {max(times):.1f} ms |"
        )


def _show(found: dict[tuple[str, str], dict[str, list[float]]], ways: list[Any]) -> None:
    base = {what: statistics.median(found[ways[-1]][what]) for what in ("next", "same")}
    print(
        "| peer | state from | next step | ratio | same step | ratio |\n|---|---|---|---|---|---|"
    )
    for peer, source in ways:
        row = [peer, source]
        for what in ("next", "same"):
            median = statistics.median(found[peer, source][what])
            row += [f"{1000 * median:.0f} ms", f"{median / base[what]:.3f}"]
        print(f"| {' | '.join(row)} |")


def _job(options: argparse.Namespace, peer: str, source: str) -> Iterator[tuple[str, float]]:
    """One job to its end: for each fault, the two times in seconds."""
    with tempfile.TemporaryDirectory() as name, rendezvous_server() as rendezvous:
        given = {
            "peer": peer, "source": source, "directory": name, "rendezvous": rendezvous,
            "backend": options.backend, "mib": options.mib, "every": options.checkpoint_every,
            "ddp": options.ddp, "imported_late": options.imported_late,
        }  # fmt: skip
        python = options.peer_python if peer.startswith("nvrx") else sys.executable
        port, log = free_port(), Path(name) / "log"
        ranks = []
        for rank in range(options.ranks):
            numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": options.ranks}
            place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
            given_env = {key: str(value) for key, value in {**numbers, **place}.items()}
            command = [python, __file__, "rank", json.dumps(given)]
            with log.open("ab") as output:
                ranks.append(
                    subprocess.Popen(
                        command,
                        env=os.environ | IN_PROCESS | given_env,
                        stdout=output,
                        stderr=output,
                    )
                )
        try:
            codes = [each.wait(_DEADLINE_S) for each in ranks]
        finally:
            for each in ranks:
                each.kill()
        if any(codes):
            raise SystemExit(
                f"{peer}, {source}: {codes}\n{log.read_text(errors='replace')[-3000:]}"
            )
        for fault in range(FAULTS):
            began = float((Path(name) / f"fault-{fault}").read_text())
            for what in ("next", "same"):
                ends = [float(each.read_text()) for each in Path(name).glob(f"{what}-{fault}-*")]
                yield what, max(ends) - began
        for path in Path(name).glob("group-*"):
            rung, taken = path.read_text().split("\n")
            yield rung, float(taken)


class _Rank:
    """One rank of a job."""

    def __init__(self, given: dict[str, Any]) -> None:
        self._given = given
        self._directory = Path(given["directory"])
        self._checkpoint = self._directory / "checkpoint.pt"
        self._every = int(given["every"])
        self._rank = int(os.environ["RANK"])
        self._step, self._fault = 0, 0
        self._done_after_fault = False
        self._reducing: Any = None

    def run(self) -> None:
        module, parameters = peer_of(self._given["peer"])
        kept = self._given["source"] in (_OBJECTS, _GROUP)
        if not self._given["imported_late"]:
            importlib.import_module("torch._dynamo")

        def function(call: Any = None) -> None:
            self._call, self._fault = call, call.iteration
            self._build()
            if kept:
                call.keep_going(self._train, lambda _old, new: self._begin(new.iteration))
            else:
                self._begin(call.iteration)
                self._train()
            self._end()

        # NVRx looks for the annotation as an object
        function.__annotations__["call"] = Optional[module.CallWrapper]  # noqa: UP045
        module.Wrapper(**parameters)(function)()

    def _build(self) -> None:
        import torch
        from torch import nn

        torch.set_num_threads(1)
        numbers = self._given["mib"] * 2**20 / 4 / 3 / _LAYERS  # parameters and two moments
        width = int(numbers**0.5)
        torch.manual_seed(0)
        self._model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(_LAYERS)))
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3)
        self._batch = torch.rand(_BATCH, width)

    def _begin(self, iteration: int) -> None:
        import torch

        self._fault, self._done_after_fault = iteration, False
        if self._given["ddp"]:
            from torch.nn.parallel import DistributedDataParallel
        self._device = torch.device("cpu")
        if self._given["backend"] == "nccl":
            self._device = torch.device("cuda", self._rank)
            torch.cuda.set_device(self._device)
        began = time.monotonic()
        rung, renew = self._bring_group(iteration)
        if self._given["ddp"] and renew is not None:
            renew(self._reducing)
        elif self._given["ddp"]:
            self._reducing = DistributedDataParallel(self._model)
        if iteration and self._given["source"] in (_OBJECTS, _GROUP):
            # The next step of DDP that was made anew makes its buckets once more.
            what = f"{self._given['source']}: {rung}\n{time.monotonic() - began}"
            (self._directory / f"group-{iteration}-{self._rank}").write_text(what)
        self._snapshots: Any = None
        if self._given["source"] == "checkpoint":
            self._step = self._load()
            return
        snapshot = importlib.import_module("ncclops.restart.snapshot")
        state = {"model": self._model, "optimizer": self._optimizer}
        self._snapshots = snapshot.Snapshots(state, replicated=state.keys(), every=1)
        self._step = self._snapshots.restore().step or 0

    def _bring_group(self, iteration: int) -> tuple[str, Callable[[Any], object] | None]:
        """Make the default group, or have it: the rung, and how DDP goes on, if it does."""
        import torch.distributed as dist

        timeout = timedelta(seconds=60)
        if self._given["source"] == _GROUP:
            group = self._call.init_process_group(self._given["backend"], timeout=timeout)
            return group.rung.value, group.renew if group.objects_stay else None
        store = dist.TCPStore(
            "127.0.0.1", self._given["rendezvous"], None, False, wait_for_workers=False
        )
        dist.init_process_group(
            self._given["backend"],
            store=dist.PrefixStore(str(iteration), store),
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=timeout,
        )
        return "made by the script", None

    def _load(self) -> int:
        import torch

        if not self._checkpoint.exists():
            return 0
        state = torch.load(self._checkpoint, weights_only=True)
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        return int(state["step"])

    def _train(self) -> None:
        while self._step < (_WARM_UP + FAULTS + 1) * self._every:
            fails_at = _WARM_UP * self._every + self._every // 2 + self._every * self._fault
            if self._step == fails_at and self._fault < FAULTS and self._rank == 1:
                self._mark(f"fault-{self._fault}")
                raise RuntimeError("as asked")
            self._make_step()
            if self._fault and not self._done_after_fault:
                self._done_after_fault = True
                self._mark(f"next-{self._fault - 1}-{self._rank}")
            if self._fault and self._step == fails_at - self._every:
                self._mark(f"same-{self._fault - 1}-{self._rank}")
            self._step += 1
            self._save()

    def _make_step(self) -> None:
        import torch
        import torch.distributed as dist

        self._optimizer.zero_grad()
        if self._given["ddp"]:
            (self._reducing(self._batch) - self._batch).square().mean().backward()
            self._optimizer.step()
            return
        loss = (self._model(self._batch) - self._batch).square().mean()
        loss.backward()
        of_all = [p.grad.flatten() for p in self._model.parameters() if p.grad is not None]
        gradients = torch.cat(of_all).to(self._device)
        dist.all_reduce(gradients)
        gradients[:1].cpu()  # with NCCL it is this that waits
        self._optimizer.step()

    def _save(self) -> None:
        import torch
        import torch.distributed as dist

        if self._snapshots is not None:
            self._snapshots.take(self._step)
        elif self._step % self._every == 0:
            if dist.get_rank() == 0:
                draft = self._checkpoint.with_suffix(".draft")
                state = {
                    "model": self._model.state_dict(),
                    "optimizer": self._optimizer.state_dict(),
                }
                torch.save({"step": self._step, **state}, draft)
                draft.replace(self._checkpoint)
            dist.barrier()

    def _end(self) -> None:
        import torch.distributed as dist

        dist.barrier()
        dist.destroy_process_group()

    def _mark(self, name: str) -> None:
        with contextlib.suppress(FileExistsError), (self._directory / name).open("x") as file:
            file.write(repr(time.monotonic()))


if __name__ == "__main__":
    main()
