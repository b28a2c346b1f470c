"""What looking at a run costs the run: step times with and without requests beside it.

    python scripts/bench_control.py [--requests 2500] [--rate 0] [--clients 32] [--nproc 2]

Launches a job on Gloo that reports its steps, and takes turns, ``--rounds`` times: a while in
peace, then ``--requests`` requests (status and metrics in equal parts) from ``--clients``
connections, ``--rate`` a second, or with 0 as fast as they are answered: the server has a pace.
Clients run only when a processor has nothing else to do, since on a cluster they come from
somewhere else; one that shares a physical core with the training slows it all the same. Printed are
the median and the 95th percentile of rank 0's step times in both, the ratio of the medians, and as
the measure of noise the largest ratio between two rounds in peace.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from ncclops.control import client
from ncclops.errors import NcclopsError
from ncclops.record import control_address

DEADLINE_S = 180.0
WARM_UP_S = 3.0
PEACE_S = 10.0
TRAIN = """
import torch
import torch.distributed as dist
from ncclops import receipt

torch.set_num_threads(1)
dist.init_process_group("gloo")
weights = torch.randn(192, 192)
step = 0
while True:
    product = weights
    for _ in range(40):
        product = torch.tanh(product @ weights)
    dist.all_reduce(product)
    receipt.step(step)
    step += 1
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=2500)
    parser.add_argument("--rate", type=float, default=0, help="requests a second; 0: a flood")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        script, run = Path(folder) / "train.py", Path(folder) / "run"
        script.write_text(TRAIN)
        command = [sys.executable, "-m", "ncclops", "launch", "--run-dir", str(run)]
        job = subprocess.Popen(
            [*command, "--nproc-per-node", str(arguments.nproc), str(script)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            wait_for_steps(run, job)
            windows = [round_of(run, arguments) for _ in range(arguments.rounds)]
            client.send(run, {"action": "stop", "by": "bench_control"})
        finally:
            job.terminate()
            job.wait(DEADLINE_S)
        report(windows, step_times(run), arguments)


def wait_for_steps(run: Path, job: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline and job.poll() is None:
        try:
            if client.status_of(run).phase == "training":
                time.sleep(WARM_UP_S)  # caches and clocks come to rest
                return
        except NcclopsError:
            pass  # the run directory is not there yet
        time.sleep(0.2)  # a job announces its first step to nobody but its files
    sys.exit("the job did not come to its first step")


def round_of(run: Path, arguments: argparse.Namespace) -> tuple[float, float, float]:
    """When it was quiet, when the requests began, when the last was answered."""
    quiet = time.time()
    time.sleep(PEACE_S)
    busy = time.time()
    sender = os.fork()
    if sender == 0:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        asyncio.run(send_all(run, arguments.requests, arguments.clients, arguments.rate))
        os._exit(0)
    if os.waitpid(sender, 0)[1] != 0:
        sys.exit("not all requests were answered")
    return quiet, busy, time.time()


async def send_all(run: Path, requests: int, clients: int, rate: float) -> None:
    share = [requests // clients + (n < requests % clients) for n in range(clients)]
    pause_s = clients / rate if rate else 0.0
    await asyncio.gather(*(send_some(run, count, pause_s) for count in share))


async def send_some(run: Path, count: int, pause_s: float) -> None:
    begun = time.monotonic()
    with closing(control_address.connect_unix(run, DEADLINE_S)) as connection:
        reader, writer = await asyncio.open_connection(sock=connection)
        for number in range(count):
            await asyncio.sleep(max(0.0, begun + number * pause_s - time.monotonic()))
            path = "/metrics" if number % 2 else "/status"
            writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            if " 200 " not in head.splitlines()[0]:
                raise RuntimeError(head)
            await reader.readexactly(int(head.split("Content-Length: ")[1].split()[0]))
        writer.close()


def step_times(run: Path) -> list[tuple[float, float]]:
    """When each step of rank 0 ended, and how long it took."""
    lines = (run / "ranks" / "0" / "receipt.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [(each["ts"], each["seconds"]) for each in records if "seconds" in each]


def report(
    windows: Sequence[tuple[float, float, float]],
    steps: Sequence[tuple[float, float]],
    arguments: argparse.Namespace,
) -> None:
    def within(begin: float, end: float) -> list[float]:
        return [seconds * 1000 for ts, seconds in steps if begin <= ts - seconds and ts <= end]

    peace = [within(quiet, busy) for quiet, busy, _ in windows]
    crowd = [within(busy, end) for _, busy, end in windows]
    usual = []
    for name, rounds in (("in peace", peace), ("with requests", crowd)):
        times = list(itertools.chain.from_iterable(rounds))
        usual.append(statistics.median(times))
        p95 = statistics.quantiles(times, n=20)[-1]
        print(f"{name:14} {len(times):6} steps  median {usual[-1]:7.3f} ms", end="")
        print(f"  p95 {p95:7.3f} ms")
    rate = arguments.requests * len(windows) / sum(end - busy for _, busy, end in windows)
    medians = [statistics.median(each) for each in peace]
    print(f"{rate:,.0f} requests/s; ratio of medians {usual[1] / usual[0]:.3f}", end="")
    print(f"; noise (largest ratio of two rounds in peace) {max(medians) / min(medians):.3f}")


if __name__ == "__main__":
    main()
