"""The control plane of a restart at scale: barrier plus rank assignment over one TCPStore.

    python scripts/bench_restart_scale.py --ranks 1024 4096 [--peer-python PYTHON]

Each rank is simulated by a thread with a store connection of its own, in a few processes on this
machine; the code that runs is that of the wrappers. In every round one rank is lost; measured is
the time from the release of all threads until the last one knows its new number, and the CPU time
of the store's server, which all ranks of a job share and no noise of the machine gets into.

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
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

# As many threads as a process can hold without the interpreter's lock being all that is measured.
THREADS = 1024
TIMEOUT = timedelta(seconds=300)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--assignment", choices=("shift", "tree"), nargs="+", default=["shift"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer-python", help="an interpreter with NVRx")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(json.loads(arguments.worker))
        return
    for ranks in arguments.ranks:
        for assignment in arguments.assignment:
            ours = measure("ncclops", sys.executable, ranks, assignment, arguments.rounds)
            print(f"{ranks:>6} ranks  {assignment:<5}  ncclops {ours}", flush=True)
            if arguments.peer_python:
                nvrx = measure("nvrx", arguments.peer_python, ranks, assignment, arguments.rounds)
                print(f"{'':>21}  nvrx    {nvrx}  {ours.share_of(nvrx)}", flush=True)


@dataclass
class Rounds:
    """Of each round: seconds until the last rank is through, and seconds of the server's CPU."""

    wall: list[float]
    server: list[float]

    def __str__(self) -> str:
        wall, server = statistics.median(self.wall), statistics.median(self.server)
        each = " ".join(f"{1000 * value:.0f}" for value in self.wall)
        return f"{1000 * wall:>7.0f} ms ({each}), server {1000 * server:>6.1f} ms"

    def share_of(self, other: Rounds) -> str:
        """Ours as a part of theirs."""
        wall = statistics.median(self.wall) / statistics.median(other.wall)
        server = statistics.median(self.server) / statistics.median(other.server)
        return f"ncclops: {wall:.2f} of the time, {server:.2f} of the server"


def measure(peer: str, python: str, ranks: int, assignment: str, rounds: int) -> Rounds:
    """``rounds`` rounds. Raises ``RuntimeError`` when a worker fails."""
    server = subprocess.Popen(
        [sys.executable, "-m", "ncclops.restart.store_server", "0"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    port = int(server.stdout.readline().rpartition(":")[2])
    workers = []
    for first in range(0, ranks, THREADS):
        mine = list(range(first, min(first + THREADS, ranks)))
        given = {"peer": peer, "port": port, "ranks": ranks, "mine": mine, "rounds": rounds}
        given["assignment"] = assignment
        workers.append(
            subprocess.Popen(
                [python, "-W", "ignore", __file__, "--worker", json.dumps(given)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "error"},
            )
        )
    try:
        read_all(workers)  # connected, and in their first numbers
        found = Rounds([], [])
        for _ in range(rounds):
            before = cpu_s(server.pid)
            found.wall.append(time_round(workers))
            found.server.append(cpu_s(server.pid) - before)
        return found
    finally:
        for process in [*workers, server]:
            process.kill()
            process.wait()


def time_round(workers: list[subprocess.Popen[str]]) -> float:
    began = time.time()
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("go\n")
        worker.stdin.flush()
    return max(map(float, read_all(workers))) - began


def cpu_s(pid: int) -> float:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def read_all(workers: list[subprocess.Popen[str]]) -> list[str]:
    lines = []
    for worker in workers:
        assert worker.stdout is not None
        lines.append(worker.stdout.readline())
    if not all(lines):
        raise RuntimeError("a worker has failed")
    return lines


# --- in the worker ----------------------------------------------------------------------------


def work(given: dict[str, Any]) -> None:
    """The threads of one process, released together for each round."""
    threading.stack_size(512 * 1024)
    # NVRx hosts a store on rank 0; all of ours are clients
    os.environ.update(RANK="1", WORLD_SIZE=str(given["ranks"]), MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = str(given["port"])
    make = ours if given["peer"] == "ncclops" else theirs
    gate = threading.Barrier(len(given["mine"]) + 1)
    threads = [
        threading.Thread(target=simulate, args=(make, given, rank, gate), daemon=True)
        for rank in given["mine"]
    ]
    for thread in threads:
        thread.start()
    wait(gate)
    print("ready", flush=True)
    for _ in range(given["rounds"]):
        sys.stdin.readline()
        wait(gate)  # they go
        wait(gate)  # they are through
        print(time.time(), flush=True)


def simulate(make: Any, given: dict[str, Any], rank: int, gate: threading.Barrier) -> None:
    try:
        step: Callable[[int], None] = make(given, rank)
        step(-1)
        wait(gate)
        for number in range(given["rounds"]):
            wait(gate)
            if rank < given["ranks"] - number - 1:  # one of the last is lost in each round
                step(number)
            wait(gate)
    except BaseException:
        gate.abort()
        raise


def wait(gate: threading.Barrier) -> None:
    gate.wait(TIMEOUT.total_seconds())


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

    from ncclops.restart.attribution import Fault, FaultKind
    from ncclops.restart.ledger import Arrival, Ledger, Membership
    from ncclops.restart.planning import choose_assigner
    from ncclops.restart.state import State

    world = given["ranks"]
    tcp = dist.TCPStore("127.0.0.1", given["port"], None, False, TIMEOUT, wait_for_workers=False)
    store = dist.PrefixStore("bench", tcp)
    assigner = choose_assigner(assignment_of("ncclops.restart", given["assignment"]), store)
    ledger = Ledger(store, world, assigner.planner)
    state = State(rank, world)
    gone: frozenset[int] = frozenset()

    def step(iteration: int) -> None:
        nonlocal gone
        members = Membership(state.world_size, gone)
        if rank == 0 and iteration >= 0:
            lost = world - iteration - 1
            fault = Fault(FaultKind.DIED, lost, lost, iteration, time.time(), "it died", gone=True)
            ledger.record_gone(iteration, fault, members)
        arrival = Arrival(rank, state.rank, assigner.keys(state, iteration))
        ledger.arrive(iteration, arrival, members)
        agreement, placement = ledger.wait_for_agreement(iteration, rank, TIMEOUT)
        assigner.assign(state, agreement, placement)
        if iteration >= 0:
            state.advance()
        gone = agreement.gone
        assert state.world_size == world - iteration - 1

    return step


def theirs(given: dict[str, Any], rank: int) -> Callable[[int], None]:
    """The same in the order of the other wrapper's guide."""
    name = "nvidia_resiliency_ext.inprocess"
    stores, states = (importlib.import_module(f"{name}.{m}") for m in ("store", "state"))
    context = importlib.import_module(f"{name}.rank_assignment").RankAssignmentCtx
    world = given["ranks"]
    base = stores.TCPStore(timeout=TIMEOUT, wait_for_workers=False)
    assignment = assignment_of(name, given["assignment"])
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
