"""Random faults for ``recovery_training.py``, its jobs, and what must be true afterwards."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conftest import free_port
from tests.fakegpu.host import QUICK
from tests.restart.recovery_training import EXCEPTIONS

REPOSITORY = Path(__file__).parents[2]
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


def run(
    directory: Path, shape: str, ranks: int, steps: int, plan: list[Fault], nodes: int = 1
) -> Outcome:
    """One job, of as many agents as ``nodes``, on this machine."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    (directory / "plan.json").write_text(json.dumps(plan))
    environment = os.environ | {"PYTHONPATH": f"{REPOSITORY}/src:{REPOSITORY}"}
    profile = "local-cpu"
    if shape.startswith("nccl"):
        profile = "single-node-h200"
        (directory / "meeting").mkdir()
        environment |= QUICK | {"FAKEGPU_MEETING": f"{directory}/meeting"}
    timeouts = ["--timeout", "soft=8s", "--timeout", "hard=14s", "--timeout", "grow=30s"]
    command = [sys.executable, "-m", "ncclops", "launch", "--profile", profile, *timeouts]
    restarts = "in-process" if "shrink" in shape else "in-process:grow"
    command += ["--restart", restarts, "--nproc-per-node", str(ranks // nodes), "--tee", "none"]
    if nodes > 1:
        command += ["--nnodes", str(nodes), "--master-addr", "127.0.0.1"]
        command += ["--master-port", str(free_port())]
    script = REPOSITORY / "tests" / "restart" / "recovery_training.py"
    began = time.monotonic()
    with (directory / "launch.log").open("wb") as log:
        agents = []
        for node in range(nodes):
            own = ["--node-rank", str(node)] if nodes > 1 else []
            own += ["--run-dir", f"run-{node}" if node else "run"]
            own += [str(script), shape, str(directory), str(steps)]
            agents.append(
                subprocess.Popen(
                    [*command, *own], cwd=directory, env=environment, stdout=log, stderr=log
                )
            )
        try:
            codes = [each.wait(max(LIMIT_S + began - time.monotonic(), 1.0)) for each in agents]
            code: int | None = max(codes)
        except subprocess.TimeoutExpired:
            code = None
            for each in agents:
                each.terminate()
            for each in agents:
                each.wait()
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
