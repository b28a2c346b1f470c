"""The control plane of a restart at scale: barrier plus rank assignment over one TCPStore.

    python scripts/bench_restart_scale.py --ranks 1024 4096 [--peer-python PYTHON]

Each rank is simulated by a thread with a store connection of its own, ``--per-process`` of them in
a process: 8 stand for a host with 8 ranks, more take less memory. The code that runs is that of the
wrappers. In every round one rank is lost; measured is the time from the release of all threads
until the last one knows its new number, and, of the store's server, the CPU time and the bytes that
it read and wrote: all ranks of a job share it, and no noise of the machine gets into them.

``--all-fail``: as in a collective, every other rank reports an exception with 8 KB of traceback
(ncclops alone: the other wrapper records no tracebacks).

* ncclops: what the restart loop does between "health check" and "assign": ``Ledger.arrive``,
  ``wait_for_agreement``, and the placement; the rank that completes the barrier plans for all.
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
import os
import select
import signal
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

OURS, THEIRS = "ncclops.restart", "nvidia_resiliency_ext.inprocess"
TIMEOUT = timedelta(seconds=300)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--assignment", choices=("shift", "tree"), nargs="+", default=["shift"])
    parser.add_argument("--rounds", type=int, default=3)
    # More than 512, and the interpreter's lock is what is measured.
    parser.add_argument("--per-process", type=int, default=512, help="ranks in a process")
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
            ours = measure("ncclops", sys.executable, given)
            print(f"{ranks:>6} ranks  {assignment:<5}  ncclops {ours}", flush=True)
            if arguments.peer_python:
                nvrx = measure("nvrx", arguments.peer_python, given)
                print(f"{'':>21}  nvrx    {nvrx}  {ours.share_of(nvrx)}", flush=True)


@dataclass
class Rounds:
    """Of each round: seconds until the last rank is through, the server's CPU seconds and bytes."""

    wall: list[float]
    server: list[float]
    moved: list[int]

    def __str__(self) -> str:
        wall, server = statistics.median(self.wall), statistics.median(self.server)
        each = " ".join(f"{1000 * value:.0f}" for value in self.wall)
        moved = statistics.median(self.moved) / 1e6
        return f"{1000 * wall:>7.0f} ms ({each}), server {1000 * server:>6.1f} ms {moved:.2f} MB"

    def share_of(self, other: Rounds) -> str:
        """Ours as a part of theirs."""
        wall = statistics.median(self.wall) / statistics.median(other.wall)
        server = statistics.median(self.server) / statistics.median(other.server)
        moved = statistics.median(self.moved) / statistics.median(other.moved)
        return (
            f"ncclops: {wall:.2f} of the time, {server:.2f} of the server, {moved:.2f} of the bytes"
        )


def measure(peer: str, python: str, given: dict[str, Any]) -> Rounds:
    """The rounds of one setting. Raises ``RuntimeError`` when a worker fails."""
    server = subprocess.Popen(
        [sys.executable, "-m", "ncclops.restart.store_server", "0"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    port = int(server.stdout.readline().rpartition(":")[2])
    given = {**given, "peer": peer, "port": port}
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
        found = Rounds([], [], [])
        for _ in range(given["rounds"]):
            cpu_before, moved_before = cpu_s(server.pid), moved(server.pid)
            found.wall.append(time_round(worker))
            found.server.append(cpu_s(server.pid) - cpu_before)
            found.moved.append(moved(server.pid) - moved_before)
        return found
    finally:
        os.killpg(worker.pid, signal.SIGKILL)
        server.kill()
        worker.wait()
        server.wait()


def time_round(worker: subprocess.Popen[str]) -> float:
    assert worker.stdin is not None
    began = time.time()
    worker.stdin.write("go\n")
    worker.stdin.flush()
    return float(read_line(worker)) - began


def cpu_s(pid: int) -> float:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def moved(pid: int) -> int:
    """Bytes that the process has read and written, sockets included."""
    fields = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return int(fields["rchar"]) + int(fields["wchar"])


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
    for first in range(0, given["ranks"], given["per_process"]):
        if os.fork() == 0:
            gates.leave_to_parent()
            last = min(first + given["per_process"], given["ranks"])
            live(make, given, range(first, last), gates)
    gates.wait_for_all(given["ranks"])
    print("ready", flush=True)
    for number in range(given["rounds"]):
        sys.stdin.readline()
        gates.open(number)
        print(gates.wait_for_all(given["ranks"]), flush=True)


def live(make: Any, given: dict[str, Any], ranks: Sequence[int], gates: Gates) -> NoReturn:
    """The threads of one process."""
    threading.stack_size(512 * 1024)
    for rank in ranks:
        threading.Thread(target=simulate, args=(make, given, rank, gates), daemon=True).start()
    while True:
        signal.pause()


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


def simulate(make: Any, given: dict[str, Any], rank: int, gates: Gates) -> None:
    try:
        step: Callable[[int], None] = make(given, rank)
        step(-1)
        gates.arrive()
        for number in range(given["rounds"]):
            gates.wait(number)
            if rank < given["ranks"] - number - 1:  # one of the last is lost in each round
                step(number)
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


def ours(given: dict[str, Any], rank: int) -> Callable[[int], None]:
    """One rank's step from a barrier to its new number."""
    from torch import distributed as dist

    from ncclops.restart._planning import choose_assigner
    from ncclops.restart.agreement import Arrival
    from ncclops.restart.attribution import Fault, FaultKind
    from ncclops.restart.ledger import Ledger
    from ncclops.restart.state import State

    world = given["ranks"]
    tcp = dist.TCPStore("127.0.0.1", given["port"], None, False, TIMEOUT, wait_for_workers=False)
    store = dist.PrefixStore("bench", tcp)
    assigner = choose_assigner(assignment_of(OURS, given["assignment"]), store)
    ledger = Ledger(store, world, assigner.planner)
    state = State(rank, world)
    gone: frozenset[int] = frozenset()

    def step(iteration: int) -> None:
        nonlocal gone
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
        keys = assigner.keys(state, iteration)
        ledger.arrive(iteration, Arrival(rank, state.rank, state.world_size, keys), gone)
        agreement, placement = ledger.wait_for_agreement(iteration, rank, TIMEOUT)
        assigner.assign(state, agreement, placement)
        if iteration >= 0:
            state.advance()
        gone = agreement.gone
        assert state.world_size == world - iteration - 1

    return step


def theirs(given: dict[str, Any], rank: int) -> Callable[[int], None]:
    """The same in the order of the other wrapper's guide."""
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

    return step


if __name__ == "__main__":
    main()
