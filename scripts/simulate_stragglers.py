#!/usr/bin/env python3
"""Scripted histories of jobs with and without a slow rank, shown to what finds stragglers.

    python scripts/simulate_stragglers.py [--histories 1000] [--seed 0]

Each history is a job of 20 minutes on 1 to 4 nodes with 2 to 32 ranks, whose steps take 0.1 to 5
seconds, with 1 to 10 % of noise on each rank and 5 to 40 % of transfer. Whatever else is in it is
harmless: pauses of the garbage collector, a rank 0 that logs every tenth step or writes checkpoints
alone, declared or not, one that alone validates, a loader of one rank that is slow for up to 40
seconds. In half of them one rank is slower by 10, 20 or 40 % from some step on.

What ranks measure goes through the real code: ``ncclops.receipts.pace`` for each rank, and
``ncclops.health.paces`` for each node, which knows of the other nodes' ranks what was told last.
A false alarm is a chronic straggler that none is (or another rank). Intervals are Wilson's, at
95 %.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ncclops.health.paces import PaceWatch, RankPace
from ncclops.receipts.pace import Pace, Unit
from ncclops.record import receipt_records

LENGTH_S = 1200.0
LONGEST_STALL_S = 40.0
SLOWNESS = (0.1, 0.2, 0.4)


@dataclass(frozen=True)
class Job:
    """A history. ``slow`` is a rank, how much slower it is, and from which second on."""

    nodes: int
    ranks_a_node: int
    step_s: float
    noise: float
    transfer: float
    harmless: str
    slow: tuple[int, float, float] | None


@dataclass(frozen=True)
class Alarm:
    rank: int
    at: float


def draw(chance: random.Random) -> Job:
    """A job by chance."""
    nodes, ranks_a_node = chance.choice((1, 1, 2, 4)), chance.choice((2, 4, 8))
    slow = None
    if chance.random() < 0.5:
        rank = chance.randrange(nodes * ranks_a_node)
        slow = (rank, chance.choice(SLOWNESS), chance.uniform(0, LENGTH_S / 4))
    kinds = ("none", "pauses", "logs", "checkpoints", "declared checkpoints", "validates", "loader")
    return Job(
        nodes=nodes,
        ranks_a_node=ranks_a_node,
        step_s=chance.choice((0.1, 0.3, 1.0, 5.0)),
        noise=chance.uniform(0.01, 0.1),
        transfer=chance.uniform(0.05, 0.4),
        harmless=chance.choice(kinds),
        slow=slow,
    )


def play(job: Job, chance: random.Random) -> list[Alarm]:
    """The alarms of ``job``."""
    world = job.nodes * job.ranks_a_node
    now = 0.0
    found: list[Alarm] = []
    watches = [PaceWatch() for _ in range(job.nodes)]
    told: dict[int, RankPace] = {}

    def recorder(rank: int) -> Callable[[dict[str, Any]], None]:
        def put(fields: dict[str, Any]) -> None:
            line = json.dumps({"ts": now, "kind": "pace", **fields})
            record = receipt_records.decode(line)
            assert isinstance(record, receipt_records.PaceRecord)
            pace = RankPace.of(rank, record)
            node = rank // job.ranks_a_node
            others = [each for each in told.values() if each.rank // job.ranks_a_node != node]
            for each in watches[node].saw(pace, others):
                if each.kind == "chronic":
                    found.append(Alarm(each.rank, now))
            if pace.differs(told.get(rank)):
                told[rank] = pace

        return put

    paces = [Pace(recorder(rank)) for rank in range(world)]
    stalled, begins = chance.randrange(world), chance.uniform(0, LENGTH_S)
    stalls_until = begins + chance.uniform(5, LONGEST_STALL_S)
    number = 0
    while now < LENGTH_S:
        own = [job.step_s * max(0.2, chance.gauss(1, job.noise)) for _ in range(world)]
        if job.slow is not None and now >= job.slow[2]:
            own[job.slow[0]] *= 1 + job.slow[1]
        disturbs = harm(job, own, number, begins <= now < stalls_until, stalled, chance)
        transfer = job.step_s * job.transfer
        seconds = max(own) + transfer
        now += seconds
        for rank, pace in enumerate(paces):
            if disturbs and rank == 0:
                pace.phase(begins=True)
                pace.phase(begins=False)
            end_ns = int(now * 1e9)
            if pace.ends("step", end_ns) and pace.begin(end_ns)[1]:
                pace.add(Unit("step", number, now, seconds, seconds - own[rank]))
        number += 1
    for watch in watches:
        found += [Alarm(each.rank, now) for each in watch.finish()]
    return found


def harm(
    job: Job,
    own: list[float],
    number: int,
    stalls: bool,
    stalled: int,
    chance: random.Random,
) -> bool:
    """What else happens in a step changes ``own``; whether rank 0 declares it."""
    if job.harmless == "pauses" and chance.random() < 0.05:
        own[chance.randrange(len(own))] += 0.2
    if job.harmless == "logs" and number % 10 == 9:
        own[0] += 0.5 * job.step_s
    if job.harmless.endswith("checkpoints") and number % 50 == 49:
        own[0] += 20.0
        return job.harmless.startswith("declared")
    if job.harmless == "validates" and number % 200 == 199:
        own[0] += 60.0
    if job.harmless == "loader" and stalls:
        own[stalled] *= 2.0
    return False


def interval(count: int, of: int) -> str:
    """``count`` of ``of`` with Wilson's interval, in percent."""
    if not of:
        return "-"
    z, share = 1.96, count / of
    middle = (share + z * z / (2 * of)) / (1 + z * z / of)
    half = z * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of)) / (1 + z * z / of)
    low, high = max(0.0, middle - half), min(1.0, middle + half)
    return f"{count} of {of} ({100 * low:.1f} to {100 * high:.1f} %)"


def main() -> None:
    parser = argparse.ArgumentParser(description="Rates of finding stragglers.")
    parser.add_argument("--histories", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    played = []
    for number in range(arguments.histories):
        chance = random.Random(f"{arguments.seed}-{number}")
        job = draw(chance)
        played.append((job, play(job, chance)))
    print(f"{len(played)} histories from seed {arguments.seed}")
    wrong = [
        job
        for job, alarms in played
        if any(job.slow is None or alarm.rank != job.slow[0] for alarm in alarms)
    ]
    print(f"false alarms: {interval(len(wrong), len(played))}")
    for job in wrong:
        print(f"  {job}")
    for slowness in SLOWNESS:
        those = [(job, alarms) for job, alarms in played if job.slow and job.slow[1] == slowness]
        times = [
            alarm.at - job.slow[2]
            for job, alarms in those
            for alarm in alarms[:1]
            if job.slow is not None and alarm.rank == job.slow[0]
        ]
        median, longest = (statistics.median(times), max(times)) if times else (0.0, 0.0)
        print(
            f"{slowness:4.0%} slower: found {interval(len(times), len(those))},"
            f" after {median:.0f} s in the median, {longest:.0f} s at most"
        )


if __name__ == "__main__":
    main()
