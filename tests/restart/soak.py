"""Random faults for ``soak_scenes``, from a seed, and what must be true afterwards."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from ncclops.testing import Fault, JobResult

from .soak_scenes import undisturbed

# Half of the harmless ones are exceptions, and a hang costs a soft timeout.
_HARMLESS = (Fault.exception, Fault.exception, Fault.exception, Fault.hang)
_LETHAL = (Fault.kill, Fault.stop, Fault.gil_hang, Fault.exit)
_PLACES = ("step", "step", "reduced", "initialize", "health_check", "saving")
# A restart waits for the end of an atomic section: a hang in one takes its rank away.
_PLACES_OF_HANGS = tuple(place for place in _PLACES if place != "saving")
# A failure there ends its rank, as does death.
_PLACES_OF_NO_RETURN = ("finalize", "restart_health_check")

# What a process may come to hold beyond what it held when it first entered the function: the
# reporter's thread and its connection, one that closes late, and the one that rank 0 keeps beside
# those to a relay.
HOLDINGS = ("descriptors", "threads", "segments", "memory")
_SLACK = {"descriptors": 3, "threads": 2, "segments": 0}
# Allocators fill their arenas in the first restarts; a leak of a group or of a frame is more.
_SLACK_OF_MEMORY_KIB = 32 * 1024

_SHORT = timedelta(milliseconds=100)


def timing(hard_s: float) -> dict[str, Any]:
    """Timeouts for which a healthy rank of a busy machine is never silent long enough."""
    return {
        "soft_timeout": timedelta(seconds=hard_s / 2),
        "hard_timeout": timedelta(seconds=hard_s),
        "heartbeat_timeout": timedelta(seconds=hard_s),
        "barrier_timeout": timedelta(seconds=2 * hard_s),
        "monitor_process_interval": _SHORT,
        "progress_watchdog_interval": _SHORT,
        "monitor_thread_interval": 2 * _SHORT,
        "heartbeat_interval": _SHORT,
        "termination_grace_time": 5 * _SHORT,
    }


def schedule(seed: int | str, world: int, steps: int, count: int, lethal: int) -> list[Fault]:
    """``count`` random faults, ``lethal`` of which take their rank away, at most one per rank."""
    chance = random.Random(seed)
    found: dict[tuple[int, str, int], Fault] = {}

    def add(fault: Fault) -> None:
        found.setdefault((fault.rank, fault.at, fault.n), fault)

    for rank in chance.sample(range(world), lethal):
        place = chance.choice(_PLACES + _PLACES_OF_NO_RETURN)
        add(chance.choice(_LETHAL)(rank, place, _passing(chance, place, steps)))
    while len(found) < count:
        make, rank = chance.choice(_HARMLESS), chance.randrange(world)
        place = chance.choice(_PLACES_OF_HANGS if make == Fault.hang else _PLACES)
        add(make(rank, place, _passing(chance, place, steps)))
    return list(found.values())


def _passing(chance: random.Random, place: str, steps: int) -> int:
    """Steps are many, iterations as many as restarts."""
    return chance.randrange(1, steps + 1 if place in ("step", "reduced", "saving") else 4)


def violations(result: JobResult, steps: int) -> list[str]:
    """What is wrong: ranks lost that nothing lethal struck, other results, or leaks."""
    found = []
    wrongly = sorted(result.lost - result.taken)
    if wrongly:
        found += [f"rank {r} was lost: {result.ranks[r].ending}" for r in wrongly]
    wrong = {
        r: value for r, value in result.values.items() if abs(value - undisturbed(steps)) > 1e-3
    }
    if wrong:
        found.append(f"results are {wrong} and not {undisturbed(steps)}")
    for rank in result.values:
        holdings = [note.fields for note in result.notes_of("holds", rank)]
        found += [f"rank {rank} holds {grown}" for grown in growth(holdings)]
    return found


def growth(holdings: Sequence[Mapping[str, Any]]) -> list[str]:
    """What has grown from the first to the last of ``holdings``, which are those of one rank.

    A group may close late, so that it is there for a moment in the next iteration; what leaks is
    in all of the last ones.
    """
    if not holdings:
        return []
    first, *later = holdings
    last = later[-3:] or [first]
    least = {name: min(entry[name] for entry in last) for name in HOLDINGS}
    grown = {name: least[name] - first[name] for name in least}
    found = [f"{grown[name]} more {name}" for name in _SLACK if grown[name] > _SLACK[name]]
    if grown["memory"] > _SLACK_OF_MEMORY_KIB:
        found.append(f"{grown['memory'] // 1024} MiB more memory")
    return found


def expect_forty_restarts_without_growth(result: JobResult) -> None:
    """Of ``soak_scenes.restart_often`` on two ranks."""
    assert (result.value, result.restarts) == (40, 40)
    for rank in (0, 1):
        holdings = [note.fields for note in result.notes_of("holds", rank)]
        assert len(holdings) == 21
        assert not growth(holdings)


def count_lethal(result: JobResult) -> int:
    """How many faults took a rank."""
    return sum(bool(strike.fault.takes) for strike in result.strikes)


def segments_of(pids: Iterable[int], names: Iterable[str]) -> list[str]:
    """Those of ``names`` in /dev/shm that torch has made in one of ``pids``."""
    marks = tuple(f"torch_{pid}_" for pid in pids)
    return [name for name in names if name.startswith(marks)]
