"""What forensics costs: a restart that collects, a worker that nothing happens to, a collective.

    python scripts/bench_forensics.py [--ranks 8] [--repeat 7] [--only collect ...] [--json]

Four measurements, each with its counterpart without forensics, in turns in the same run; what they
show is printed as they go. Medians.

collect   ``--ranks`` Gloo ranks whose recorder is full (the profiles' 2,000 entries); one raises.
          From the fault until the last rank is back in the function, and until the last has
          finished the first all_reduce of its new group, with incidents and without. The processes
          are the same for both. What collecting costs is the median of the pairs' differences.
snapshot   CPU time of one rank for its snapshot, cold as at a fault: what is taken before the abort
          (``now``), and what is left for after the restart (``later``). Unlike `collect` it does
          not depend on how many cores there are for the ranks, and how busy they are.
idle      CPU time of a worker that sleeps, with the snapshot server and without, in ms per second.
recorder  microseconds of CPU per ``all_reduce`` on one Gloo rank, with the recorder on and off.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

RING = 2000  # profiles/base.toml
DEADLINE_S = 240
IDLE_S = 4.0
# After each restart, for what is left for later: it would run into the next one otherwise.
SETTLE_S = 2.0
COLLECTIVES = 5000
WHAT = ("collect", "picture", "idle", "recorder")


def main() -> None:
    """Measure, print a line each, or with ``--json`` one document."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=7, help="pairs of restarts")
    parser.add_argument("--only", nargs="+", choices=WHAT, default=WHAT)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(json.loads(options.worker))
        return
    measures: dict[str, Callable[[], dict[str, Any]]] = {
        "collect": lambda: collect(options.ranks, options.repeat),
        "picture": lambda: snapshot(3),
        "idle": lambda: idle(2),
        "recorder": lambda: recorder(3),
    }
    results = {}
    for name in options.only:
        results[name] = measures[name]()
        if not options.json:
            print(f"{name:9} {SHOW[name](results[name])}", flush=True)
    if options.json:
        print(json.dumps(results, indent=1))


def show_collect(c: dict[str, Any]) -> str:
    return (
        f"{c['ranks']} ranks, {RING} entries each, {c['runs']} pairs: "
        f"back in the function after {c['entered_ms_on']:.0f} ms with incidents and "
        f"{c['entered_ms_off']:.0f} ms without, which costs {c['entered_ms_costs']:.0f} ms; "
        f"first all_reduce after {c['reduced_ms_on']:.0f} and {c['reduced_ms_off']:.0f} ms: "
        f"{c['reduced_ms_costs']:.0f} ms; the phase took {c['phase_median_ms']:.1f} ms "
        f"(slowest rank {c['phase_slowest_ms']:.1f} ms)"
    )


def show_picture(p: dict[str, Any]) -> str:
    return (
        f"{p['now_ms']:.1f} ms of CPU before the abort, {p['later_ms']:.1f} ms after the restart "
        f"(a snapshot all at once: {p['at_once_ms']:.1f} ms)"
    )


def show_idle(i: dict[str, Any]) -> str:
    return (
        f"{i['with_ms_per_s']:.3f} ms of CPU per second with the snapshot server, "
        f"{i['without_ms_per_s']:.3f} without"
    )


def show_recorder(r: dict[str, Any]) -> str:
    difference = r["on_us"] - r["off_us"]
    return (
        f"{r['on_us']:.1f} us per all_reduce with, {r['off_us']:.1f} us without: {difference:.1f}"
    )


SHOW: dict[str, Callable[[dict[str, Any]], str]] = {
    "collect": show_collect,
    "picture": show_picture,
    "idle": show_idle,
    "recorder": show_recorder,
}


# --- collect ------------------------------------------------------------------------------------


def collect(ranks: int, repeat: int) -> dict[str, Any]:
    """One job, ``repeat`` faults with incidents and as many without, in turns; a line a pair."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        given = {"task": "restart", "directory": folder, "repeat": repeat}
        pairs: list[dict[str, dict[str, Any]]] = []

        def tell() -> None:
            while len(pairs) < repeat and (pair := read_pair(directory, len(pairs), ranks)):
                pairs.append(pair)
                print(f"  {len(pairs):2} {said(pair, 'on')} | {said(pair, 'off')}", file=sys.stderr)

        run_workers(given, ranks, tell)
    if len(pairs) < repeat:
        sys.exit("bench_forensics: the ranks have not noted all restarts")
    of = {mode: [pair[mode] for pair in pairs] for mode in ("on", "off")}
    times = {
        f"{what}_{mode}": statistics.median(run[what] for run in runs)
        for mode, runs in of.items()
        for what in ("entered_ms", "reduced_ms")
    }
    costs = {
        f"{what}_costs": statistics.median(pair["on"][what] - pair["off"][what] for pair in pairs)
        for what in ("entered_ms", "reduced_ms")
    }
    phases = [run["collect_ms"] for run in of["on"]]
    return {
        "ranks": ranks,
        "runs": repeat,
        **times,
        **costs,
        "phase_median_ms": statistics.median(statistics.median(each) for each in phases),
        "phase_slowest_ms": statistics.median(max(each) for each in phases),
    }


def read_pair(directory: Path, number: int, ranks: int) -> dict[str, dict[str, Any]] | None:
    """A restart with incidents (``on``) and one without; None until all ranks have noted both."""
    pair = {}
    for mode in ("on", "off"):
        paths = list(directory.glob(f"mark-{number}-{mode}-*.json"))
        if len(paths) < ranks:
            return None
        marks = [json.loads(path.read_text()) for path in paths]
        at = next(mark["fault"] for mark in marks if mark["fault"])
        pair[mode] = {
            "entered_ms": 1000 * (max(mark["entered"] for mark in marks) - at),
            "reduced_ms": 1000 * (max(mark["reduced"] for mark in marks) - at),
            "collect_ms": [mark["collect_ms"] for mark in marks],
        }
    return pair


def said(pair: dict[str, dict[str, Any]], mode: str) -> str:
    """A restart in words."""
    run, name = pair[mode], "with" if mode == "on" else "without"
    return f"{name}: back {run['entered_ms']:4.0f} ms, all_reduce {run['reduced_ms']:4.0f} ms"


def run_workers(
    given: dict[str, Any], ranks: int, tell: Callable[[], None] | None = None, /, **env: str
) -> None:
    """Run this file as ``ranks`` workers; all are gone afterwards. ``tell`` is called meanwhile."""
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
            wait(worker, deadline, tell or (lambda: None))
            if worker.returncode != 0:
                sys.exit("bench_forensics: a worker failed, see above")
    finally:
        for worker in workers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)


def wait(worker: subprocess.Popen[bytes], deadline: float, tell: Callable[[], None]) -> None:
    """For the end of ``worker``, with ``tell`` called now and then and at the end."""
    while time.monotonic() < deadline:
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.wait(1)
            break
        tell()
    else:
        sys.exit(f"bench_forensics: the workers are not done after {DEADLINE_S} s")
    tell()


def free_port() -> int:
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


# --- idle and recorder --------------------------------------------------------------------------


def idle(repeat: int) -> dict[str, float]:
    """CPU time of one sleeping process, with a snapshot server and without, in turns."""
    taken: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(repeat):
        for server in (True, False):
            taken[server].append(one_value({"task": "idle", "server": server}))
    return {
        "with_ms_per_s": statistics.median(taken[True]),
        "without_ms_per_s": statistics.median(taken[False]),
    }


def snapshot(repeat: int) -> dict[str, float]:
    """CPU milliseconds of one rank."""
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
    sys.stdout.flush()
    os._exit(0)  # torch's threads may abort the exit of a process with groups, which is no news


def work_restart(given: dict[str, Any], directory: Path) -> None:
    """Restart after restart, with incidents and without in turns; each rank notes its times."""
    for number in range(given["repeat"]):
        for mode in ("on", "off") if number % 2 else ("off", "on"):
            incidents = directory / f"pictures-{number}" if mode == "on" else None
            mark = one_restart(incidents)
            draft = directory / f".{number}-{mode}-{os.environ['RANK']}"
            draft.write_text(json.dumps(mark))
            draft.replace(directory / f"mark-{number}-{mode}-{os.environ['RANK']}.json")


def one_restart(incidents: Path | None) -> dict[str, Any]:
    """Fill the recorder, fail on rank 1; when was the function entered again, and all_reduce done?

    The recorder is filled by a group of this rank alone, which is quick.
    """
    import torch
    import torch.distributed as dist

    from ncclops import capture
    from ncclops import restart as inprocess

    capture.install()  # takes snapshots where there is an incident_dir
    mark: dict[str, Any] = {"fault": None, "entered": None, "reduced": None, "collect_ms": 0.0}

    def train(call: inprocess.CallWrapper) -> None:
        if call.iteration == 1:
            mark["entered"] = time.time()
            dist.init_process_group("gloo")
            dist.all_reduce(torch.ones(16))
            mark["reduced"] = time.time()
            dist.barrier()
            time.sleep(SETTLE_S)
            return
        dist.init_process_group("gloo")
        own, _ = dist.new_subgroups(1)
        for _ in range(RING + 100):
            deep(20, torch.ones(16), own)
        for _ in range(20):
            deep(20, torch.ones(16))
        dist.barrier()
        if os.environ["RANK"] == "1":
            mark["fault"] = time.time()
            raise RuntimeError("the fault")
        dist.all_reduce(torch.ones(16))

    train.__annotations__["call"] = inprocess.CallWrapper

    def note(incident: inprocess.Incident) -> None:
        mark["collect_ms"] = incident.phases_ms["collect"]

    where = None if incidents is None else str(incidents)
    inprocess.Wrapper(incident_dir=where, on_incident=note)(train)()
    dist.destroy_process_group()
    return mark


def deep(levels: int, tensor: Any, group: Any = None) -> None:
    """A collective from a stack as deep as a trainer's."""
    import torch.distributed as dist

    if levels:
        deep(levels - 1, tensor, group)
    else:
        dist.all_reduce(tensor, group=group)


def work_picture(_given: dict[str, Any], directory: Path) -> None:
    """Fill the recorder from a stack as deep as a trainer's; a snapshot in parts, and at once."""
    import torch
    import torch.distributed as dist

    from ncclops.capture.rank_snapshot import Identity, RankSnapshot

    dist.init_process_group("gloo")
    for _ in range(RING + 100):
        deep(20, torch.ones(16))
    snapshot = RankSnapshot(Identity(0, None), 0)
    marks = [time.process_time()]
    snapshot.take_before_abort(60)
    marks.append(time.process_time())
    snapshot.take_rest(60)
    snapshot.write(directory / "rank0")
    marks.append(time.process_time())
    RankSnapshot(Identity(0, None), 0).take(60)
    marks.append(time.process_time())
    names = ("now_ms", "later_ms", "at_once_ms")
    taken = {name: 1000 * (b - a) for name, a, b in zip(names, marks, marks[1:], strict=False)}
    (directory / "value").write_text(json.dumps(taken))


def work_idle(given: dict[str, Any], directory: Path) -> None:
    """Sleep, with or without a snapshot server."""
    from ncclops.capture import snapshot_server

    if given["server"]:
        snapshot_server.start(0, directory)
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
    for _ in range(RING):
        deep(20, tensor)
    started = time.process_time()
    for _ in range(COLLECTIVES):
        deep(20, tensor)
    value = 1e6 * (time.process_time() - started) / COLLECTIVES
    (directory / "value").write_text(repr(value))


if __name__ == "__main__":
    main()
