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
from tests.restart.recovery_training import EVALUATED, EXCEPTIONS

REPOSITORY = Path(__file__).parents[2]
STEPS_PER_FAULT = 5
# After which no new process takes a rank's place within ten minutes.
LOSSES_PER_RANK = 3
LIMIT_S = 1800.0
IN_A_STEP = ("step", "forward", "backward", "optimizer", "taking", "taken")
IN_A_RESTART = ("loading", "restoring", "starting")
LETHAL = ("kill", "kill", "later", "stop", "exit", "gil-hang")

Fault = tuple[int, int, int, str, str]  # number, rank, step, place, kind


def planned(seed: int, shape: str, ranks: int, count: int, nodes: int = 1) -> list[Fault]:
    """The first and the last step have one; some strike two ranks at once, all, or a whole node.

    One rank at least is left each time: who starts anew without any is the agents' decision.
    """
    chance = random.Random(f"{seed} {shape} {ranks}")
    left = dict.fromkeys(range(ranks), LOSSES_PER_RANK)
    if "shrink" in shape:
        left = dict.fromkeys(chance.sample(range(ranks), ranks - 2), 1)
    in_a_step = (*IN_A_STEP, *["evaluating"] * ("whole" in shape))
    found: list[Fault] = []
    number = 0
    while len(found) < count:
        first, last = number == 0, len(found) == count - 1
        step = STEPS_PER_FAULT * number + (0 if first else chance.randrange(3))
        step = step if not last else steps_of(count) - 1
        in_a_restart = (*IN_A_RESTART, *["compiling"] * (2 * ("compiled" in shape)))
        if "keep-going" in shape:
            in_a_restart = IN_A_RESTART
        place = chance.choice(in_a_step if first or last else (*in_a_step, *in_a_restart))
        if place == "evaluating":
            step = STEPS_PER_FAULT * number + EVALUATED if not last else step
            place = place if not last else "step"
        number += 1
        there = [r for r in range(ranks) if "shrink" not in shape or left.get(r, 1)]
        at_once, is_node = chance.sample(there, min(_how_many(chance, ranks), len(there))), False
        if nodes > 1 and chance.random() < 0.1 and "shrink" not in shape:
            node, at_once, is_node = chance.randrange(nodes), [*range(ranks // nodes)], True
            at_once = [node * (ranks // nodes) + each for each in at_once]
        if len(at_once) > count - len(found) or last:
            at_once = at_once[:1]
        spared = at_once[-1] if len(at_once) == ranks else None
        for rank in at_once:
            kind = f"raise-{chance.randrange(len(EXCEPTIONS))}"
            if (is_node or chance.random() < 0.3) and left.get(rank) and rank != spared:
                kind = "kill" if first or last or is_node else chance.choice(LETHAL)
                left[rank] -= 1
            elif not last and chance.random() < 0.15:
                kind = chance.choice(("hang", "slow"))
            found.append((len(found), rank, step, place, kind))
    return found


def _how_many(chance: random.Random, ranks: int) -> int:
    share = chance.random()
    return ranks if share < 0.05 else 2 if share < 0.15 else 1


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
    soft_s = 8
    if "compiled" in shape:
        soft_s = 50
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(directory.parent / "compiled")
    timeouts = ["--timeout", f"soft={soft_s}s", "--timeout", f"hard={soft_s + 6}s"]
    timeouts += ["--timeout", "grow=30s"]
    command = [sys.executable, "-m", "ncclops", "launch", "--profile", profile, *timeouts]
    restarts = "in-process" if "shrink" in shape else "in-process:grow"
    command += ["--restart", restarts, "--nproc-per-node", str(ranks // nodes), "--tee", "none"]
    if nodes > 1:
        command += ["--nnodes", str(nodes), "--master-addr", "127.0.0.1"]
        command += ["--master-port", str(free_port())]
    script = REPOSITORY / "tests" / "restart" / "recovery_shapes.py"
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


def wrong(
    outcome: Outcome, expected: dict[str, str], plan: list[Fault], *, is_smaller: bool = False
) -> list[str]:
    """What is wrong with it; ``is_smaller``: ranks that were lost have no result."""
    found = []
    if (outcome.code, outcome.verdict.get("outcome")) != (0, "completed"):
        found.append(f"exit code {outcome.code}: {outcome.verdict.get('reason')}")
    if missed := [fault for fault in plan if fault[0] not in outcome.struck]:
        found.append(f"not struck: {missed}")
    lost = sum(fault[4] in LETHAL for fault in plan) if is_smaller else 0
    same = outcome.results.items() <= expected.items()
    if not same or len(outcome.results) != len(expected) - lost:
        found.append(f"results {outcome.results}, undisturbed {expected}")
    return found
