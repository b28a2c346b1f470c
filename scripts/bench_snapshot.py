"""What snapshots cost in each step, and what they save after a fault.

    python scripts/bench_snapshot.py [--mib 48] [--ranks 2] [--repeat 3]

Every rank trains the same small model, with one thread of torch, on Gloo; model and optimizer state
together have ``--mib``. All ways take turns within each repetition, in the same processes for the
first table.

**Overhead**: the mean time of a step against that of steps without snapshots, beside them.
``every=1`` takes one after each step; ``budget`` as often as 2 % of the time allows.
``replicated`` is state that all ranks have alike: it is copied and checked. ``own`` is also sent to
a partner, over loopback here.

**Fault to step**: from an exception on one rank until the last rank has completed its next step,
whichever that is (``next``), and until it has again done the step that failed (``same``). Either
way the same wrapper restarts; state comes from snapshots after each step, or from a checkpoint
each ``--checkpoint-every`` steps, written by ``torch.save`` to local disk, and read from what the
system has kept of it in memory, which is the best case of a reload.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ncclops import restart as inprocess
from ncclops.restart import snapshot
from ncclops.testing import JobFactory, note

_LAYERS = 4
_BATCH = 64
_WARM_UP = 3
_FAULTS = 3
_WAYS: dict[str, dict[str, Any]] = {
    "without": {},
    "every=1, replicated": {"every": 1, "replicated": ["model", "optimizer"]},
    "every=1, own": {"every": 1},
    "budget, replicated": {"replicated": ["model", "optimizer"]},
    "budget, own": {},
}


def _training(mib: float) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """Model and optimizer with a state of ``mib``, and a function that does one step."""
    torch.set_num_threads(1)
    width = int((mib * 2**20 / 4 / 3 / _LAYERS) ** 0.5)  # parameters and two moments, 4 bytes each
    torch.manual_seed(0)
    layers = [nn.Linear(width, width, bias=False) for _ in range(_LAYERS)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = torch.rand(_BATCH, width)

    def step() -> None:
        optimizer.zero_grad()
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss.detach())  # the ranks wait for each other, as in any step

    return model, optimizer, step


@inprocess.Wrapper()
def overhead(mib: float, steps: int, repeat: int) -> None:
    """Notes the mean time of a step for each way, ``repeat`` times."""
    dist.init_process_group("gloo")
    model, optimizer, step = _training(mib)
    kept: dict[str, snapshot.Snapshots] = {}
    for name, parameters in _WAYS.items():
        if name != "without":
            state = {"model": model, "optimizer": optimizer}
            kept[name] = snapshot.Snapshots(state, name=name, **parameters)
            kept[name].restore()
    for turn in range(repeat + 1):  # the first one allocates, and finds the interval
        for name in _WAYS:
            took_s = _block(step, kept.get(name), steps)
            if turn:
                note("step", way=name, took_s=took_s)
    for name, each in kept.items():
        note("pace", way=name, every=each.overhead.every, share=each.overhead.share)
    dist.barrier()
    dist.destroy_process_group()


def _block(step: Any, snapshots: snapshot.Snapshots | None, steps: int) -> float:
    dist.barrier()
    began = time.perf_counter()
    for number in range(steps):
        step()
        if snapshots is not None:
            snapshots.take(number + 1)
    took_s = (time.perf_counter() - began) / steps
    if snapshots is not None:
        snapshots.wait()  # no part of it goes on in the next way's time
    return took_s


@inprocess.Wrapper()
def faults(call: inprocess.CallWrapper, mib: float, path: Path | None, every: int) -> None:
    """Rank 1 raises in the middle between two checkpoints; notes when, and when steps are done.

    ``path``: of the checkpoint; ``None``: from snapshots.
    """
    dist.init_process_group("gloo")
    model, optimizer, step = _training(mib)

    def load() -> int | None:
        assert path is not None
        if not path.exists():
            return None
        state = torch.load(path, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return int(state["step"])

    snapshots = None
    if path is None:
        state = {"model": model, "optimizer": optimizer}
        snapshots = snapshot.Snapshots(state, replicated=state.keys(), every=1)
        first = snapshots.restore().step or 0
    else:
        first = load() or 0
    fails_at = _WARM_UP * every + every // 2 + every * call.iteration
    for number in range(first, (_WARM_UP + _FAULTS + 1) * every):
        if number == fails_at and call.iteration < _FAULTS and dist.get_rank() == 1:
            note("fault", iteration=call.iteration, at=time.monotonic(), number=number)
            raise RuntimeError("as asked")
        step()
        if call.iteration and number <= fails_at:
            note("done", iteration=call.iteration - 1, at=time.monotonic(), number=number)
        if snapshots is not None:
            snapshots.take(number + 1)
        elif (number + 1) % every == 0:
            if dist.get_rank() == 0:
                assert path is not None
                draft = path.with_suffix(".draft")
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({"step": number + 1, **state}, draft)
                draft.replace(path)
            dist.barrier()
    dist.barrier()
    dist.destroy_process_group()


def _overheads(job: JobFactory, options: argparse.Namespace) -> None:
    here = f"{Path(__file__).resolve()}:overhead"
    arguments = (options.mib, options.steps, options.repeat)
    deadline = timedelta(minutes=10)
    result = job(here, world_size=options.ranks, args=arguments, deadline=deadline).run()
    times: dict[str, list[float]] = defaultdict(list)
    for each in result.notes:
        if each.name == "step":
            times[each.fields["way"]].append(each.fields["took_s"])
    pace = {
        each.fields["way"]: each.fields["every"] for each in result.notes if each.name == "pace"
    }
    base = statistics.median(times["without"])
    print(f"a step without snapshots: {base * 1000:.1f} ms; state {options.mib:g} MiB")
    print("| way | step | against without | every |\n|---|---|---|---|")
    for name in _WAYS:
        took_s = statistics.median(times[name])
        # Beside each other in time: the machine may have other work in between.
        ratios = [own / other for own, other in zip(times[name], times["without"], strict=True)]
        ratio, every = statistics.median(ratios), pace.get(name, "")
        print(f"| {name} | {took_s * 1000:.1f} ms | {ratio:.2f} | {every} |")


def _recoveries(job: JobFactory, options: argparse.Namespace, directory: Path) -> None:
    here = f"{Path(__file__).resolve()}:faults"
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for turn in range(options.repeat):
        for name, path in (("snapshot", None), ("checkpoint", directory / f"{turn}.pt")):
            arguments = (options.mib, path, options.checkpoint_every)
            deadline = timedelta(minutes=10)
            result = job(here, world_size=options.ranks, args=arguments, deadline=deadline).run()
            for struck in (each.fields for each in result.notes if each.name == "fault"):
                done = [
                    each.fields
                    for each in result.notes
                    if each.name == "done" and each.fields["iteration"] == struck["iteration"]
                ]
                first = min(each["number"] for each in done)
                for what, number in (("next", first), ("same", struck["number"])):
                    ends = [each["at"] for each in done if each["number"] == number]
                    found[name][what].append(max(ends) - struck["at"])
    print("| fault to | from snapshots | from the checkpoint | ratio |\n|---|---|---|---|")
    for what in ("next", "same"):
        ours, theirs = (statistics.median(found[way][what]) for way in ("snapshot", "checkpoint"))
        print(
            f"| {what} step | {ours * 1000:.0f} ms | {theirs * 1000:.0f} ms | {ours / theirs:.2f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Cost and use of snapshots.")
    parser.add_argument("--mib", type=float, default=48.0, help="of model and optimizer state")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40, help="of each way in each repetition")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--checkpoint-every", type=int, default=10, metavar="STEPS")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary, JobFactory(Path(temporary)) as job:
        _overheads(job, options)
        print()
        _recoveries(job, options, Path(temporary))


if __name__ == "__main__":
    main()
