"""Random faults against restarting jobs, until ``--faults`` have struck. Seeded and repeatable.

    PYTHONPATH=src python scripts/soak_restart.py [--faults 200] [--seed 0] [--world 8]

Each job runs a toy training with checkpoints on ``--world`` ranks, and suffers exceptions, hangs
with and without the GIL, SIGKILL and SIGSTOP, in the function, in a collective and in callbacks.
Survivors have to finish with the result of an undisturbed run and leave no process behind.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.restart.conftest import Job, Zygote
from tests.restart.soak import expect_soaked, schedule

FAULTS_PER_JOB = 20
LETHAL_PER_JOB = 5
STEPS = 60


def main() -> None:
    """Run jobs until enough faults have struck; a failure ends with a traceback and the seed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--world", type=int, default=8)
    arguments = parser.parse_args()
    zygote, struck, seed = Zygote(), 0, arguments.seed
    try:
        while struck < arguments.faults:
            struck += soak(zygote, arguments.world, seed)
            print(f"{struck} faults survived", flush=True)
            seed += 1
    finally:
        zygote.close()


def soak(zygote: Zygote, world: int, seed: int) -> int:
    """One job; the number of faults that struck."""
    faults = schedule(seed, world, STEPS, FAULTS_PER_JOB, min(LETHAL_PER_JOB, world - 2))
    with tempfile.TemporaryDirectory() as directory:
        job, began = Job(zygote, Path(directory)), time.monotonic()
        try:
            expect_soaked(
                job.start(world, "soak", steps=STEPS, faults=faults), world, STEPS, faults
            )
        except BaseException:
            print(f"failed with seed {seed}: {faults}", flush=True)
            raise
        finally:
            job.close()
        strikes = len(job.events("strike"))
    print(f"seed {seed}: {strikes} faults in {time.monotonic() - began:.0f} s", flush=True)
    return strikes


if __name__ == "__main__":
    main()
