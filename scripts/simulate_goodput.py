#!/usr/bin/env python3
"""Effective training time of jobs of 512 to 16,384 GPUs that fail as published ones did.

    python scripts/simulate_goodput.py [--days 54] [--runs 40] [--seed 0] [--gpus 512 ...]

A discrete-event simulation with what ``goodput_inputs.toml`` says: recovery times that are measured
here or published, rates and causes of faults that are published, and assumptions, each with its
source. Faults come at random at a constant rate, during recoveries too. Four ways to go on:

* ``checkpoint``: a new job, with all nodes, from the last checkpoint;
* ``in-process``: restart in place from the last checkpoint; what is lost is replaced from reserves
  that are in the job, then by doing without replicas, then by a new job;
* ``snapshots``: likewise, from a snapshot in memory;
* ``grow-back``: from a snapshot, and each lost seat is taken again by a new process on the same
  node, or by a spare node.

Checkpoints are written at the interval that Young's formula gives for the job, with snapshots at
the longer one of the inputs. Prints the mean of
the effective training time over the runs with its range, where the rest went, and published figures
beside. What is not modelled: docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import random
import statistics
import tomllib
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

INPUTS = Path(__file__).with_name("goodput_inputs.toml")
GPUS = (512, 1024, 2048, 4096, 8192, 16384)
WAYS = ("checkpoint", "in-process", "snapshots", "grow-back")
_DAY_S = 86400.0


@dataclass(frozen=True)
class Job:
    """What one simulated job is made of; times in seconds, ``rate`` in faults a second.

    ``mix`` maps what a fault does to its share. ``spares`` are nodes beside the ``nodes`` of the
    job, ``nodes_a_replica`` those that do no work without each other.
    """

    way: str
    rate: float
    mix: dict[str, float]
    times: dict[str, float]
    overhead: float
    least_capacity: float
    nodes: int
    spares: int
    nodes_a_replica: int
    checkpoint_interval: float

    @property
    def in_process(self) -> bool:
        return self.way != "checkpoint"

    @property
    def has_snapshots(self) -> bool:
        return self.way in ("snapshots", "grow-back")


@dataclass
class Outcome:
    """``useful`` and all other seconds of a run by where they went; they add up to its length."""

    useful: float = 0.0
    faults: int = 0
    lost: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))


class Run:
    """One job from its start to ``length`` seconds later."""

    def __init__(self, job: Job, length: float, chance: random.Random) -> None:
        self._job, self._length, self._chance = job, length, chance
        self._now = 0.0
        self._progress = 0.0  # seconds of training with all replicas
        self._checkpoint = 0.0  # progress that the last checkpoint holds, and the last snapshot
        self._snapshot = 0.0
        self._healthy = job.nodes  # that take part, or could if their replica was whole
        self._spares = job.spares
        self._repairs: list[float] = []  # when spares are there again
        self._next_fault = self._draw()
        self.outcome = Outcome()

    def play(self) -> Outcome:
        """The whole run."""
        while self._now < self._length:
            if self._train():
                self._recover()
        self.outcome.useful += self._progress
        return self.outcome

    def _draw(self) -> float:
        return self._now + self._chance.expovariate(self._job.rate)

    @property
    def _capacity(self) -> float:
        a_replica = self._job.nodes_a_replica
        return (self._healthy // a_replica) / (self._job.nodes // a_replica)

    def _pass(self, seconds: float, cause: str | None) -> bool:
        """Let time pass, for ``cause`` or (``None``) in training; false: cut short by a fault."""
        end = min(self._now + seconds, self._length)
        cut = self._next_fault < end
        spent = (self._next_fault if cut else end) - self._now
        self._now += spent
        if cause is None:
            capacity, overhead = self._capacity, self._job.overhead * self._job.has_snapshots
            self._progress += spent * capacity * (1 - overhead)
            self.outcome.lost["replicas missing"] += spent * (1 - capacity)
            self.outcome.lost["snapshots"] += spent * capacity * overhead
        else:
            self.outcome.lost[cause] += spent
        return not cut and self._now < self._length

    def _train(self) -> bool:
        """Until the next fault: true, or the end of the run: false."""
        job = self._job
        while True:
            speed = self._capacity * (1 - job.overhead * job.has_snapshots)
            left = self._checkpoint + job.checkpoint_interval - self._progress
            if self._is_smaller and self._repairs and job.way == "grow-back":
                wait = max(0.0, self._repairs[0] - self._now)
                if wait < left / speed:
                    if not self._pass(wait, None):
                        break
                    self._grow()
                    continue
            if not self._pass(left / speed, None):
                break
            if not self._pass(job.times["checkpoint_stall"], "checkpoints"):
                break
            self._checkpoint = self._progress
        return self._now < self._length

    @property
    def _is_smaller(self) -> bool:
        return self._healthy < self._job.nodes

    def _grow(self) -> None:
        """A node is there again: all restart once, from a snapshot of this moment."""
        self._take_repaired()
        self._snapshot = self._progress
        missing = min(self._job.nodes - self._healthy, self._spares)
        self._healthy += missing
        self._spares -= missing
        self._spend(self._seat("node") + self._restart())

    def _take_repaired(self) -> None:
        while self._repairs and self._repairs[0] <= self._now:
            heapq.heappop(self._repairs)
            self._spares += 1

    def _recover(self) -> None:
        """From the fault that is due, and those that strike meanwhile, to training."""
        done = False
        while not done and self._now < self._length:
            self.outcome.faults += 1
            self._next_fault = self._draw()
            kinds = list(self._job.mix)
            kind = self._chance.choices(kinds, [self._job.mix[each] for each in kinds])[0]
            done = self._spend(self._steps_after(kind))

    def _spend(self, parts: list[tuple[str, float]]) -> bool:
        return all(self._pass(seconds, cause) for cause, seconds in parts)

    def _steps_after(self, kind: str) -> list[tuple[str, float]]:
        """What the recovery consists of; progress and nodes are as they are after it."""
        job, times = self._job, self._job.times
        hung = kind == "hang"
        if not job.in_process:
            return self._new_job(times["job_detect_hang" if hung else "job_detect"])
        parts = [("detect", times["detect_hang" if hung else "detect"])]
        seat: list[tuple[str, float]] = []
        if kind in ("node", "process"):
            seat = self._lose(kind)
            too_small = job.way != "grow-back" and self._capacity < job.least_capacity
            if too_small or not self._capacity:
                return self._new_job(parts[0][1])
        if job.has_snapshots:
            interval = times["snapshot_interval"] * self._capacity
            # Snapshots are taken at regular progress, since the last point that was restored.
            taken = math.floor((self._progress - self._snapshot) / interval) * interval
            self._snapshot += max(0.0, taken)
            self._roll_back(self._snapshot)
            state = ("state from memory", times["snapshot_restore"])
        else:
            self._roll_back(self._checkpoint)
            state = ("state from a checkpoint", times["checkpoint_load"])
        return [*parts, *seat, *self._restart(), state]

    def _lose(self, kind: str) -> list[tuple[str, float]]:
        """A node is lost, or a process on it; what taking its seat again takes."""
        job = self._job
        self._take_repaired()
        if job.way == "grow-back":
            if kind == "process":
                return self._seat("process")
            heapq.heappush(self._repairs, self._now + job.times["repair"])
        if self._spares:
            self._spares -= 1
            return self._seat("node") if job.way == "grow-back" else []  # a reserve is in the job
        self._healthy -= 1
        return []

    def _seat(self, kind: str) -> list[tuple[str, float]]:
        times = self._job.times
        return [("waiting for a seat", times[f"seat_{kind}"] + times["warm_up"])]

    def _restart(self) -> list[tuple[str, float]]:
        return [
            ("restart in place", self._job.times["restart"]),
            ("process groups", self._job.times["groups"]),
        ]

    def _new_job(self, detect: float) -> list[tuple[str, float]]:
        job = self._job
        self._healthy, self._spares, self._repairs = job.nodes, job.spares, []
        self._roll_back(self._checkpoint)
        self._snapshot = self._checkpoint
        return [
            ("detect", detect),
            ("new job", job.times["job_requeue"]),
            ("state from a checkpoint", job.times["checkpoint_load"]),
        ]

    def _roll_back(self, to: float) -> None:
        self.outcome.lost["steps done again"] += self._progress - to
        self._progress = to


def value_at(value: float | list[list[float]], gpus: int) -> float:
    """``value``, or where it is a table what that has at ``gpus``, between two sizes by logarithms.

    Beyond its sizes it keeps its first and last value.
    """
    if isinstance(value, int | float):
        return float(value)
    for (small, low), (large, high) in itertools.pairwise(value):
        if small <= gpus <= large:
            share = math.log(gpus / small) / math.log(large / small)
            return float(low * (high / low) ** share)
    return float(value[0][1] if gpus < value[0][0] else value[-1][1])


def job_of(inputs: dict[str, Any], way: str, mix: str, gpus: int) -> Job:
    """The job of ``gpus`` that goes on in one of ``WAYS``, with the causes of ``mix``."""
    rate = inputs["rate"]
    a_second = rate["interruptions"] / (rate["gpus"] * rate["days"] * _DAY_S) * gpus
    counts: dict[str, float] = defaultdict(float)
    for cause in inputs["mix"][mix]["causes"]:
        counts[cause["does"]] += cause["count"]
    times = {name: value_at(each["value"], gpus) for name, each in inputs["times"].items()}
    nodes = gpus // int(inputs["nodes"]["gpus"]["value"])
    interval = math.sqrt(2 * times["checkpoint_stall"] / a_second)
    if way in ("snapshots", "grow-back"):
        interval = max(interval, times["checkpoint_interval"])
    return Job(
        way=way,
        rate=a_second,
        mix={kind: count / sum(counts.values()) for kind, count in counts.items()},
        times=times,
        overhead=inputs["shares"]["snapshot_overhead"]["value"],
        least_capacity=inputs["shares"]["least_capacity"]["value"],
        nodes=nodes,
        spares=max(1, round(nodes / 1024 * inputs["nodes"]["spares_per_1024"]["value"])),
        nodes_a_replica=max(1, nodes // int(inputs["nodes"]["replicas"]["value"])),
        checkpoint_interval=interval,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--days", type=float, default=54)
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gpus", type=int, nargs="+", default=GPUS)
    given = parser.parse_args()
    inputs = tomllib.loads(INPUTS.read_text(encoding="utf-8"))
    length = given.days * _DAY_S
    for mix in inputs["mix"]:
        print(f"\n{mix}: effective training time in %, mean and range of {given.runs} runs")
        print(f"| GPUs | faults | {' | '.join(WAYS)} |\n|{'---|' * (len(WAYS) + 2)}")
        causes: dict[str, dict[str, float]] = {}
        for gpus in given.gpus:
            cells, faults = [], 0.0
            for way in WAYS:
                job = job_of(inputs, way, mix, gpus)
                outcomes = [
                    Run(job, length, random.Random(f"{given.seed}-{run}-{gpus}")).play()
                    for run in range(given.runs)
                ]
                shares = sorted(100 * each.useful / length for each in outcomes)
                mean = statistics.mean(shares)
                cells.append(f"{mean:.2f} ({shares[0]:.2f} to {shares[-1]:.2f})")
                faults = statistics.mean(each.faults for each in outcomes)
                causes[way] = {
                    cause: 100 * sum(each.lost[cause] for each in outcomes) / length / given.runs
                    for each in outcomes
                    for cause in each.lost
                }
            print(f"| {gpus:,} | {faults:.0f} | {' | '.join(cells)} |", flush=True)
        print(f"\nwhere the rest went at {given.gpus[-1]:,} GPUs, in %")
        for way, lost in causes.items():
            largest_first = sorted(lost.items(), key=lambda each: -each[1])
            parts = [f"{name} {share:.2f}" for name, share in largest_first if share >= 0.005]
            print(f"{way}: {', '.join(parts)}")
    print("\npublished:")
    for each in inputs["reported"]:
        print(f"  {each['who']}: {each['what']} ({each['source']})")


if __name__ == "__main__":
    main()
