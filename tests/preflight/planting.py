"""How defects are planted into a machine: in its GPUs, files, limits, ports and counters."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass

from ncclops.preflight.model import Status
from tests.preflight.machines import Machine


@dataclass(frozen=True)
class Defect:
    """``plant`` returns the subject. ``also`` are checks that the fault speaks through as well."""

    name: str
    check: str
    kinds: tuple[str, ...]
    plant: Callable[[Machine, random.Random], str]
    status: Status = Status.FAIL
    also: frozenset[str] = frozenset()


def gpu_with(**values: object) -> Callable[[Machine, random.Random], str]:
    def plant(machine: Machine, chance: random.Random) -> str:
        index = chance.randrange(len(machine.gpus))
        machine.gpus[index] |= values
        return f"GPU {index}"

    return plant


def file(path: str, text: str) -> Callable[[Machine, random.Random], str]:
    def plant(machine: Machine, chance: random.Random) -> str:
        machine.files[path] = text
        return "host"

    return plant


def files(texts: dict[str, str]) -> Callable[[Machine, random.Random], str]:
    def plant(machine: Machine, chance: random.Random) -> str:
        machine.files |= texts
        return "host"

    return plant


def limit(label: str, value: str) -> Callable[[Machine, random.Random], str]:
    def plant(machine: Machine, chance: random.Random) -> str:
        text = machine.files["proc/self/limits"]
        machine.files["proc/self/limits"] = re.sub(rf"({label}\s+)\S+", rf"\g<1>{value}", text)
        # As in a container, where root has not all capabilities.
        status = machine.files["proc/self/status"]
        machine.files["proc/self/status"] = re.sub(r"CapEff:\t\w+", "CapEff:\ta88425fb", status)
        return "host"

    return plant


def port(**values: str) -> Callable[[Machine, random.Random], str]:
    """Files of a port; ``/`` in their names is written as two underscores."""

    def plant(machine: Machine, chance: random.Random) -> str:
        index = chance.randrange(8)
        top = f"sys/class/infiniband/mlx5_{index}"
        for name, text in values.items():
            machine.files[f"{top}/ports/1/{name.replace('__', '/')}"] = text
        return f"mlx5_{index} port 1"

    return plant


def counted(counter: str, count: int) -> Callable[[Machine, random.Random], str]:
    """So many since the driver was loaded, and none while one looks."""
    return port(**{counter.replace("/", "__"): str(count)})


def logged(text: str) -> Callable[[Machine, random.Random], str]:
    """A line of the kernel log, ten minutes old."""

    def plant(machine: Machine, chance: random.Random) -> str:
        machine.log = [*(machine.log or []), (600.0, text)]
        return "host"

    return plant


def grown(counter: str, by: int) -> Callable[[Machine, random.Random], str]:
    def plant(machine: Machine, chance: random.Random) -> str:
        index = chance.randrange(8)
        place = f"sys/class/infiniband/mlx5_{index}/ports/1/{counter}"
        machine.later[place] = str(int(machine.files.get(place, "0")) + by)
        machine.files.setdefault(place, "0")
        return f"mlx5_{index} port 1"

    return plant
