"""Stops a running job again and again, and looks whether a collective was ever cut.

    python scripts/soak_stop.py [--runs 20] [--ranks 4] [--burners 2] [--silent]

Each run is `ncclops launch` of a Gloo training whose ranks write down where they are before and
after each all_reduce, beside processes that keep the CPU busy. It is stopped with `ncclops stop`
at a random moment. A run counts as good when all ranks ended at the same point, none within an
all_reduce, with exit code 0. ``--silent`` leaves the receipts out, so that optimizers have to do
as the clock. Prints one line a run, and exits with 1 if one was not good.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
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


def stop_once(directory: Path, ranks: int, pause_s: float, silent: bool) -> str | None:
    """One run from start to stop; what is wrong with its end, or None."""
    (directory / "train.py").write_text(TRAINING)
    command = [sys.executable, "-m", "ncclops"]
    options = ["--profile", "local-cpu", "--nproc-per-node", str(ranks), "--run-dir", "run"]
    launcher = subprocess.Popen(
        [*command, "launch", *options, "train.py", "silent" if silent else "reports"],
        cwd=directory,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + START_LIMIT_S
        while not (directory / "trains").exists():
            if time.monotonic() > deadline or launcher.poll() is not None:
                return "it did not start"
            time.sleep(0.05)  # no event: another process's file
        time.sleep(pause_s)
        subprocess.run([*command, "stop", "run"], cwd=directory, check=True, capture_output=True)
        code = launcher.wait(STOP_LIMIT_S)
    finally:
        launcher.terminate()
        launcher.wait()
    return judge(directory, ranks, code)


def judge(directory: Path, ranks: int, code: int) -> str | None:
    """What is wrong with how the run ended, if anything."""
    verdict = json.loads((directory / "run" / "verdict.json").read_text())
    last = {(directory / f"log-{rank}").read_text().splitlines()[-1] for rank in range(ranks)}
    codes = [worker["exit_code"] for worker in verdict["workers"]]
    if len(last) != 1 or not last.pop().endswith("3 out"):
        return "ranks ended at different points, or within a collective"
    if (code, verdict["outcome"], set(codes)) != (0, "stopped", {0}):
        return f"exit code {code}, {verdict['outcome']}, workers {codes}"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--burners", type=int, default=2, help="processes that load the CPU")
    parser.add_argument("--silent", action="store_true", help="the script reports no steps")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    chance, good = random.Random(arguments.seed), 0
    burners = [multiprocessing.Process(target=burn, daemon=True) for _ in range(arguments.burners)]
    for burner in burners:
        burner.start()
    for number in range(arguments.runs):
        with tempfile.TemporaryDirectory() as directory:
            pause_s = chance.random()
            wrong = stop_once(Path(directory), arguments.ranks, pause_s, arguments.silent)
        good += wrong is None
        print(f"run {number:2d} stopped after {pause_s:.2f}s: {wrong or 'good'}", flush=True)
    print(f"{good} of {arguments.runs} ended at one point, none within a collective")
    return 0 if good == arguments.runs else 1


if __name__ == "__main__":
    os.nice(5)
    sys.exit(main())
