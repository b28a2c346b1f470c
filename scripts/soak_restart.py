"""Random faults against restarting jobs of all kinds, and many restarts of one. From seeds.

    PYTHONPATH=src python scripts/soak_restart.py [--faults 1000] [--seeds 20] [--seed 0]
                                [--world 4] [--scene NAME] [--restarts 1000] [--hard-s 20]
                                [--backend gloo]

Each seed runs each scene of tests/restart/soak_scenes.py once: data loaders with and without
persistent workers, generators, asyncio, a thread pool, forked children, nested wrappers, a model of
DDP, a thread that writes checkpoints. Exceptions, hangs with and without the GIL, exits, SIGKILL
and SIGSTOP strike in the function, after a collective, while saving and in callbacks. Every rank
that nothing lethal struck has to finish with the result of an undisturbed run, none may hold more
at the end than at the beginning, and nothing may stay behind. It ends early when ``--faults`` have
struck. Then a job restarts ``--restarts`` times, on ``--backend``: for nccl run the
script by ``scripts/fake_gpu``. With ``--keeps-going`` its function goes on, with its default group
where torch can reconfigure that (``FAKE_GPU_TORCH=2.14.0 scripts/fake_gpu python …``). Prints a
table; exits with 1 on a violation, and names the directory with its logs. ``--seed 7 --seeds 1
--scene asyncio --restarts 0`` repeats a job.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from ncclops.testing import HarnessError, JobFactory
from tests.restart import soak, soak_scenes

STEPS = 40
FAULTS_PER_JOB = 8  # of which some never strike: their rank is gone, or its loop is over
DEADLINE = timedelta(minutes=8)
# A restart of two ranks takes some 20 ms where nothing else runs.
RESTART_WITHIN_S = 2.0


@dataclass
class Row:
    """What happened to the jobs of one scene."""

    jobs: int = 0
    struck: Counter[str] = field(default_factory=Counter)
    lethal: int = 0
    restarts: int = 0
    violations: int = 0
    seconds: float = 0.0


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--world", type=int, default=4)
    parser.add_argument("--scene", action="append", choices=[*soak_scenes.SCENES])
    parser.add_argument("--restarts", type=int, default=1000)
    parser.add_argument("--keeps-going", action="store_true")
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    # A healthy rank is never silent for so long, however busy the machine.
    parser.add_argument("--hard-s", type=float, default=20)
    given = parser.parse_args()
    rows = {scene: Row() for scene in given.scene or soak_scenes.SCENES}
    bad = 0
    for seed in range(given.seed, given.seed + given.seeds):
        for scene, row in rows.items():
            if sum(each.struck.total() for each in rows.values()) < given.faults:
                run(scene, seed, given.world, given.hard_s, row)
    if any(row.jobs for row in rows.values()):
        print(table(rows))
    if given.restarts:
        bad = restart(given.restarts, given.backend, given.hard_s, given.keeps_going)
    sys.exit(bool(bad or sum(row.violations for row in rows.values())))


def run(scene: str, seed: int, world: int, hard_s: float, row: Row) -> None:
    """One job of ``scene``, added to ``row``; its directory stays where something was wrong."""
    # both wrappers would act upon a death, and it is the outer one's choice what to do
    lethal = 0 if scene == "nested" else world // 2
    faults = soak.schedule(f"{scene} {seed}", world, STEPS, FAULTS_PER_JOB, lethal)
    directory = Path(tempfile.mkdtemp(prefix=f"soak-{scene}-{seed}-"))
    began, found = time.monotonic(), list[str]()
    with JobFactory(directory) as factory:
        job = factory(
            soak_scenes.train,
            world_size=world,
            args=(scene, directory, STEPS, soak.timing(hard_s)),
            faults=faults,
            deadline=DEADLINE,
            all_strike=False,
            wrapper={"monitor_process_logfile": str(directory / "monitor-log-{rank}")},
        )
        try:
            result = job.run()
        except HarnessError as error:
            found = [str(error).splitlines()[0]]
        else:
            found = soak.violations(result, STEPS)
            shared = [path.name for path in Path("/dev/shm").iterdir()]
            left = soak.segments_of(job.pids.values(), shared)
            found += [f"left in /dev/shm: {', '.join(left)}"] if left else []
            row.struck += Counter(strike.fault.kind.value for strike in result.strikes)
            row.lethal += soak.count_lethal(result)
            row.restarts += result.restarts
    row.jobs += 1
    row.violations += len(found)
    row.seconds += time.monotonic() - began
    progress = f"{scene}, seed {seed}: {row.struck.total()} faults so far, {row.seconds:.0f} s"
    print(progress, file=sys.stderr, flush=True)
    for violation in found:
        print(f"{scene}, seed {seed}: {violation}; logs in {directory}", flush=True)
    if found:
        print(f"  faults: {'; '.join(map(str, faults))}", flush=True)
    else:
        shutil.rmtree(directory)


def restart(times: int, backend: str, hard_s: float, keeps_going: bool) -> int:
    """Restart a job of two ranks ``times`` times and print what they hold; the violations."""
    directory = Path(tempfile.mkdtemp(prefix="soak-restarts-"))
    deadline = timedelta(seconds=60 + times * RESTART_WITHIN_S)
    with JobFactory(directory) as factory:
        job = factory(
            soak_scenes.restart_often,
            world_size=2,
            args=(times, soak.timing(hard_s), backend, keeps_going),
            deadline=deadline,
        )
        try:
            result = job.run()
        except HarnessError as error:
            print(f"{times} restarts: {str(error).splitlines()[0]}; logs in {directory}")
            return 1
    found = []
    print(f"\n| rank | restarts | {' | '.join(soak.HOLDINGS)} (KiB) |")
    print("|---|---|" + "---|" * len(soak.HOLDINGS))
    for rank in result.ranks:
        holdings = [note.fields for note in result.notes_of("holds", rank)]
        for entry in holdings:
            cells = (rank, entry["iteration"], *(entry[name] for name in soak.HOLDINGS))
            print(f"| {' | '.join(map(str, cells))} |")
        found += [f"rank {rank} holds {grown}" for grown in soak.growth(holdings)]
        print(*(f"rank {rank}: {note.fields}" for note in result.notes_of("rungs", rank)), sep="\n")
    if result.restarts != times:
        found.append(f"{result.restarts} restarts and not {times}")
    for violation in found:
        print(f"{times} restarts: {violation}; logs in {directory}")
    if not found:
        shutil.rmtree(directory)
    return len(found)


def table(rows: dict[str, Row]) -> str:
    """A line for each scene, and the sum."""
    lines = ["| scene | jobs | faults | lethal | restarts | violations | s | of which |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    total = Row()
    for scene, row in rows.items():
        lines.append(line(scene, row))
        total.jobs += row.jobs
        total.struck += row.struck
        total.lethal += row.lethal
        total.restarts += row.restarts
        total.violations += row.violations
        total.seconds += row.seconds
    return "\n".join([*lines, line("all", total)])


def line(name: str, row: Row) -> str:
    """One line of the table."""
    kinds = ", ".join(f"{kind} {count}" for kind, count in row.struck.most_common())
    cells = (name, row.jobs, row.struck.total(), row.lethal, row.restarts, row.violations)
    return f"| {' | '.join(map(str, cells))} | {row.seconds:.0f} | {kinds} |"


if __name__ == "__main__":
    main()
