"""Random faults for the ``soak`` scenario, from a seed, and what must be true afterwards."""

from __future__ import annotations

import random

from .conftest import Job

LETHAL = ("kill", "stop", "gil")
HARMLESS = ("exception", "exception", "exception", "sleep")
# A failure in the health check on the way to a restart ends its rank, as does death.
PLACES = ("step", "step", "reduced", "initialize")


def schedule(seed: int, world: int, steps: int, faults: int, lethal: int) -> list[list[object]]:
    """``faults`` random faults, ``lethal`` of which take their rank away, at most one per rank."""
    chance = random.Random(seed)
    doomed = chance.sample(range(world), lethal)
    found: list[list[object]] = []
    for rank in doomed:
        step = chance.randrange(steps // 2, steps)
        found.append([step, rank, chance.choice(LETHAL), chance.choice(PLACES)])
    for _ in range(faults - lethal):
        step, rank = chance.randrange(steps), chance.randrange(world)
        found.append([step, rank, chance.choice(HARMLESS), chance.choice(PLACES)])
    return found


def expect_soaked(job: Job, world: int, steps: int, faults: list[list[object]]) -> None:
    """Every rank that nothing lethal struck has finished with the right result."""
    codes = job.wait()
    struck = {e["rank"] for e in job.events("strike") if e["kind"] in LETHAL}
    assert {rank for rank, code in codes.items() if code == 0} == set(range(world)) - struck
    weights = {round(e["value"], 6) for e in job.events("returned")}
    assert weights == {float(sum(step % 7 for step in range(steps)))}
    job.expect_no_orphans()
