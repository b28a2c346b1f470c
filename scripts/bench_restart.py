"""Restart latency and cost, ncclops and nvidia-resiliency-ext (NVRx) side by side.

    python scripts/bench_restart.py [--worlds 2 4] [--repeat 3] [--peer-python PYTHON]

``--peer-python`` is an interpreter that can import ``nvidia_resiliency_ext`` and the same torch;
without it only ncclops is measured. Every rank runs the same function on Gloo with one OpenMP
thread; only the import of the wrapper and its parameters differ. For each fault:

* ``enter``: from the fault until the *last* surviving rank is back in the function;
* ``reduce``: until the first ``all_reduce`` after it is complete there.

and per run: ``start``, from the call of the wrapped function until the last rank is in it, the
CPU time of a rank and the memory (proportional set size) of the processes that the wrapper adds
to it; with ncclops, rank 0's include the store's server.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Optional

FAULTS = ("exception", "kill", "blocked")
STEADY_S = 3.0
DEADLINE_S = 120.0
PEERS = ("ncclops", "nvrx-default", "nvrx-best")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--faults", choices=FAULTS, nargs="+", default=list(FAULTS))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--peer-python")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(json.loads(arguments.worker))
        return
    peers = PEERS if arguments.peer_python else PEERS[:1]
    rows = []
    for world in arguments.worlds:
        for fault in arguments.faults:
            for peer in peers:
                python = sys.executable if peer == "ncclops" else arguments.peer_python
                row = measure(python, peer, world, fault, arguments.repeat)
                rows.append(row)
                show(row, rows)
    if arguments.json:
        print(json.dumps(rows, indent=1))


def measure(python: str, peer: str, world: int, fault: str, repeat: int) -> dict[str, Any]:
    """Medians over ``repeat`` runs, in milliseconds (``start`` included) and MiB."""
    runs = [run(python, peer, world, fault) for _ in range(repeat)]
    done = [r for r in runs if r is not None]
    row: dict[str, Any] = {"world": world, "fault": fault, "peer": peer, "runs": len(done)}
    for key in ("start", "enter", "reduce", "cpu_ms_per_s", "helper_mib"):
        values = [r[key] for r in done if r.get(key) is not None]
        row[key] = round(statistics.median(values), 1) if values else None
    return row


def show(row: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """One line, with the ratio to ncclops in the same run."""
    ours = next(
        r
        for r in rows
        if r["peer"] == "ncclops" and (r["world"], r["fault"]) == (row["world"], row["fault"])
    )
    ratio = ""
    if row is not ours and row["enter"] and ours["enter"]:
        ratio = f"  = {row['enter'] / ours['enter']:.1f} x ncclops"
    print(
        f"world {row['world']:>2}  {row['fault']:<9}  {row['peer']:<12}  start {row['start']} ms  "
        f"enter {row['enter']} ms  reduce {row['reduce']} ms  "
        f"cpu {row['cpu_ms_per_s']} ms/s/rank  helper {row['helper_mib']} MiB/rank{ratio}",
        flush=True,
    )


def run(python: str, peer: str, world: int, fault: str) -> dict[str, Any] | None:
    """One job with one fault; ``None`` when it did not come back."""
    with tempfile.TemporaryDirectory() as directory, rendezvous_server() as rendezvous:
        given = {"peer": peer, "fault": fault, "directory": directory, "rendezvous": rendezvous}
        command = [python, "-W", "ignore", __file__, "--worker", json.dumps(given)]
        port = free_port()
        workers = [
            subprocess.Popen(
                command,
                env={**os.environ, **environment(rank, world, port)},
                stdout=subprocess.DEVNULL,
                stderr=(Path(directory) / f"stderr-{rank}").open("w"),
                start_new_session=True,
            )
            for rank in range(world)
        ]
        try:
            return collect(Path(directory), world, fault)
        finally:
            end(workers, port)


def collect(directory: Path, world: int, fault: str) -> dict[str, Any] | None:
    """Wait for the job's marks and turn them into durations."""
    survivors = [r for r in range(world) if fault == "exception" or r != 1]
    if not wait_for_marks(directory, [f"reduced-1-{r}" for r in survivors]):
        return None
    start = max(mark(directory, f"entered-0-{r}") for r in range(world))
    began = max(mark(directory, f"called-{r}") for r in range(world))
    at = mark(directory, "fault")
    enter = max(mark(directory, f"entered-1-{r}") for r in survivors)
    reduce = max(mark(directory, f"reduced-1-{r}") for r in survivors)
    costs = [json.loads((directory / f"cost-{r}").read_text()) for r in survivors]
    return {
        "start": 1000 * (start - began),
        "enter": 1000 * (enter - at),
        "reduce": 1000 * (reduce - at),
        "cpu_ms_per_s": statistics.mean(c["cpu_ms_per_s"] for c in costs),
        "helper_mib": statistics.mean(c["helper_mib"] for c in costs),
    }


def wait_for_marks(directory: Path, names: list[str]) -> bool:
    deadline = time.monotonic() + DEADLINE_S
    while not all((directory / name).exists() for name in names):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)  # files of other processes announce nothing
    return True


def end(workers: list[subprocess.Popen[bytes]], port: int) -> None:
    """Leave nothing behind, whatever state the job is in."""
    for worker in workers:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()
    tag = f"MASTER_PORT={port}".encode()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and tag in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)


def environment(rank: int, world: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "BENCH_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "error",
    }


@contextlib.contextmanager
def rendezvous_server() -> Any:
    """A TCPStore for the process groups of the function, so that both peers use the same."""
    import torch.distributed as dist

    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    yield server.port
    del server


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def mark(directory: Path, name: str) -> float:
    return float((directory / name).read_text())


# --- in the worker ----------------------------------------------------------------------------


def work(given: dict[str, Any]) -> None:
    """One rank: enter, reduce, be idle for a while, fault, and the same again."""
    import torch
    import torch.distributed as dist

    inprocess, parameters = peer_of(given["peer"])
    rank, directory = int(os.environ["RANK"]), Path(given["directory"])

    def note(name: str) -> None:
        draft = directory / f".{name}-{rank}"
        draft.write_text(repr(time.time()))
        draft.rename(directory / name)

    def function(call: Any = None) -> None:
        note(f"entered-{call.iteration}-{rank}")
        store = dist.TCPStore("127.0.0.1", given["rendezvous"], None, False, wait_for_workers=False)
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(str(call.iteration), store),
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=timedelta(seconds=20),
        )
        dist.all_reduce(torch.ones(1))
        note(f"reduced-{call.iteration}-{rank}")
        if call.iteration == 0:
            be_idle_then_fault(rank)
        time.sleep(600)

    def be_idle_then_fault(rank: int) -> None:
        before = cpu_s()
        time.sleep(STEADY_S)
        cost = {"cpu_ms_per_s": 1000 * (cpu_s() - before) / STEADY_S, "helper_mib": helper_mib()}
        (directory / f"cost-{rank}").write_text(json.dumps(cost))
        dist.barrier()
        if rank == 1:
            time.sleep(0.5)
            note("fault")
            if given["fault"] == "exception":
                raise ValueError("the fault")
            os.kill(os.getpid(), signal.SIGKILL)
        if given["fault"] == "blocked":
            dist.all_reduce(torch.ones(1))
        while True:
            time.sleep(0.005)

    function.__annotations__["call"] = Optional[inprocess.CallWrapper]  # noqa: UP045 - NVRx looks for it
    note(f"called-{rank}")
    inprocess.Wrapper(**parameters)(function)()


def peer_of(peer: str) -> tuple[Any, dict[str, Any]]:
    """The module and the parameters of the wrapper."""
    if peer == "ncclops":
        from ncclops import restart

        return restart, {}
    import nvidia_resiliency_ext.inprocess as nvrx

    if peer == "nvrx-default":
        return nvrx, {}
    interval = timedelta(milliseconds=10)
    return nvrx, {
        "monitor_thread_interval": interval,
        "monitor_process_interval": interval,
        "progress_watchdog_interval": interval,
        "heartbeat_interval": timedelta(milliseconds=100),
        "last_call_wait": timedelta(0),
    }


def helpers() -> list[int]:
    """The processes that the wrapper has started for this rank: they share its environment."""
    mine = {f"{name}={os.environ[name]}".encode() for name in ("MASTER_PORT", "BENCH_RANK")}
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            other = entry.name.isdigit() and int(entry.name) != os.getpid()
            if other and mine <= set((entry / "environ").read_bytes().split(b"\0")):
                found.append(int(entry.name))
    return found


def cpu_s() -> float:
    """CPU seconds of this process and its helpers so far."""
    tick = os.sysconf("SC_CLK_TCK")
    total = 0
    for pid in [os.getpid(), *helpers()]:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / tick


def helper_mib() -> float:
    """Memory of the helpers, shared pages divided among those that share them."""
    total_kib = 0
    for pid in helpers():
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total_kib += int(line.split()[1])
    return total_kib / 1024


if __name__ == "__main__":
    main()
