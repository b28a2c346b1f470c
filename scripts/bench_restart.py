"""Restart latency and cost: ncclops, nvidia-resiliency-ext (NVRx) and torchrun side by side.

    python scripts/bench_restart.py [--worlds 2 4] [--repeat 3] [--peer-python PYTHON]
    python scripts/bench_restart.py --costs [--worlds 4]
    scripts/fake_gpu python scripts/bench_restart.py --backend nccl [--worlds 2 4 8]

``--peer-python`` is an interpreter that can import ``nvidia_resiliency_ext`` and the same torch;
without it the peer is torchrun alone. Every rank runs the same function with one OpenMP
thread (``bench_restart_worker.py``); only the wrapper and its parameters differ. Peers take turns
within each repetition. For each fault:

* ``enter``: from the fault until the *last* surviving rank is back in the function;
* ``reduce``: until the first ``all_reduce`` after it is complete there.

With torchrun every rank is a survivor, as its agent starts all of them again.

With ``--backend nccl`` there is one peer more, ``no-wrapper``: the ranks know of the fault at once,
and only abort with torch's own function (until then it is ``enter``), make the group again, and
reduce. It is the part of the other rows that is torch's and NCCL's. Wrappers run with the
environment ``IN_PROCESS``, the same for all. In ``hang`` a rank sleeps in C while the others wait
for it in a collective; all wrappers have the timeouts ``HANG`` of the worker then.

``--costs`` measures ``start`` (all ranks call the wrapped function at the same moment; until the
last one is in it), the CPU time and the memory (proportional set size) of what the wrapper adds
to a rank, and the operations on its store per rank: in a second without a fault, and from the
last moments before a fault until all ranks are back. Rank 0's memory includes ncclops' store
server.
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
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench_restart_proxy import CountingProxy

FAULTS = ("exception", "kill", "kill0", "blocked", "hang")
FAULTS_OF = {"gloo": FAULTS[:4], "nccl": ("exception", "kill", "hang")}
# What any restart within the process needs of ProcessGroupNCCL: that its watchdog ends no process,
# and sleeps for no dump.
IN_PROCESS = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
}
WORKER = str(Path(__file__).with_name("bench_restart_worker.py"))
IDLE_S = 5.0
# A restart that takes longer is reported as none.
DEADLINE_S = 60.0


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--backend", choices=sorted(FAULTS_OF), default="gloo")
    parser.add_argument("--faults", choices=FAULTS, nargs="+", help="all that suit the backend")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3, help="exceptions in each job")
    parser.add_argument("--peer-python", help="an interpreter with NVRx")
    parser.add_argument("--best-ms", type=float, nargs="+", default=[10], help="NVRx's intervals")
    parser.add_argument("--without", nargs="+", default=[], help="peers to leave out")
    parser.add_argument("--costs", action="store_true")
    parser.add_argument("--json", help="append the rows to this file")
    arguments = parser.parse_args()
    if arguments.costs and arguments.backend == "nccl":
        parser.error("--costs is measured on Gloo alone: leave out --backend nccl")
    if arguments.backend == "nccl" and not gpus():
        parser.error("no GPU that torch can use: scripts/fake_gpu has some")
    peers = ["ncclops"]
    peers += ["no-wrapper"] if arguments.backend == "nccl" else []
    if arguments.peer_python:
        peers += ["nvrx-default", *(f"nvrx-best-{ms:g}ms" for ms in arguments.best_ms)]
    peers += [] if arguments.costs else ["torchrun"]
    bench = Bench(arguments, [p for p in peers if p not in arguments.without])
    with contextlib.closing(bench):
        for world in arguments.worlds:
            if arguments.costs:
                bench.show(bench.costs(world), COST_COLUMNS)
            else:
                for fault in arguments.faults or FAULTS_OF[arguments.backend]:
                    bench.show(bench.latencies(world, fault), LATENCY_COLUMNS)


LATENCY_COLUMNS = ("enter", "reduce")
COST_COLUMNS = ("start", "cpu_ms_per_s", "helper_mib", "ops_per_s", "ops_per_restart")


class Bench:
    """One run of the script."""

    def __init__(self, arguments: argparse.Namespace, peers: list[str]) -> None:
        self.arguments = arguments
        self.peers = peers
        self._zygotes: dict[str, subprocess.Popen[str]] = {}
        self._spawned: list[subprocess.Popen[bytes]] = []

    def close(self) -> None:
        """End the zygotes."""
        processes: list[subprocess.Popen[Any]] = [*self._zygotes.values(), *self._spawned]
        for process in processes:
            process.kill()
            process.wait()

    def python_of(self, peer: str) -> str:
        return self.arguments.peer_python if peer.startswith("nvrx") else sys.executable

    def latencies(self, world: int, fault: str) -> list[dict[str, Any]]:
        """A row per peer, in milliseconds."""
        found: dict[str, list[dict[str, float]]] = {peer: [] for peer in self.peers}
        lost: set[str] = set()
        for _ in range(self.arguments.repeat):
            for peer in (p for p in self.peers if p not in lost):
                samples = self.latency(peer, world, fault)
                found[peer] += samples
                if not samples:
                    lost.add(peer)  # once is enough: it costs a minute
        keys = {"world": world, "fault": fault}
        return [
            {**keys, "peer": peer, "samples": len(samples), **medians(samples, LATENCY_COLUMNS)}
            for peer, samples in found.items()
        ]

    def latency(self, peer: str, world: int, fault: str) -> list[dict[str, float]]:
        """The faults of one job; empty when the job did not survive."""
        several = fault == "exception" and peer != "torchrun"
        rounds = self.arguments.rounds if several else 1
        with self.job(peer, world, fault, rounds) as job:
            return [found for k in range(rounds) if (found := job.restart(k)) is not None]

    def costs(self, world: int) -> list[dict[str, Any]]:
        """A row per peer."""
        found: dict[str, list[dict[str, float]]] = {peer: [] for peer in self.peers}
        for _ in range(self.arguments.repeat):
            for peer in self.peers:
                found[peer].append(self.cost(peer, world))
        return [
            {"world": world, "peer": peer, "samples": len(s), **medians(s, COST_COLUMNS)}
            for peer, s in found.items()
        ]

    def cost(self, peer: str, world: int) -> dict[str, float]:
        """One job of processes of their own, and one with a proxy before the store."""
        with self.job(peer, world, "exception", 0, idle_s=IDLE_S, zygote=False) as job:
            job.wait_for([f"cost-{rank}" for rank in range(world)])
            each = [json.loads(job.read(f"cost-{rank}")) for rank in range(world)]
            start = job.latest("entered-0") - min(job.mark(f"called-{r}") for r in range(world))
        cost = {"start": 1000 * start}
        for key in ("cpu_ms_per_s", "helper_mib"):
            cost[key] = statistics.mean(rank[key] for rank in each)
        return cost | self.operations(peer, world)

    def operations(self, peer: str, world: int) -> dict[str, float]:
        """On the wrapper's store, per rank: in a second without faults, and for a restart."""
        with (
            counting_store() as (proxy, port),
            self.job(peer, world, "exception", 1, idle_s=2 * IDLE_S, port=port) as job,
        ):
            job.wait_for([f"idle-{rank}" for rank in range(world)])
            time.sleep(1)  # what the start has to say is said by then
            before, began = proxy.total(), time.monotonic()
            time.sleep(IDLE_S)
            rate = (proxy.total() - before) / (time.monotonic() - began)
            job.wait_for([f"cost-{rank}" for rank in range(world)])
            before = proxy.total()
            job.restart(0)
            during = proxy.total() - before
        return {"ops_per_s": rate / world, "ops_per_restart": during / world}

    @contextlib.contextmanager
    def job(
        self,
        peer: str,
        world: int,
        fault: str,
        rounds: int,
        *,
        idle_s: float = 0,
        zygote: bool = True,
        port: int | None = None,
    ) -> Iterator[Job]:
        """A job, all ranks of which have been released."""
        with tempfile.TemporaryDirectory() as name, rendezvous_server() as rendezvous:
            given = {
                "peer": peer,
                "backend": self.arguments.backend,
                "fault": fault,
                "directory": name,
                "rendezvous": rendezvous,
                "rounds": rounds,
                "ranks": world,
                "idle_s": idle_s,
            }
            job = Job(Path(name), peer, world, fault)
            try:
                if peer == "torchrun":
                    job.start_torchrun(given)
                else:
                    port = port or free_port()
                    spawn = self._fork if zygote else self._spawn
                    settings = IN_PROCESS if self.arguments.backend == "nccl" else {}
                    for rank in range(world):
                        env = environment(rank, world, port, job.tag) | settings
                        job.pids.append(spawn(peer, env, given))
                    job.wait_for([f"ready-{rank}" for rank in range(world)])
                (Path(name) / "go").touch()
                yield job
            finally:
                job.end()

    def _fork(self, peer: str, env: dict[str, str], given: dict[str, Any]) -> int:
        zygote = self._zygotes.get(peer)
        if zygote is None:
            zygote = self._zygotes[peer] = subprocess.Popen(
                [self.python_of(peer), "-W", "ignore", WORKER, "zygote", peer],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "error"},
            )
            assert zygote.stdout is not None
            zygote.stdout.readline()
        assert zygote.stdin is not None
        assert zygote.stdout is not None
        zygote.stdin.write(json.dumps({"env": env, "given": given}) + "\n")
        zygote.stdin.flush()
        return int(zygote.stdout.readline())

    def _spawn(self, peer: str, env: dict[str, str], given: dict[str, Any]) -> int:
        process = subprocess.Popen(
            [self.python_of(peer), "-W", "ignore", WORKER, "rank", json.dumps(given)],
            env={**os.environ, **env},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._spawned.append(process)
        return process.pid

    def show(self, rows: list[dict[str, Any]], columns: tuple[str, ...]) -> None:
        """A line per peer, with its ratios to ncclops in the same run."""
        ours = rows[0]
        for row in rows:
            cells = [f"world {row['world']:>2}", f"{row.get('fault', 'costs'):<9}"]
            cells.append(f"{row['peer']:<14}")
            for column in columns:
                cells.append(f"{column} {show_number(row[column]):>7}{ratio(row, ours, column)}")
            print("  ".join(cells), f" n={row['samples']}", flush=True)
        if self.arguments.json:
            with Path(self.arguments.json).open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)


class Job:
    """The ranks of one job and the marks that they leave."""

    def __init__(self, directory: Path, peer: str, world: int, fault: str) -> None:
        self.directory = directory
        self.tag = uuid.uuid4().hex
        self.pids: list[int] = []
        self._peer = peer
        self._world = world
        self._fault = fault

    def start_torchrun(self, given: dict[str, Any]) -> None:
        """One agent, which restarts once."""
        subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                *("--nproc-per-node", str(self._world), "--max-restarts", "1"),
                *("--monitor-interval", "0.1", WORKER, "rank", json.dumps(given)),
            ],
            env={**os.environ, "OMP_NUM_THREADS": "1", "BENCH_JOB": self.tag},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def restart(self, number: int) -> dict[str, float] | None:
        """Milliseconds of one restart; ``None`` when it did not come about."""
        back = self.survivors()
        if not self.wait_for([f"reduced-{number + 1}-{rank}" for rank in back], give_up=True):
            return None
        victim = 0 if self._fault == "kill0" else 1
        at = self.mark(f"fault-{number}-{victim}")
        latest = {
            name: max(self.mark(f"{name}-{number + 1}-{rank}") for rank in back)
            for name in ("entered", "reduced")
        }
        return {
            "enter": 1000 * (latest["entered"] - at),
            "reduce": 1000 * (latest["reduced"] - at),
        }

    def survivors(self) -> list[int]:
        """Initial ranks that come back."""
        everybody = list(range(self._world))
        if self._peer == "torchrun" or self._fault == "exception":
            return everybody
        return [rank for rank in everybody if rank != (0 if self._fault == "kill0" else 1)]

    def wait_for(self, names: list[str], *, give_up: bool = False) -> bool:
        """Until the marks are there. ``give_up``: they may not come, which is an answer."""
        deadline = time.monotonic() + DEADLINE_S
        while not all((self.directory / name).exists() for name in names):
            if time.monotonic() > deadline or (give_up and not self.processes()):
                if give_up:
                    return False
                raise TimeoutError(f"{self._peer}: no {names} in {self.directory}")
            time.sleep(0.05)  # files of other processes announce nothing
        return True

    def latest(self, name: str) -> float:
        return max(self.mark(f"{name}-{rank}") for rank in range(self._world))

    def mark(self, name: str) -> float:
        return float(self.read(name))

    def read(self, name: str) -> str:
        return (self.directory / name).read_text()

    def processes(self) -> list[int]:
        """Everything that descends from this job: known, or with its tag in the environment."""
        tag = f"BENCH_JOB={self.tag}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if not entry.name.isdigit() or "Z" in (entry / "stat").read_text().split()[2]:
                    continue
                if int(entry.name) in self.pids or tag in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
        return found

    def end(self) -> None:
        """Leave nothing behind, whatever state the job is in."""
        deadline = time.monotonic() + DEADLINE_S
        while (left := self.processes()) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)  # they are not our children


def medians(samples: list[dict[str, float]], columns: tuple[str, ...]) -> dict[str, float | None]:
    return {
        column: round(statistics.median(s[column] for s in samples), 2) if samples else None
        for column in columns
    }


def show_number(value: float | None) -> str:
    return "none" if value is None else f"{value:.1f}"


def ratio(row: dict[str, Any], ours: dict[str, Any], column: str) -> str:
    """In words, unless it is our own row."""
    if row is ours:
        return ""
    if row[column] is None or ours[column] is None:
        return " (-)"
    return f" ({row[column] / ours[column]:.2g}x)" if ours[column] else " (ours: 0)"


@contextlib.contextmanager
def counting_store() -> Iterator[tuple[CountingProxy, int]]:
    """A TCPStore behind a counting proxy, and the port to reach it; peers use what is there."""
    with rendezvous_server() as target:
        port = free_port()
        with contextlib.closing(CountingProxy(port, target)) as proxy:
            yield proxy, port


@contextlib.contextmanager
def rendezvous_server() -> Iterator[int]:
    """A TCPStore for the process groups of the function, so that all peers use the same."""
    import torch.distributed as dist

    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    yield server.port
    del server


def gpus() -> int:
    """That torch sees."""
    import torch

    return int(torch.cuda.device_count())


def environment(rank: int, world: int, port: int, tag: str) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "BENCH_RANK": str(rank),
        "BENCH_JOB": tag,
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "error",
    }


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


if __name__ == "__main__":
    main()
