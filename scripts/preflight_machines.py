"""A thousand machines, made up by seed: half healthy, half with one planted defect.

    .venv/bin/python scripts/preflight_machines.py [--seeds 1000] [--on-disk 50]

Prints how many healthy machines were convicted or warned of, how many defects were found where they
are, and how many brought a conviction besides. ``--on-disk`` of them are also written as trees and
read by the reader processes, as ``ncclops preflight --root`` does. Exits with 1 unless all is
right.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from ncclops.preflight.machine.reading import read_node
from ncclops.preflight.model import Finding, Status
from ncclops.preflight.node import judge
from tests.preflight.machines import KINDS, Machine, make
from tests.preflight.more_defects import DEFECTS
from tests.preflight.real_machines import MACHINES

GRAVE = (Status.FAIL, Status.WARN)


def main() -> int:
    """Run and print; 0 if no machine was judged wrongly."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--on-disk", type=int, default=0)
    options = parser.parse_args()
    began, seen = time.monotonic(), Counter[str]()
    for seed in range(options.seeds):
        (healthy if seed % 2 else defective)(seed // 2, seen)
    for seed in range(options.on_disk):
        on_disk(seed, seen)
    for name, made in MACHINES.items():
        for seed in range(options.seeds // 100):
            shown(name, made(random.Random(seed)), seen)
    for what, count in sorted(seen.items()):
        print(f"{count:6}  {what}")
    print(f"{time.monotonic() - began:6.1f}  seconds")
    return int(any(what.startswith("WRONG") for what in seen))


def healthy(seed: int, seen: Counter[str]) -> None:
    """One without a defect."""
    found = [each for each in judge(make(seed).node()) if each.status in GRAVE]
    seen["healthy machines"] += 1
    for each in found:
        seen[f"WRONG: {each.status} on a healthy machine: {each.check} {each.read}"] += 1


def shown(name: str, machine: Machine, seen: Counter[str]) -> None:
    """A healthy one as people have shown theirs: odd ones among them may be warned of."""
    seen["healthy machines after public listings"] += 1
    for each in judge(machine.node()):
        if each.status is Status.FAIL:
            seen[f"WRONG: {each.status} on {name}: {each.check} {each.read}"] += 1


def defective(seed: int, seen: Counter[str]) -> None:
    """One with a defect that its kind can have; defects and kinds take turns."""
    defect = DEFECTS[seed % len(DEFECTS)]
    kind = defect.kinds[seed // len(DEFECTS) % len(defect.kinds)]
    machine = make(KINDS.index(kind) + len(KINDS) * seed)
    subject = defect.plant(machine, random.Random(seed))
    found = judge(machine.node())
    seen["defects planted"] += 1
    if any(_is(each, defect.check, subject, defect.status) for each in found):
        seen["defects found, on the right part"] += 1
    else:
        seen[f"WRONG: not found: {defect.name} on {kind}"] += 1
    wanted = {defect.check, *defect.also} if defect.status is Status.FAIL else set[str]()
    for check in {each.check for each in found if each.status is Status.FAIL} - wanted:
        seen[f"WRONG: {defect.name} on {kind} convicts {check} too"] += 1


def on_disk(seed: int, seen: Counter[str]) -> None:
    """A healthy one, written and read."""
    machine: Machine = make(seed)
    with tempfile.TemporaryDirectory() as directory:
        machine.write(Path(directory))
        node = read_node(
            Path(directory), {**os.environ, "LD_LIBRARY_PATH": ""}, window=timedelta(0)
        )
    seen["healthy machines written and read"] += 1
    for each in judge(node):
        if each.status in GRAVE:
            seen[f"WRONG: {each.status} on a tree of {machine.kind}: {each.check}"] += 1


def _is(each: Finding, check: str, subject: str, status: Status) -> bool:
    return (each.check, each.subject, each.status) == (check, subject, status)


if __name__ == "__main__":
    sys.exit(main())
