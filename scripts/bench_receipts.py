#!/usr/bin/env python3
"""What a call of ``receipt.step`` costs the thread that trains, and what reading a log costs.

    python scripts/bench_receipts.py [--steps 20000]

Steps are measured twice: back to back (the worst case: the writer never catches up, and its thread
competes for the GIL), and with a pause of 2 ms in between, as between real steps.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path


def step_costs_us(steps: int, pause_s: float) -> list[float]:
    """Microseconds of each call."""
    from ncclops import receipt

    costs = []
    for n in range(steps):
        began = time.perf_counter_ns()
        receipt.step(n, tokens=4096, loss=2.5)
        costs.append((time.perf_counter_ns() - began) / 1000)
        if pause_s:
            time.sleep(pause_s)
    return costs


def show(title: str, costs: list[float]) -> None:
    ordered = sorted(costs)
    p99 = ordered[int(len(ordered) * 0.99)]
    print(
        f"{title:30} mean {statistics.fmean(costs):6.2f} us  median {statistics.median(costs):6.2f}"
        f" us  p99 {p99:7.2f} us  max {ordered[-1]:8.1f} us"
    )


def log_rates(lines: int) -> None:
    from ncclops.receipts.log_scan import LogScan

    samples = {
        "lines of no interest": "2026-03-01 node3:4711 NCCL INFO Channel 03/0 : 1[1] -> 2[2] P2P\n",
        "lines with steps": "step {n:05d} loss 2.313 tok/s 812,000\n",
    }
    for title, sample in samples.items():
        scan = LogScan("bench")
        content = [sample.format(n=n).encode() for n in range(lines)]
        began = time.perf_counter()
        for line in content:
            scan.feed(line)
        seconds = time.perf_counter() - began
        print(f"log reader, {title:22} {lines / seconds:12,.0f} lines/s")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the cost of receipts.")
    parser.add_argument("--steps", type=int, default=20_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as run_dir:
        os.environ |= {"NCCLOPS_RUN_DIR": run_dir, "RANK": "0"}
        from ncclops.receipts import recorder
        from ncclops.record import shared_page, stop_point
        from ncclops.record.paths import RunPaths
        from ncclops.timeouts.settle import settle
        from ncclops.worker.group_timeouts import GroupTimeouts
        from ncclops.worker.timeout_phases import TimeoutPhases

        # As under `launch`: a step also moves the timeouts.
        timeouts = settle({})
        TimeoutPhases(timeouts, GroupTimeouts(timeouts)).follow(recorder.current())
        page = stop_point.StopPage.create(Path(run_dir))
        show("receipt.step, back to back", step_costs_us(arguments.steps, 0))
        show("receipt.step, 2 ms apart", step_costs_us(arguments.steps // 20, 0.002))
        recorder.current().close()
        shared_page.settle(RunPaths(Path(run_dir)).stop_page)
        del page
    log_rates(100_000)


if __name__ == "__main__":
    main()
