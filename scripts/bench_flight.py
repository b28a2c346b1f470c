#!/usr/bin/env python
"""How long `ncclops flight analyze` takes on a large job, beside torch's own analyser.

Writes synthetic dumps as torch pickles them (NCCL, 2.10, with stacks): each rank is in the world,
in a group of 8 and in one of every eighth rank, the rings have wrapped at different places, and
one rank does not enter the last collective. Then both analysers read the same folder, ours as the
command line runs. torch's is stopped after --torch-limit.

    python scripts/bench_flight.py                         1,024 ranks x 2,000 entries
    python scripts/bench_flight.py --ranks 64 --records 500
"""

from __future__ import annotations

import argparse
import json
import pickle
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TORCH = "torch.distributed.flight_recorder.fr_trace"
FIRST_NS = 1_790_000_000_000_000_000
C10D = "/opt/conda/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py"
MODEL = "/opt/conda/lib/python3.12/site-packages/torch/nn/modules/module.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--records", type=int, default=2000)
    parser.add_argument("--torch-limit", type=float, default=300.0, metavar="SECONDS")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-flight-") as folder:
        size = write_dumps(Path(folder), options.ranks, options.records)
        entries = options.ranks * options.records
        print(f"{options.ranks} ranks x {options.records} entries: {size / 1e6:.0f} MB of pickles")
        ours, our_cpu = timed(lambda: run_ours(Path(folder), options.ranks))
        print(f"ncclops  {ours:6.1f} s, {our_cpu:.1f} s of CPU", end=", ")
        print(f"{entries / our_cpu / 1e3:.0f} thousand entries a CPU second", end=", ")
        print(f"peak memory of the largest process {peak_mib():.0f} MiB", flush=True)
        theirs, their_cpu = timed(lambda: run_torch(Path(folder), options.torch_limit))
        how = "" if theirs < options.torch_limit else " and was stopped"
        print(f"torch    {theirs:6.1f} s{how}, {their_cpu:.1f} s of CPU", end=", ")
        print(f"peak memory {peak_mib():.0f} MiB")
        least = "" if not how else "more than "
        print(f"torch took {least}{theirs / ours:.1f} times as long, ", end="")
        print(f"with {least}{their_cpu / our_cpu:.1f} times the CPU time")


def peak_mib() -> float:
    """Of the children so far; torch's analyser, which comes second, needs more than ours."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024


def timed(run: Callable[[], None]) -> tuple[float, float]:
    """Seconds by the clock, and of CPU in all processes that ``run`` waits for."""
    used, begin = cpu_s(), time.perf_counter()
    run()
    return time.perf_counter() - begin, cpu_s() - used


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def run_ours(folder: Path, ranks: int) -> None:
    command = [sys.executable, "-m", "ncclops", "flight", "analyze", str(folder), "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    verdict = json.loads(done.stdout)["verdict"]
    if verdict["kind"] != "never-arrived" or verdict["culprits"] != [culprit(ranks)]:
        raise SystemExit(f"the wrong answer: {verdict['sentence']}")
    print(f"{verdict['sentence']}")


def run_torch(folder: Path, limit_s: float) -> None:
    command = [sys.executable, "-m", TORCH, str(folder), "--allow-incomplete-ranks"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return
    if done.returncode:
        print("torch's analyser failed: " + done.stderr.strip().splitlines()[-1])


def culprit(ranks: int) -> int:
    return ranks * 2 // 3


def write_dumps(folder: Path, ranks: int, records: int) -> int:
    """One pickle a rank; returns their size in bytes."""
    stacks = [stack(line) for line in range(12)]
    return sum(write_dump(folder, rank, ranks, records, stacks) for rank in range(ranks))


def stack(line: int) -> list[dict[str, Any]]:
    frames = [("all_reduce", C10D, 2950), ("wrapper", C10D, 80)]
    frames += [("_call_impl", MODEL, 1700 + n) for n in range(8)]
    frames += [("layer", "/home/user/model.py", 100 + line), ("step", "/home/user/train.py", 57)]
    frames += [("main", "/home/user/train.py", 91), ("<module>", "/home/user/train.py", 120)]
    return [{"name": name, "filename": file, "line": number} for name, file, number in frames]


def write_dump(
    folder: Path, rank: int, ranks: int, records: int, stacks: list[list[dict[str, Any]]]
) -> int:
    groups = groups_of(rank, ranks)
    last = 9 * records  # an operation of the world
    total = last - 1 if rank == culprit(ranks) else last
    # Rings that hold as many entries begin at different ones where ranks have done more or less.
    entries = [
        entry(number, groups, stacks[number // 3 % len(stacks)], hangs=number == last)
        for number in range(total - records + 1 - rank % 3, total + 1)
    ]
    config = {
        name: {"name": name, "desc": desc, "ranks": str(members)} for name, desc, members in groups
    }
    dump = {
        "version": "2.10",
        "comm_lib_version": "2.29.3",
        "pg_config": config,
        "pg_status": {},
        "entries": entries,
    }
    path = folder / f"comm_lib_trace_rank_{rank}"
    return path.write_bytes(pickle.dumps(dump, protocol=2))


def groups_of(rank: int, ranks: int) -> list[tuple[str, str, list[int]]]:
    first = rank // 8 * 8
    return [
        ("0", "default_pg", list(range(ranks))),
        (f"{1 + rank // 8}", "tp", list(range(first, min(first + 8, ranks)))),
        (f"{10_000 + rank % 8}", "dp", list(range(rank % 8, ranks, 8))),
    ]


def entry(
    number: int, groups: list[Any], frames: list[dict[str, Any]], *, hangs: bool
) -> dict[str, Any]:
    which = number % len(groups)
    name, desc, _ = groups[which]
    begun = FIRST_NS + number * 1_000_000
    return {
        "frames": frames,
        "record_id": number,
        "pg_id": which,
        "process_group": (name, desc),
        "collective_seq_id": number // len(groups) + 1,
        "p2p_seq_id": 0,
        "op_id": number,
        "profiling_name": "nccl:all_reduce",
        "time_created_ns": begun,
        "duration_ms": None,
        "input_sizes": [[4096, 1 + number % 7]],
        "input_dtypes": ["BFloat16"],
        "output_sizes": [[4096, 1 + number % 7]],
        "output_dtypes": ["BFloat16"],
        "state": "scheduled" if hangs else "completed",
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None if hangs else begun + 500_000,
        "retired": not hangs,
        "timeout_ms": 600_000,
        "is_p2p": False,
        "thread_id": "140635973675904",
        "thread_name": "python",
    }


if __name__ == "__main__":
    main()
