"""Random faults for ``soak_worker``, from a seed, and what must be true afterwards."""

from __future__ import annotations

import random
from collections import Counter

from .conftest import Job

Fault = list[object]  # [step, rank, kind, place], as soak_worker.Faults takes it

LETHAL = ("kill", "stop", "gil")
# Half of them exceptions, and a hang that releases the GIL, which costs a soft timeout.
HARMLESS = ("exception", "exception", "exception", "sleep")
PLACES = ("step", "step", "reduced", "initialize", "saving")
# A restart waits for the end of an atomic section: a hang in one takes its rank away.
_PLACES_OF_HANGS = tuple(place for place in PLACES if place != "saving")
# A failure there ends its rank, as does death.
PLACES_OF_NO_RETURN = ("finalize", "health_check")

# What a process may come to hold beyond what it held when it first entered the function: the
# reporter's thread and its connection, and one that closes late.
_SLACK = {"fds": 2, "threads": 2, "segments": 0}


def schedule(seed: int, world: int, steps: int, faults: int, lethal: int) -> list[Fault]:
    """``faults`` random faults, ``lethal`` of which take their rank away, at most one per rank."""
    chance = random.Random(seed)
    found: list[Fault] = []
    for rank in chance.sample(range(world), lethal):
        place = chance.choice(PLACES + PLACES_OF_NO_RETURN)
        found.append([chance.randrange(steps), rank, chance.choice(LETHAL), place])
    for _ in range(faults - lethal):
        step, rank, kind = chance.randrange(steps), chance.randrange(world), chance.choice(HARMLESS)
        place = chance.choice(_PLACES_OF_HANGS if kind == "sleep" else PLACES)
        found.append([step, rank, kind, place])
    return found


def expect_soaked(job: Job, world: int, steps: int) -> Counter[tuple[str, str]]:
    """Every rank that nothing lethal struck has finished, with the right result, and held nothing
    more at the end than at the beginning. Returns how often what struck where.
    """
    codes = job.wait()
    strikes = job.events("strike")
    struck = {e["rank"] for e in strikes if e["kind"] in LETHAL}
    survivors = {rank for rank, code in codes.items() if code == 0}
    assert survivors == set(range(world)) - struck, (
        f"lost: {set(range(world)) - struck - survivors}"
    )
    weights = {round(e["value"], 6) for e in job.events("returned")}
    assert weights == {float(sum(step % 7 for step in range(steps)))}
    for rank in survivors:
        expect_no_growth(job, rank)
    job.expect_no_orphans()
    return Counter((e["kind"], e["place"]) for e in strikes)


def expect_no_growth(job: Job, rank: int) -> None:
    """A group may close late, so that it is there for a moment in the next iteration; what leaks
    is in all of the last ones.
    """
    first, *later = job.events("holds", rank)
    last = later[-3:] or [first]
    least = {name: min(entered[name] for entered in last) for name in _SLACK}
    grown = {name: least[name] - first[name] for name in _SLACK}
    assert all(grown[name] <= _SLACK[name] for name in _SLACK), f"rank {rank} holds {grown} more"
