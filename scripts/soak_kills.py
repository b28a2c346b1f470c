"""Kills ranks of a DDP training at random moments, and looks how the job ends. From seeds.

    python scripts/soak_kills.py [--kills 200] [--seed 0] [--ranks 3,4] [--backend gloo,nccl]

Each run is `ncclops launch` of a training that saves every few steps. SIGKILL strikes one to all
but one of its ranks, at moments between the start of the job and a little after its usual end. The
first one strikes whenever it falls, those after it when all ranks train, since the job has to start
anew for each that strikes before; and a quarter of the first ones come just after a rank has
printed its last line. The script ends in one of four ways: with or without `destroy_process_group`,
in a function or at the top level.

A run is good when it is completed, each rank that finished has printed the loss of undisturbed
runs, and it took no longer than twice as long as they. Each run is a line with its seed and the
moments of its kills; the directory of a bad one stays. ``--seed 7 --runs 1 --ranks 3 --backend
gloo`` repeats one. For NCCL on the fake GPU: `scripts/fake_gpu python scripts/soak_kills.py`. Exits
with 1 if one run was not good.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.fakegpu.host import QUICK

COMMAND = [sys.executable, "-m", "ncclops", "launch"]
LIMIT_S = 180
UNDISTURBED = 3
ENDS = ("function", "function destroy", "top", "top destroy")
# The sum of gradients over ranks is rounded differently with each number of them.
SAME_LOSS = 1e-4
AFTER_LAST_LINE_S = 1.0

TRAINING = """
import os, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS, SAVE_EVERY, SAMPLES = 100, 5, 12
backend, end = sys.argv[1:3]
device = "cpu"
if backend == "nccl":
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
torch.set_num_threads(1)

class Net(torch.nn.Module):
    # Parameters and gradients are on the device, products are computed on the host: the fake GPU
    # computes sums, but no products, and nothing of lists of tensors (init_sync, foreach).
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
        )

    def forward(self, samples):
        weights = {name: each.cpu() for name, each in self.layers.named_parameters()}
        return torch.func.functional_call(self.layers, weights, samples)

def train():
    global ddp
    dist.init_process_group(backend)
    torch.manual_seed(1)
    samples, targets = torch.randn(SAMPLES, 8), torch.randn(SAMPLES, 1)
    model = Net()
    first = 0
    if os.path.exists("saved.pt"):
        saved = torch.load("saved.pt")
        first = saved.pop("step")
        model.load_state_dict(saved)
    rank, size = dist.get_rank(), dist.get_world_size()
    print(f"starts at {first} as {rank} of {size}", flush=True)
    model.to(device)
    if end.startswith("function"):
        of_rank = DistributedDataParallel(model, init_sync=False)
    else:
        ddp = of_rank = DistributedDataParallel(model, init_sync=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, foreach=False)
    mine = slice(rank * SAMPLES // size, (rank + 1) * SAMPLES // size)
    for step in range(first, STEPS):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(of_rank(samples[mine]), targets[mine]).backward()
        optimizer.step()
        time.sleep(0.03)
        if rank == 0 and (step + 1) % SAVE_EVERY == 0:
            state = {name: each.cpu() for name, each in model.state_dict().items()}
            torch.save(state | {"step": step + 1}, "saving.pt")
            os.replace("saving.pt", "saved.pt")
    model.cpu()
    loss = torch.nn.functional.mse_loss(model(samples), targets).item()
    if "destroy" in end:
        dist.destroy_process_group()
    print(f"loss {loss:.6f}", flush=True)

train()
"""


@dataclass
class Run:
    """One job, from its start to its end."""

    directory: Path
    backend: str
    ranks: int
    seed: int
    end: str
    kills: list[str] = field(default_factory=list)  # which rank, and when
    seconds: float = 0.0
    code: int | None = None

    def start(self) -> subprocess.Popen[bytes]:
        (self.directory / "train.py").write_text(TRAINING)
        environment = dict(os.environ)
        options = ["--profile", "local-cpu"]
        if self.backend == "nccl":
            options = ["--profile", "single-node-h200"]
            meeting = self.directory / "meeting"
            meeting.mkdir()
            environment |= QUICK | {"FAKEGPU_MEETING": str(meeting)}
        # A rank that is killed while the job starts takes the attempt with it.
        options += ["--max-restarts", "3", "--run-dir", "run", "--nproc-per-node", str(self.ranks)]
        with (self.directory / "launch.log").open("wb") as log:
            return subprocess.Popen(
                [*COMMAND, *options, "train.py", self.backend, self.end],
                cwd=self.directory,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def alive(self) -> dict[int, int]:
        """The ranks that have been started and have not ended, with their pids."""
        running = dict[int, int]()
        for event in self.events():
            if event["event"] == "worker-started":
                running[event["rank"]] = event["pid"]
            elif event["event"] == "worker-exited":
                running.pop(event["rank"], None)
        return running

    def trains(self) -> bool:
        """Whether all processes that were started last have had their process groups."""
        events = [event["event"] for event in self.events()]
        started = len(events) - events[::-1].index("worker-started")
        return events[started:].count("bootstrapped") == self.ranks

    def events(self) -> list[dict[str, Any]]:
        path = self.directory / "run" / "events.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def printed(self, what: str) -> list[tuple[int, str]]:
        """What ranks have printed after the word ``what``."""
        found = []
        for path in sorted((self.directory / "run").glob("ranks/*/stdout.log")):
            for line in path.read_text(errors="replace").splitlines():
                if line.startswith(f"{what} "):
                    found.append((int(path.parent.name), line.removeprefix(f"{what} ")))
        return found


def undisturbed(run: Run) -> float:
    """Run it without a kill; its loss."""
    began = time.monotonic()
    launcher = run.start()
    run.code = launcher.wait(LIMIT_S)
    run.seconds = time.monotonic() - began
    losses = {loss for _, loss in run.printed("loss")}
    if run.code != 0 or len(losses) != 1:
        sys.exit(f"undisturbed: exit code {run.code}, losses {losses}; see {run.directory}")
    return float(losses.pop())


def disturb(run: Run, usual_s: float, most: int) -> None:
    """Run it with at most ``most`` kills."""
    chance = random.Random(f"{run.seed} {run.backend} {run.ranks}")
    count = min(chance.randint(1, run.ranks - 1), most)
    moments = sorted(chance.uniform(0.05, 1.05) * usual_s for _ in range(count))
    at_end = AFTER_LAST_LINE_S * chance.random() if chance.random() < 0.25 else None
    began = time.monotonic()
    launcher = run.start()

    def now() -> float:
        return time.monotonic() - began

    while launcher.poll() is None and now() < LIMIT_S:
        time.sleep(0.005)  # no event: files of other processes
        if at_end is not None and run.printed("loss"):
            moments, at_end = sorted([*moments[1:], now() + at_end]), None
        if moments and now() >= moments[0] and (not run.kills or run.trains()):
            moments.pop(0)
            alive = run.alive()
            if len(alive) > 1:
                rank = chance.choice(sorted(alive))
                try:
                    os.kill(alive[rank], signal.SIGKILL)
                except ProcessLookupError:
                    continue
                run.kills.append(f"rank {rank} at {now():.3f} s")
    run.seconds, run.code = now(), launcher.poll()


def judge(run: Run, loss: float, usual_s: float) -> list[str]:
    """What is wrong with how ``run`` ended."""
    if run.code is None:
        return [f"it hangs: pids {run.alive()}"]
    wrong = []
    verdict = json.loads((run.directory / "run" / "verdict.json").read_text())
    if (run.code, verdict["outcome"]) != (0, "completed"):
        wrong.append(f"exit code {run.code}, {verdict['outcome']}: {verdict['reason']}")
    losses = [each for _, each in run.printed("loss")]
    if not losses or any(abs(float(each) - loss) > SAME_LOSS for each in losses):
        wrong.append(f"losses {losses}, and {loss:.6f} undisturbed")
    if run.seconds > 2 * usual_s:
        wrong.append(f"{run.seconds:.1f} s, and {usual_s:.1f} s undisturbed")
    return wrong


def soak(backend: str, ranks: int, kills: int, seed: int, runs: int | None, keep: Path) -> int:
    """``kills`` kills of jobs with that many ranks, or as many ``runs``; how many were bad."""

    def new(name: str, end: str, seed: int = -1) -> Run:
        directory = keep / f"{backend}-{ranks}-{name}"
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        return Run(directory, backend, ranks, seed, end)

    usual, losses = [], []
    for number in range(UNDISTURBED):
        run = new(f"undisturbed-{number}", "function destroy")
        losses.append(undisturbed(run))
        usual.append(run.seconds)
        shutil.rmtree(run.directory)
    usual_s, ratios, struck, bad = statistics.median(usual), list[float](), 0, 0
    print(
        f"{backend}, {ranks} ranks: undisturbed {usual_s:.1f} s, loss {losses[0]:.6f}", flush=True
    )
    done = 0
    while done < runs if runs is not None else struck < kills:
        run = new(f"seed-{seed}", random.Random(seed).choice(ENDS), seed)
        disturb(run, usual_s, run.ranks - 1 if runs is not None else kills - struck)
        wrong = judge(run, losses[0], usual_s)
        struck, done = struck + len(run.kills), done + 1
        ratios.append(run.seconds / usual_s)
        line = f"{backend}, {ranks} ranks, seed {seed}, {run.end}: {', '.join(run.kills)}"
        print(f"{line}: {ratios[-1]:.2f}: {'; '.join(wrong) or 'good'}", flush=True)
        if wrong:
            bad += 1
            print(f"  see {run.directory}", flush=True)
        else:
            shutil.rmtree(run.directory)
        seed += 1
    shown = f"median {statistics.median(ratios):.2f}, highest {max(ratios):.2f} of undisturbed"
    print(f"{backend}, {ranks} ranks: {struck} kills, {done} runs, {bad} bad; {shown}", flush=True)
    return bad


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=200, help="for all shapes together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int, help="of each shape, instead of so many kills")
    parser.add_argument("--ranks", default="3,4")
    parser.add_argument("--backend", default="gloo,nccl")
    parser.add_argument("--keep", type=Path, help="where the directories of bad runs stay")
    given = parser.parse_args()
    keep = given.keep or Path(tempfile.mkdtemp(prefix="soak-kills-"))
    shapes = [(b, int(n)) for b in given.backend.split(",") for n in given.ranks.split(",")]
    each = -(-given.kills // len(shapes))
    bad = sum(soak(*shape, each, given.seed, given.runs, keep) for shape in shapes)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
