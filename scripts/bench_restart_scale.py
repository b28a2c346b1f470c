"""The control plane of a restart at scale: fault, barrier and rank assignment over one TCPStore.

    python scripts/bench_restart_scale.py --ranks 1024 4096 16384 [--peer-python PYTHON]

A process stands for ``--per-process`` hosts of eight ranks. The code that runs is that of the
wrappers, and a host's ranks share what they share in a job: each of them has a connection for its
main thread and one for its monitor thread, ``direct``ly to the store or to the relay of its host
(``relay``: a real one, over a Unix socket, that runs in threads of the process). One thread does
what the ranks of a host do, phase by phase, and in each phase rank by rank: so their additions
never coincide, of which the relay would make one. In every round one rank is lost; measured is the
time from the release of all ranks until the last one knows its new number, and of the store's
server: the CPU time, the bytes that it read and wrote, its connections, and the requests that it
got. All ranks of a job share the server, and no noise of the machine gets into what it does; the
time is mostly that of so many ranks on so few cores.

``--all-fail``: as in a collective, every other rank reports an exception with 8 KB of traceback
(ncclops alone: the other wrapper records no tracebacks).

* ncclops: what the restart does between the end of the function and "assign", without the abort:
  ``wait_for_outcome``, ``Ledger.arrive``, ``wait_for_agreement``, and the placement; the rank that
  completes the barrier plans for all.
* NVRx, by the order of operations in its guide, with its public classes: ``iteration_barrier``
  (which a monitor enters for the lost rank), the set of terminated ranks read from the store, and
  ``rank_assignment(RankAssignmentCtx(...))`` on every rank.

``--assignment shift`` is both wrappers' default; ``tree`` has hosts of eight ranks with reserves,
for which every rank's key has to be known.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import math
import mmap
import os
import resource
import select
import signal
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import psutil

OURS, THEIRS = "ncclops.restart", "nvidia_resiliency_ext.inprocess"
TIMEOUT = timedelta(seconds=300)
RANKS_OF_A_HOST = 8
WAYS = ("direct", "relay")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--assignment", choices=("shift", "tree"), nargs="+", default=["shift"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--per-process", type=int, default=128, help="hosts in a process")
    parser.add_argument("--ways", choices=WAYS, nargs="+", default=list(WAYS), help="to the store")
    parser.add_argument("--all-fail", action="store_true")
    parser.add_argument("--peer-python", help="an interpreter with NVRx")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(json.loads(arguments.worker))
        return
    for ranks in arguments.ranks:
        for assignment in arguments.assignment:
            given = {
                "ranks": ranks,
                "assignment": assignment,
                "rounds": arguments.rounds,
                "per_process": arguments.per_process,
                "all_fail": arguments.all_fail,
            }
            for way in arguments.ways:
                found = measure("ncclops", sys.executable, {**given, "way": way})
                print(f"{ranks:>6} ranks  {assignment:<5}  {way:<6}  {found}", flush=True)
            if arguments.peer_python:
                found = measure("nvrx", arguments.peer_python, {**given, "way": "direct"})
                print(f"{ranks:>6} ranks  {assignment:<5}  nvrx    {found}", flush=True)


@dataclass
class Rounds:
    """Of each round: seconds until the last rank is through, and what the server had to do."""

    connections: int
    rounds: list[dict[str, float]]

    def __str__(self) -> str:
        def median(name: str) -> float:
            return statistics.median(each[name] for each in self.rounds)

        each = " ".join(f"{1000 * round_['wall_s']:.0f}" for round_ in self.rounds)
        return (
            f"{1000 * median('wall_s'):>7.0f} ms ({each})  "
            f"server: {1000 * median('cpu_s'):>6.1f} ms, "
            f"{median('read') / 1e6:.2f} MB in, {median('written') / 1e6:.2f} MB out, "
            f"{median('requests'):.0f} requests, {self.connections} connections"
        )


def measure(peer: str, python: str, given: dict[str, Any]) -> Rounds | str:
    """The rounds of one setting; or why they cannot be had."""
    server = subprocess.Popen(
        [sys.executable, "-m", "ncclops.restart.store_server", "0"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    port = int(server.stdout.readline().rpartition(":")[2])
    given = {**given, "peer": peer, "port": port}
    _, most = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
    if given["way"] == "direct" and most < 2 * given["ranks"]:
        server.kill()
        server.wait()
        return f"not run: {2 * given['ranks']} connections, and a process may have {most}"
    worker = subprocess.Popen(
        [python, "-W", "ignore", __file__, "--worker", json.dumps(given)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "error"},
        start_new_session=True,
    )
    try:
        read_line(worker)  # connected, and in their first numbers
        connected, rounds = connections(server.pid, port), []
        for _ in range(given["rounds"]):
            before = state_of(server.pid)
            wall_s, requests = time_round(worker)
            after = state_of(server.pid)
            done = {name: after[name] - before[name] for name in after}
            rounds.append({**done, "wall_s": wall_s, "requests": requests})
        return Rounds(connected, rounds)
    finally:
        os.killpg(worker.pid, signal.SIGKILL)
        server.kill()
        worker.wait()
        server.wait()


def time_round(worker: subprocess.Popen[str]) -> tuple[float, int]:
    """The seconds that a round takes, and the requests that the store gets in it."""
    assert worker.stdin is not None
    began = time.time()
    worker.stdin.write("go\n")
    worker.stdin.flush()
    latest, requests = read_line(worker).split()
    return float(latest) - began, int(requests)


def state_of(pid: int) -> dict[str, float]:
    """CPU seconds, and bytes that the process has read and written, sockets included."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    cpu_s = sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
    fields = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return {"cpu_s": cpu_s, "read": int(fields["rchar"]), "written": int(fields["wchar"])}


def connections(pid: int, port: int) -> int:
    """From other processes to the server ``pid``, which has one to itself."""
    ends = [
        end for end in psutil.Process(pid).net_connections("tcp") if end.status == "ESTABLISHED"
    ]
    own = {end.laddr.port for end in ends if end.raddr.port == port}
    return sum(end.laddr.port == port and end.raddr.port not in own for end in ends)


def read_line(worker: subprocess.Popen[str]) -> str:
    assert worker.stdout is not None
    line = worker.stdout.readline()
    if not line:
        raise RuntimeError("a worker has failed")
    return line


# --- in the worker ----------------------------------------------------------------------------


def work(given: dict[str, Any]) -> None:
    """All ranks, released together for each round."""
    # NVRx hosts a store on rank 0; all of ours are clients
    os.environ.update(RANK="1", WORLD_SIZE=str(given["ranks"]), MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = str(given["port"])
    make, module = (ours, OURS) if given["peer"] == "ncclops" else (theirs, THEIRS)
    for name in (module, "torch.distributed"):
        importlib.import_module(name)  # once, for all children
    gates = Gates(given["rounds"])
    per_process = given["per_process"] * RANKS_OF_A_HOST
    firsts = range(0, given["ranks"], per_process)
    # One number for each process, which it alone changes.
    counts = memoryview(mmap.mmap(-1, 8 * len(firsts))).cast("q")
    for number, first in enumerate(firsts):
        if os.fork() == 0:
            gates.leave_to_parent()
            last = min(first + per_process, given["ranks"])
            live(make, given, range(first, last), gates, counts[number : number + 1])
    threads = -(-given["ranks"] // ranks_of_a_thread(given))
    gates.wait_for_all(threads)
    print("ready", flush=True)
    for number in range(given["rounds"]):
        sys.stdin.readline()
        before = sum(counts)
        gates.open(number)
        print(gates.wait_for_all(threads), sum(counts) - before, flush=True)


def ranks_of_a_thread(given: dict[str, Any]) -> int:
    """Ranks of the other wrapper wait for each other in the middle of one call."""
    return RANKS_OF_A_HOST if given["peer"] == "ncclops" else 1


def live(
    make: Any, given: dict[str, Any], ranks: Sequence[int], gates: Gates, count: memoryview
) -> NoReturn:
    """The hosts of one process."""
    threading.stack_size(512 * 1024)
    # All threads wait for messages, and leave the interpreter's lock to others then. Those that
    # wait for the lock would wake up 200 times a second, hundreds of them, to ask for it.
    sys.setswitchinterval(1.0)
    for first in ranks[::RANKS_OF_A_HOST]:
        host = Host(given, count)
        of_host = ranks[first - ranks[0] :][:RANKS_OF_A_HOST]
        for at in range(0, len(of_host), ranks_of_a_thread(given)):
            of_thread = of_host[at : at + ranks_of_a_thread(given)]
            arguments = (make, given, of_thread, gates, host)
            threading.Thread(target=simulate, args=arguments, daemon=True).start()
    while True:
        signal.pause()


class Host:
    """What the ranks of a host share; ``connect`` gives one of them a connection."""

    def __init__(self, given: dict[str, Any], count: memoryview) -> None:
        self._port = given["port"]
        self._prefix = given.get("prefix", "bench")
        self._count = count
        self._listener: socket.socket | None = None
        if given["way"] == "relay":
            self._start_relay()

    def _start_relay(self) -> None:
        from ncclops.restart._store.relay import Relay

        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind("")
        self._listener.listen(100)
        relay = Relay(self._listener.dup(), self._tcp_store)
        threading.Thread(target=relay.run, daemon=True).start()

    def connect(self) -> Any:
        """As a client of the ledger has it."""
        from torch import distributed as dist

        from ncclops.restart._store.relay_client import RelayedStore

        if self._listener is None:
            return Counting(dist.PrefixStore(self._prefix, self._tcp_store().store), self._count)
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(self._listener.getsockname())
        store = RelayedStore(sock, self._prefix, TIMEOUT.total_seconds(), math.inf)
        store.greet(time.monotonic() + TIMEOUT.total_seconds())
        return store

    def _tcp_store(self) -> Counting:
        from torch import distributed as dist

        address = ("127.0.0.1", self._port)
        tcp = dist.TCPStore(*address, None, False, TIMEOUT, wait_for_workers=False)
        return Counting(tcp, self._count)


class Counting:
    """A connection to the store, whose requests are counted."""

    # of them alone is a request made; the rest is known without
    REQUESTS = frozenset(
        ("set", "get", "add", "check", "compare_set", "append", "multi_get", "multi_set")
    ) | {"delete_key"}

    def __init__(self, store: Any, count: memoryview) -> None:
        self.store = store
        self._count = count

    @property
    def timeout(self) -> timedelta:
        limit: timedelta = self.store.timeout
        return limit

    def __getattr__(self, name: str) -> Any:
        if name in self.REQUESTS:
            self._count[0] += 1
        return getattr(self.store, name)


class Gates:
    """Releases the threads for each round and hears when they are through.

    By pipes: a thousand threads at one of Python's locks would be most of what is measured.
    """

    def __init__(self, rounds: int) -> None:
        self._gates = [os.pipe() for _ in range(rounds)]
        self._arrivals = os.pipe()

    def leave_to_parent(self) -> None:
        for _, gate in self._gates:
            os.close(gate)

    def open(self, number: int) -> None:
        os.close(self._gates[number][1])  # which every reader sees

    def wait(self, number: int) -> None:
        os.read(self._gates[number][0], 1)

    def arrive(self) -> None:
        os.write(self._arrivals[1], struct.pack("d", time.time()))

    def wait_for_all(self, threads: int) -> float:
        """When the last of so many threads has arrived. Raises where one has not in time."""
        latest = 0.0
        for _ in range(threads):
            if not select.select([self._arrivals[0]], [], [], TIMEOUT.total_seconds())[0]:
                raise TimeoutError("a thread has not come through")
            latest = max(latest, *struct.unpack("d", os.read(self._arrivals[0], 8)))
        return latest


def simulate(
    make: Any, given: dict[str, Any], ranks: Sequence[int], gates: Gates, host: Host
) -> None:
    """``make`` gives the phases of a rank's step."""
    try:
        phases: dict[int, Sequence[Callable[[int], None]]]
        phases = {rank: make(given, rank, host) for rank in ranks}
        for number in range(-1, given["rounds"]):
            if number >= 0:
                gates.wait(number)
            # one of the last is lost in each round
            present = [phases[rank] for rank in ranks if rank < given["ranks"] - number - 1]
            for phase in zip(*present, strict=True):
                for of_rank in phase:
                    of_rank(number)
            gates.arrive()
    except Exception:  # noqa: BLE001 - whatever it is, the run is worth nothing
        traceback.print_exc()
        os.killpg(0, signal.SIGKILL)


def assignment_of(module: Any, name: str) -> Any:
    assignments = importlib.import_module(f"{module}.rank_assignment")
    if name == "shift":
        compose = importlib.import_module(module).Compose
        return compose(assignments.ActivateAllRanks(), assignments.ShiftRanks())
    reserve, layer = assignments.LayerFlag.RESERVE, assignments.Layer
    return assignments.Tree(
        [
            layer(min_ranks=1, max_ranks=None, key_or_fn="root", flag=reserve),
            layer(min_ranks=1, max_ranks=8, key_or_fn=host, flag=reserve),
        ]
    )


def host(state: Any) -> str:
    """Text that sorts like the number, as Tree wants depth-first order to be rank order."""
    return f"host{state.initial_rank // 8:05}"


def ours(given: dict[str, Any], rank: int, its_host: Host) -> Sequence[Callable[[int], None]]:
    """One rank's step from a fault to its new number, up to each wait for others."""
    from ncclops.restart._assignment.planning import choose_assigner
    from ncclops.restart.agreement import Arrival
    from ncclops.restart.attribution import Fault, FaultKind
    from ncclops.restart.ledger import Ledger
    from ncclops.restart.state import State

    world = given["ranks"]
    assigner = choose_assigner(assignment_of(OURS, given["assignment"]), its_host.connect)
    ledger = Ledger(its_host.connect(), world, assigner.planner)
    of_monitor_thread = Ledger(its_host.connect(), world, assigner.planner)
    state = State(rank, world)
    gone: frozenset[int] = frozenset()

    def fail(iteration: int) -> None:
        if rank == 0 and iteration >= 0:
            lost = world - iteration - 1
            fault = Fault(FaultKind.DIED, lost, lost, iteration, time.time(), "it died", gone=True)
            ledger.record_gone(iteration, fault, gone)
        if given["all_fail"] and iteration >= 0:
            text = "RuntimeError: Connection closed by peer [10.0.0.1]:12345"
            at = time.time()
            kind = FaultKind.EXCEPTION
            ledger.record_fault(
                iteration, Fault(kind, rank, state.rank, iteration, at, text, "x" * 8000)
            )

    def arrive(iteration: int) -> None:
        if iteration >= 0:
            of_monitor_thread.wait_for_outcome(iteration, TIMEOUT)
        keys = assigner.keys(state, iteration)
        ledger.arrive(iteration, Arrival(rank, state.rank, state.world_size, keys), gone)

    def go_on(iteration: int) -> None:
        nonlocal gone
        agreement, placement = of_monitor_thread.wait_for_agreement(iteration, rank, TIMEOUT)
        assigner.assign(state, agreement, placement)
        if iteration >= 0:
            state.advance()
        gone = agreement.gone
        assert state.world_size == world - iteration - 1

    return fail, arrive, go_on


def theirs(given: dict[str, Any], rank: int, its_host: Host) -> Sequence[Callable[[int], None]]:
    """The same in the order of the other wrapper's guide; it shares nothing."""
    del its_host
    stores, states = (importlib.import_module(f"{THEIRS}.{m}") for m in ("store", "state"))
    context = importlib.import_module(f"{THEIRS}.rank_assignment").RankAssignmentCtx
    world = given["ranks"]
    base = stores.TCPStore(timeout=TIMEOUT, wait_for_workers=False)
    assignment = assignment_of(THEIRS, given["assignment"])
    with contextlib.suppress(TypeError):
        state = states.State(rank, world)
    if given["assignment"] == "tree":
        base.set_initial_rank(rank, rank)

    def step(iteration: int) -> None:
        nonlocal state
        store = stores.PrefixStore(iteration, base)
        entering = [rank]
        if rank == 0 and iteration >= 0:
            lost = world - iteration - 1
            base.record_terminated_ranks({lost})
            entering.append(lost)
        # the lost ranks of earlier rounds are members no more
        members = world - max(iteration, 0)
        store.iteration_barrier(ranks=entering, rendezvous_count=members, timeout=TIMEOUT)
        terminated = {r for r in base.get_terminated_ranks() if r < members}
        state = assignment(context(state, store, terminated)).state
        if iteration >= 0:
            state.advance()
        assert state.world_size == world - iteration - 1

    return (step,)


if __name__ == "__main__":
    main()
