#!/usr/bin/env python3
"""How long a job takes until its last rank trains: after the launch, and after a rank was killed.

    python scripts/bench_start.py [--ranks 8] [--repeat 5] [--limit 120]

Side by side, in turns, in one run: torchrun, ``ncclops launch`` with every worker started afresh,
with workers forked from one process that has imported torch, and with ``--restart
in-process:grow``; the latter two also with ``torch._dynamo`` in the profile's ``[warm_start]``. The
script is a minimal training script, DDP and an optimizer over Gloo. What is measured ends with the
first step of the last rank. After a kill all ranks start in new processes, which is what torchrun
does; with growth one does, and the others start the script again in theirs. Where the job does not
come up again within four restarts or ``--limit`` seconds, it is ended, one line on stderr says so,
and the table says nan for that way.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

SCRIPT = """
import os, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(1, 8)).sum().backward()
optimizer.step()
attempt = int(os.path.exists("killed"))
path = f"{attempt}-{dist.get_rank()}"
with open(path + ".part", "w") as file:
    file.write(f"{os.getpid()} {time.time()}")
os.rename(path + ".part", path)
if attempt == 0:
    time.sleep(600)
dist.barrier()
dist.destroy_process_group()
"""
BIN = Path(sys.executable).parent
OURS = [str(BIN / "ncclops"), "launch", "--timeout", "stop_grace=1s", "--profile"]
ANEW, GROWS = "--restart=process", "--restart=in-process:grow"
WAYS = {
    "torchrun": [str(BIN / "torchrun"), "--standalone"],
    "ncclops, afresh": [*OURS, "plain.toml", ANEW, "--no-warm-start"],
    "ncclops, forked": [*OURS, "plain.toml", ANEW, "--warm-start"],
    "ncclops, forked, torch._dynamo listed": [*OURS, "listed.toml", ANEW, "--warm-start"],
    "ncclops, grow": [*OURS, "plain.toml", GROWS],
    "ncclops, grow, torch._dynamo listed": [*OURS, "listed.toml", GROWS],
}
# After a SIGKILL the policy waits for up to half a minute; torchrun does not wait.
PROFILE = """
description = "No pause before a retry."
extends = "local-cpu"
[retry.cooldown]
first = "0s"
"""
LISTED = """
[warm_start]
imports = ["torch", "torch.distributed", "sympy", "torch._dynamo"]
"""


def measure(way: str, ranks: int, limit: float) -> tuple[float, float, float]:
    """Seconds from the launch to the first step of the last rank, the same from the kill of one
    rank to its successors' first step, and of CPU of all processes.

    The start, and what follows the kill up to the job's end, may take ``limit`` seconds each."""
    common = [f"--nproc-per-node={ranks}", "--max-restarts=4"]
    command = [*WAYS[way], *common, "train.py"]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "train.py").write_text(SCRIPT)
        (directory / "plain.toml").write_text(PROFILE)
        (directory / "listed.toml").write_text(PROFILE + LISTED)
        output = (directory / "output").open("wb")
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        began = time.time()
        process = subprocess.Popen(
            command,
            cwd=directory,
            env=environ,
            stdout=output,
            stderr=output,
        )
        try:
            first = ends(directory, 0, ranks, process, limit)
            (directory / "killed").touch()
            killed = time.time()
            os.kill(first[ranks - 1][0], signal.SIGKILL)
            second = [(0, math.nan)]
            if ended_well(way, process, limit):
                second = ends(directory, 1, ranks, process, limit)
        finally:
            end(process)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return max(at for _, at in first) - began, max(at for _, at in second) - killed, cpu


def ended_well(way: str, process: subprocess.Popen[bytes], limit: float) -> bool:
    """Whether the job ends with exit code 0 within ``limit`` seconds; if not, stderr says why."""
    try:
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        print(f"{way}: not come up within {limit:g} s of a kill", file=sys.stderr)
        return False
    if code != 0:
        print(f"{way}: exit code {code} after a kill", file=sys.stderr)
    return code == 0


def end(process: subprocess.Popen[bytes]) -> None:
    """End the launcher, which ends its workers; those it leaves are killed, lest they sleep on."""
    if process.poll() is not None:
        return
    workers = psutil.Process(process.pid).children()
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        for worker in workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.kill()
        process.kill()
        process.wait()


def ends(
    directory: Path, attempt: int, ranks: int, process: subprocess.Popen[bytes], limit: float
) -> list[tuple[int, float]]:
    """Each rank's PID and the time of its first step, once all have written theirs."""
    paths = [directory / f"{attempt}-{rank}" for rank in range(ranks)]
    deadline = time.monotonic() + limit
    while not all(path.exists() for path in paths):
        failed = process.poll() not in (None, 0)
        if failed or time.monotonic() > deadline:
            why = f"exit code {process.returncode}" if failed else f"not up within {limit:g} s"
            raise SystemExit(f"{process.args!r}: {why}\n{(directory / 'output').read_text()}")
        time.sleep(0.02)  # the launchers have no event for it, and it is on neither's account
    written = [path.read_text().split() for path in paths]
    return [(int(pid), float(at)) for pid, at in written]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--limit", type=float, default=120, help="seconds to come up (120)")
    options = parser.parse_args()
    found: dict[str, list[tuple[float, float, float]]] = {way: [] for way in WAYS}
    for _ in range(options.repeat):
        for way, values in found.items():
            values.append(measure(way, options.ranks, options.limit))
    median = {
        way: [statistics.median(each) for each in zip(*found[way], strict=True)] for way in WAYS
    }
    base = median["torchrun"]
    print(
        f"{options.ranks} ranks on {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f};"
        f" medians of {options.repeat}, in seconds (share of torchrun's)"
    )
    print("| | start | after a kill | CPU of all processes |\n|---|---|---|---|")
    for way, values in median.items():
        cells = (f"{value:.1f} ({value / of:.2f})" for value, of in zip(values, base, strict=True))
        print(f"| {way} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
