"""Random faults against restarting jobs, until ``--faults`` have struck. Seeded and repeatable.

    PYTHONPATH=src python scripts/soak_restart.py [--faults 200] [--seed 0] [--world 8]

Each round is a job of ``--world`` ranks that runs a toy training with checkpoints, and suffers
exceptions, hangs with and without the GIL, SIGKILL and SIGSTOP, in the function, in a collective,
while saving and in callbacks. Every rank that nothing lethal struck has to finish with the result
of an undisturbed run; none may hold more descriptors, threads or shared memory in its last
iteration than in its first; and no process may stay behind. A round takes up to half of its ranks
away, and its seed is the last one's plus one: ``--seed`` repeats a round, or goes on after it.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.restart.conftest import Job, Zygote
from tests.restart.soak import LETHAL, expect_soaked, schedule

FAULTS_PER_ROUND = 24
STEPS = 60
# A healthy rank is never silent for this long, however busy the machine.
HARD_TIMEOUT_S = 20


def main() -> None:
    """Run rounds until enough faults have struck; a failure ends with a traceback and the seed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--world", type=int, default=8)
    arguments = parser.parse_args()
    zygote, seed, began = Zygote(), arguments.seed, time.monotonic()
    struck: Counter[tuple[str, str]] = Counter()
    try:
        while struck.total() < arguments.faults:
            struck += soak(zygote, arguments.world, seed)
            print(f"{struck.total()} faults survived", flush=True)
            seed += 1
    finally:
        zygote.close()
    report(struck, seed - arguments.seed, time.monotonic() - began)


def soak(zygote: Zygote, world: int, seed: int) -> Counter[tuple[str, str]]:
    """One round; what struck where, and how often."""
    faults = schedule(seed, world, STEPS, FAULTS_PER_ROUND, world // 2)
    directory = Path(tempfile.mkdtemp(prefix=f"soak-{seed}-"))
    job, began = Job(zygote, directory), time.monotonic()
    try:
        job.start(world, "soak_worker:soak", steps=STEPS, faults=faults, hard_s=HARD_TIMEOUT_S)
        strikes = expect_soaked(job, world, STEPS)
    except BaseException:
        print(f"failed with seed {seed}; logs in {directory}: {faults}", flush=True)
        raise
    finally:
        job.close()
    restarts = 1 + max(event["iteration"] for event in job.events("incident"))
    print(
        f"seed {seed}: {strikes.total()} faults, {restarts} restarts in "
        f"{time.monotonic() - began:.0f} s",
        flush=True,
    )
    shutil.rmtree(directory)
    return strikes


def report(struck: Counter[tuple[str, str]], rounds: int, duration_s: float) -> None:
    """The totals, by kind and by place."""
    kinds = Counter(kind for kind, _ in struck.elements())
    places = Counter(place for _, place in struck.elements())
    deaths = sum(kinds[kind] for kind in LETHAL)
    print(
        f"{struck.total()} faults, {deaths} of them lethal, in {rounds} rounds, {duration_s:.0f} s"
    )
    print("kinds: " + ", ".join(f"{kind} {count}" for kind, count in kinds.most_common()))
    print("places: " + ", ".join(f"{place} {count}" for place, count in places.most_common()))


if __name__ == "__main__":
    main()
