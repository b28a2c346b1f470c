"""What forensics costs: a restart that collects, a worker that nothing happens to, a collective.

    python scripts/bench_forensics.py [--ranks 8] [--repeat 5] [--json]

Four measurements, those of time with their counterpart without forensics in the same run:

collect   ``--ranks`` Gloo ranks whose recorder is full (the profiles' 2,000 entries); one raises.
          From the fault until the last rank is back in the function, with incidents and without,
          and what the ``collect`` phase took on each rank.
picture   CPU time of one rank for taking its picture, which a restart waits for, and for writing
          it, which nobody waits for; the recorder is full. Unlike `collect` it does not depend on
          how many cores there are for the ranks, and how busy they are.
idle      CPU time of a worker that sleeps, with the witness and without, in ms per second.
recorder  microseconds of CPU per ``all_reduce`` on one Gloo rank, with the recorder on and off,
          taken in turns.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RING = 2000  # profiles/base.toml
DEADLINE_S = 180
IDLE_S = 5.0
COLLECTIVES = 5000


def main() -> None:
    """Measure, print a line each, or with ``--json`` one document."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(json.loads(options.worker))
        return
    results = {
        "collect": collect(options.ranks, options.repeat),
        "picture": picture(options.repeat),
        "idle": idle(options.repeat),
        "recorder": recorder(options.repeat),
    }
    if options.json:
        print(json.dumps(results, indent=1))
    else:
        show(results)


def show(results: dict[str, Any]) -> None:
    """The medians, in words."""
    c, i, r = results["collect"], results["idle"], results["recorder"]
    print(
        f"collect   {c['ranks']} ranks, {RING} entries each: restart {c['with_ms']:.0f} ms with, "
        f"{c['without_ms']:.0f} ms without; the phase took {c['phase_median_ms']:.0f} ms "
        f"(slowest rank {c['phase_slowest_ms']:.0f} ms; medians of {c['runs']} runs)"
    )
    p = results["picture"]
    print(
        f"picture   {p['take_cpu_ms']:.1f} ms of CPU to take it, "
        f"{p['write_cpu_ms']:.1f} ms to write it"
    )
    print(
        f"idle      {i['with_ms_per_s']:.2f} ms of CPU per second with the witness, "
        f"{i['without_ms_per_s']:.2f} without"
    )
    print(
        f"recorder  {r['on_us']:.1f} us per all_reduce with, {r['off_us']:.1f} us without: "
        f"{r['on_us'] - r['off_us']:.1f} us"
    )


# --- collect ------------------------------------------------------------------------------------


def collect(ranks: int, repeat: int) -> dict[str, Any]:
    """Medians over ``repeat`` restarts with and without incidents, in turns."""
    runs = [(restart(ranks, True), restart(ranks, False)) for _ in range(repeat)]
    phases = [run["phases_ms"] for run, _ in runs]
    return {
        "ranks": ranks,
        "runs": repeat,
        "with_ms": statistics.median(run["enter_ms"] for run, _ in runs),
        "without_ms": statistics.median(run["enter_ms"] for _, run in runs),
        "phase_median_ms": statistics.median(statistics.median(each) for each in phases),
        "phase_slowest_ms": statistics.median(max(each) for each in phases),
    }


def restart(ranks: int, forensics: bool) -> dict[str, Any]:
    """One job with one exception; how long until all were back."""
    with tempfile.TemporaryDirectory() as directory:
        given = {"task": "restart", "directory": directory, "forensics": forensics}
        run_workers(given, ranks)
        marks = [json.loads(path.read_text()) for path in Path(directory).glob("mark-*")]
    at = next(mark["fault"] for mark in marks if mark["fault"])
    return {
        "enter_ms": 1000 * (max(mark["entered"] for mark in marks) - at),
        "phases_ms": [mark["collect_ms"] for mark in marks],
    }


def run_workers(given: dict[str, Any], ranks: int, **env: str) -> None:
    """Run this file as ``ranks`` workers; all are gone afterwards."""
    port = free_port()
    workers = []
    for rank in range(ranks):
        environ = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "TORCH_FR_BUFFER_SIZE": str(RING),
            "TORCH_NCCL_TRACE_BUFFER_SIZE": str(RING),
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        command = [sys.executable, "-W", "ignore", __file__, "--worker", json.dumps(given)]
        workers.append(subprocess.Popen(command, env=environ | env, start_new_session=True))
    deadline = time.monotonic() + DEADLINE_S
    try:
        for worker in workers:
            if worker.wait(max(0.1, deadline - time.monotonic())) != 0:
                sys.exit("bench_forensics: a worker failed, see above")
    finally:
        for worker in workers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)


def free_port() -> int:
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


# --- idle and recorder --------------------------------------------------------------------------


def idle(repeat: int) -> dict[str, float]:
    """CPU time of one sleeping process, with a witness and without, in turns."""
    taken: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(repeat):
        for witness in (True, False):
            taken[witness].append(one_value({"task": "idle", "witness": witness}))
    return {
        "with_ms_per_s": statistics.median(taken[True]),
        "without_ms_per_s": statistics.median(taken[False]),
    }


def picture(repeat: int) -> dict[str, float]:
    """CPU milliseconds of one rank, medians."""
    taken = [json.loads(one_text({"task": "picture"})) for _ in range(repeat)]
    return {name: statistics.median(each[name] for each in taken) for name in taken[0]}


def recorder(repeat: int) -> dict[str, float]:
    """CPU time of one collective with the recorder on and off, in turns."""
    taken: dict[int, list[float]] = {RING: [], 0: []}
    for _ in range(repeat):
        for entries in (RING, 0):
            env = {"TORCH_FR_BUFFER_SIZE": str(entries)}
            env["TORCH_NCCL_TRACE_BUFFER_SIZE"] = str(entries)
            taken[entries].append(one_value({"task": "recorder"}, **env))
    return {"on_us": statistics.median(taken[RING]), "off_us": statistics.median(taken[0])}


def one_value(given: dict[str, Any], **env: str) -> float:
    return float(one_text(given, **env))


def one_text(given: dict[str, Any], **env: str) -> str:
    with tempfile.TemporaryDirectory() as directory:
        run_workers(given | {"directory": directory}, 1, **env)
        return (Path(directory) / "value").read_text()


# --- in the worker ------------------------------------------------------------------------------


def work(given: dict[str, Any]) -> None:
    directory = Path(given["directory"])
    tasks = {
        "restart": work_restart,
        "picture": work_picture,
        "idle": work_idle,
        "recorder": work_recorder,
    }
    tasks[given["task"]](given, directory)


def work_restart(given: dict[str, Any], directory: Path) -> None:
    """Fill the recorder, fail on rank 1, note when the function is entered again."""
    import torch
    import torch.distributed as dist

    from ncclops import restart as inprocess

    mark: dict[str, Any] = {"fault": None, "entered": None, "collect_ms": 0.0}
    rank = os.environ["RANK"]

    def train(call: inprocess.CallWrapper) -> None:
        if call.iteration == 1:
            mark["entered"] = time.time()
            return
        dist.init_process_group("gloo")
        for _ in range(RING + 100):
            dist.all_reduce(torch.ones(16))
        dist.barrier()
        if rank == "1":
            mark["fault"] = time.time()
            raise RuntimeError("the fault")
        dist.all_reduce(torch.ones(16))

    train.__annotations__["call"] = inprocess.CallWrapper
    incidents = str(directory / "incidents") if given["forensics"] else None

    def note(incident: inprocess.Incident) -> None:
        mark["collect_ms"] = incident.phases_ms["collect"]

    inprocess.Wrapper(incident_dir=incidents, on_incident=note)(train)()
    (directory / f"mark-{rank}").write_text(json.dumps(mark))
    sys.stdout.flush()
    os._exit(0)  # torch's threads of groups that were aborted may abort the exit, which is no news


def work_picture(_given: dict[str, Any], directory: Path) -> None:
    """Fill the recorder from a stack as deep as a trainer's, and take a picture."""
    import torch
    import torch.distributed as dist

    from ncclops.forensics.picture import Identity, Picture

    dist.init_process_group("gloo")

    def deep(levels: int) -> None:
        if levels:
            deep(levels - 1)
        else:
            dist.all_reduce(torch.ones(16))

    for _ in range(RING + 100):
        deep(20)
    picture = Picture(Identity(0, None), 0)
    marks = [time.process_time()]
    picture.take(60)
    marks.append(time.process_time())
    picture.write(directory / "rank0")
    marks.append(time.process_time())
    taken = {"take_cpu_ms": 1000 * (marks[1] - marks[0])}
    taken["write_cpu_ms"] = 1000 * (marks[2] - marks[1])
    (directory / "value").write_text(json.dumps(taken))


def work_idle(given: dict[str, Any], directory: Path) -> None:
    """Sleep, with or without a witness."""
    from ncclops.forensics import witness

    if given["witness"]:
        witness.start(0, directory)
    time.sleep(0.5)  # the start is not what is measured
    before = time.process_time()
    time.sleep(IDLE_S)
    value = 1000 * (time.process_time() - before) / IDLE_S
    (directory / "value").write_text(repr(value))


def work_recorder(_given: dict[str, Any], directory: Path) -> None:
    """Many small collectives of one rank, from a stack as deep as a trainer's."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    tensor = torch.ones(16)

    def deep(levels: int) -> None:
        if levels:
            deep(levels - 1)
        else:
            dist.all_reduce(tensor)

    for _ in range(RING):
        deep(20)
    started = time.process_time()
    for _ in range(COLLECTIVES):
        deep(20)
    value = 1e6 * (time.process_time() - started) / COLLECTIVES
    (directory / "value").write_text(repr(value))


if __name__ == "__main__":
    main()
