"""Stops a running job again and again, and looks whether a collective was ever cut.

    python scripts/soak_stop.py [--runs 20] [--ranks 4] [--nodes 1] [--burners 2] [--silent]

Each run is `ncclops launch` of a Gloo training, on ``--nodes`` agents that share ``--ranks`` out
among themselves. Its ranks write down where they are before and after each all_reduce, beside
processes that keep the CPU busy. It is stopped with `ncclops stop` at a random moment, on a random
node. A run counts as good when all ranks ended at the same point, none within an all_reduce, with
exit code 0. ``--silent`` leaves the receipts out, so that optimizers have to do as the clock.
Prints one line a run, and exits with 1 if one was not good.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

START_LIMIT_S, STOP_LIMIT_S = 180, 120

TRAINING = """
import os, random, sys, time
import torch, torch.distributed as dist
from ncclops import receipt
dist.init_process_group("gloo")
rank, log = dist.get_rank(), open(f"log-{os.environ['RANK']}", "w", buffering=1)
uneven = random.Random(rank)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for n in range(10**9):
    model(torch.ones(4, 8)).sum().backward()
    for part in range(4):
        log.write(f"{n} {part} in\\n")
        dist.all_reduce(torch.ones(1000))
        log.write(f"{n} {part} out\\n")
    time.sleep(uneven.random() * 0.01)
    optimizer.step()
    if sys.argv[1] == "reports":
        receipt.step(n)
    if n == 3 and rank == 0:
        open("trains", "w").close()
"""


def burn() -> None:
    while True:
        sum(range(10_000))


COMMAND = [sys.executable, "-m", "ncclops"]


@dataclass(frozen=True)
class Shape:
    """A job of ``ranks`` in all, over ``nodes`` agents, with or without receipts."""

    ranks: int
    nodes: int
    silent: bool

    def launch(self, directory: Path, node: int, port: int) -> subprocess.Popen[bytes]:
        options = ["--profile", "local-cpu", "--run-dir", f"run{node}"]
        options += ["--nproc-per-node", str(self.ranks // self.nodes)]
        if self.nodes > 1:
            options += ["--nnodes", str(self.nodes), "--node-rank", str(node)]
            options += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
        return subprocess.Popen(
            [*COMMAND, "launch", *options, "train.py", "silent" if self.silent else "reports"],
            cwd=directory,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


def stop_once(directory: Path, shape: Shape, pause_s: float, node: int) -> str | None:
    """One run from start to stop, asked for on ``node``; what is wrong with its end, or None."""
    (directory / "train.py").write_text(TRAINING)
    port = free_port()
    launchers = [shape.launch(directory, number, port) for number in range(shape.nodes)]
    try:
        deadline = time.monotonic() + START_LIMIT_S
        while not (directory / "trains").exists():
            ended = any(launcher.poll() is not None for launcher in launchers)
            if time.monotonic() > deadline or ended:
                return "it did not start"
            time.sleep(0.05)  # no event: another process's file
        time.sleep(pause_s)
        stop = [*COMMAND, "stop", f"run{node}"]
        subprocess.run(stop, cwd=directory, check=True, capture_output=True)
        codes = [launcher.wait(STOP_LIMIT_S) for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.terminate()
            launcher.wait()
    return judge(directory, shape, codes)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port


def judge(directory: Path, shape: Shape, codes: list[int]) -> str | None:
    """What is wrong with how the run ended, if anything."""
    logs = [directory / f"log-{rank}" for rank in range(shape.ranks)]
    last = {log.read_text().splitlines()[-1] for log in logs}
    if len(last) != 1 or not last.pop().endswith("3 out"):
        return "ranks ended at different points, or within a collective"
    for node, code in enumerate(codes):
        verdict = json.loads((directory / f"run{node}" / "verdict.json").read_text())
        workers = [worker["exit_code"] for worker in verdict["workers"]]
        if (code, verdict["outcome"], set(workers)) != (0, "stopped", {0}):
            return f"node {node}: exit code {code}, {verdict['outcome']}, workers {workers}"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--nodes", type=int, default=1, help="agents on this machine")
    parser.add_argument("--burners", type=int, default=2, help="processes that load the CPU")
    parser.add_argument("--silent", action="store_true", help="the script reports no steps")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.ranks % arguments.nodes:
        parser.error("--ranks must be a multiple of --nodes")
    shape = Shape(arguments.ranks, arguments.nodes, arguments.silent)
    chance, good = random.Random(arguments.seed), 0
    burners = [multiprocessing.Process(target=burn, daemon=True) for _ in range(arguments.burners)]
    for burner in burners:
        burner.start()
    for number in range(arguments.runs):
        with tempfile.TemporaryDirectory() as directory:
            pause_s, node = chance.random(), chance.randrange(shape.nodes)
            wrong = stop_once(Path(directory), shape, pause_s, node)
        good += wrong is None
        print(f"run {number:2d} stopped after {pause_s:.2f}s: {wrong or 'good'}", flush=True)
    print(f"{good} of {arguments.runs} ended at one point, none within a collective")
    return 0 if good == arguments.runs else 1


if __name__ == "__main__":
    os.nice(5)
    sys.exit(main())
