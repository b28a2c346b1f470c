"""Random faults in one training after the other: is the result the same to the last bit?

    python scripts/soak_recovery.py [--faults 50] [--seeds 1] [--seed 0] [--ranks 4]
                                    [--shape ddp,fsdp2,keep-going] [--keep DIRECTORY]

Each job is `ncclops launch --restart in-process:grow` of tests/restart/recovery_training.py: AdamW,
dropout, data that is shuffled, and snapshots. Exceptions of several types and lines, exits,
SIGKILL, SIGSTOP and hangs strike it; also while it restarts for the fault before and while a
snapshot is restored, in the first and in the last step, and two ranks at once. A rank is lost at
most three times, as no further new process would take its place, and each fault strikes at a step
that has not been done before.

A job is good when it is completed, all its faults have struck, and each rank has the bits of an
undisturbed run: weights, the optimizer's state, generators, place in the data. Each job is a line;
the directory of a bad one stays. ``--seed 7 --seeds 1`` repeats one. For NCCL on the fake GPU:
`scripts/fake_gpu python scripts/soak_recovery.py --shape nccl`. Exits with 1 if one was not good.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.fakegpu.host import QUICK
from tests.restart.recovery_training import EXCEPTIONS

REPOSITORY = Path(__file__).parents[1]
STEPS_PER_FAULT = 5
# After which no new process takes a rank's place within ten minutes.
LOSSES_PER_RANK = 3
LIMIT_S = 1800.0
PLACES = ("step", "forward", "backward", "optimizer", "taken", "restoring", "starting")
LETHAL = ("kill", "kill", "kill", "stop", "exit", "gil-hang")

Fault = tuple[int, int, int, str, str]  # number, rank, step, place, kind


def planned(seed: int, shape: str, ranks: int, count: int) -> list[Fault]:
    """The first and the last step have one, and some strike two ranks at once."""
    chance = random.Random(f"{seed} {shape} {ranks}")
    left = dict.fromkeys(range(ranks), LOSSES_PER_RANK)
    found: list[Fault] = []
    number = 0
    while len(found) < count:
        first, last = number == 0, len(found) == count - 1
        step = STEPS_PER_FAULT * number + (0 if first else chance.randrange(3))
        step = step if not last else steps_of(count) - 1
        number += 1
        place = chance.choice(PLACES if not (first or last) else PLACES[:-2])
        at_once = 2 if chance.random() < 0.1 and count - len(found) > 2 else 1
        for rank in chance.sample(range(ranks), at_once):
            kind = f"raise-{chance.randrange(len(EXCEPTIONS))}"
            if chance.random() < 0.3 and left[rank]:
                kind = chance.choice(LETHAL)
                left[rank] -= 1
            elif chance.random() < 0.1:
                kind = "hang"
            found.append((len(found), rank, step, place, kind))
    return found


def steps_of(count: int) -> int:
    return STEPS_PER_FAULT * count + 10


@dataclass
class Outcome:
    """What is left of a job."""

    code: int | None
    verdict: dict[str, Any]
    results: dict[str, str]
    struck: list[int]
    seconds: float


def run(directory: Path, shape: str, ranks: int, steps: int, plan: list[Fault]) -> Outcome:
    """One job."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    (directory / "plan.json").write_text(json.dumps(plan))
    environment = os.environ | {"PYTHONPATH": f"{REPOSITORY}/src:{REPOSITORY}"}
    profile = "local-cpu"
    if shape == "nccl":
        profile = "single-node-h200"
        (directory / "meeting").mkdir()
        environment |= QUICK | {"FAKEGPU_MEETING": f"{directory}/meeting"}
    timeouts = ["--timeout", "soft=8s", "--timeout", "hard=14s", "--timeout", "grow=30s"]
    command = [sys.executable, "-m", "ncclops", "launch", "--profile", profile, *timeouts]
    command += ["--restart", "in-process:grow", "--nproc-per-node", str(ranks), "--tee", "none"]
    script = REPOSITORY / "tests" / "restart" / "recovery_training.py"
    command += ["--run-dir", "run", str(script), shape, str(directory), str(steps)]
    began = time.monotonic()
    with (directory / "launch.log").open("wb") as log:
        job = subprocess.Popen(command, cwd=directory, env=environment, stdout=log, stderr=log)
        try:
            code = job.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            code = None
            job.terminate()
            job.wait()
    verdict = directory / "run" / "verdict.json"
    return Outcome(
        code,
        json.loads(verdict.read_text()) if verdict.exists() else {},
        {path.name: path.read_text() for path in directory.glob("result-*")},
        sorted(int(path.name.partition("-")[2]) for path in directory.glob("struck-*")),
        time.monotonic() - began,
    )


def wrong(outcome: Outcome, expected: dict[str, str], plan: list[Fault]) -> list[str]:
    """What is wrong with it."""
    found = []
    if (outcome.code, outcome.verdict.get("outcome")) != (0, "completed"):
        found.append(f"exit code {outcome.code}: {outcome.verdict.get('reason')}")
    if missed := [fault for fault in plan if fault[0] not in outcome.struck]:
        found.append(f"not struck: {missed}")
    if outcome.results != expected:
        found.append(f"results {outcome.results}, undisturbed {expected}")
    return found


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--faults", type=int, default=50, help="in each job")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--shape", default="ddp,fsdp2,keep-going")
    parser.add_argument("--keep", type=Path, help="where the directories of bad jobs stay")
    given = parser.parse_args()
    keep = given.keep or Path(tempfile.mkdtemp(prefix="soak-recovery-"))
    bad = 0
    for shape in given.shape.split(","):
        steps = steps_of(given.faults)
        undisturbed = run(keep / f"{shape}-undisturbed", shape, given.ranks, steps, [])
        if undisturbed.code != 0 or len(undisturbed.results) != given.ranks:
            sys.exit(f"{shape}: undisturbed, exit code {undisturbed.code}; see {keep}")
        for seed in range(given.seed, given.seed + given.seeds):
            plan = planned(seed, shape, given.ranks, given.faults)
            directory = keep / f"{shape}-seed-{seed}"
            outcome = run(directory, shape, given.ranks, steps, plan)
            errors = wrong(outcome, undisturbed.results, plan)
            kinds = Counter(fault[4].partition("-")[0] for fault in plan)
            struck = f"{len(outcome.struck)} of {len(plan)} faults ({dict(kinds)})"
            line = f"{shape}, {given.ranks} ranks, {steps} steps, seed {seed}: {struck}"
            told = "; ".join(errors) or "the same bits"
            print(f"{line}, {outcome.seconds:.0f} s: {told}", flush=True)
            if errors:
                bad += 1
                print(f"  see {directory}", flush=True)
            else:
                shutil.rmtree(directory)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
