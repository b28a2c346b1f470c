"""From a fault to the beginning of the next step in a job of a thousand ranks, phase by phase.

    python scripts/bench_fault_at_scale.py --ranks 256 1024 4096 --faults exception kill

The ranks of the first host are real: eight processes with ``ncclops.restart.Wrapper``, their
monitor processes, and the relay of the host. All others are simulated as in
``bench_restart_scale.py``: a thread stands for a host of eight ranks, which share a real relay over
a Unix socket, and calls ``Ledger`` and the rank assignment for each of its ranks. All of them meet
over one real store server. The neighbour of the last real rank in the ring has a real monitor
process as well.

A rank of the first host raises (``exception``) or is killed (``kill``); with ``--all-fail`` every
other rank reports an exception with 8 KB of traceback at once, as where a collective fails. Times
are from then until, on the last rank of all:

``known``    the fault is known: the process or its monitor process has noticed and recorded it,
             through the ring where the process is dead, and the monitor thread's wait has ended
``left``     the function is left, in which a system call waits (real ranks alone)
``placed``   the barrier is complete, and the rank has its number in the next iteration
``met``      the rank has a new connection to the store, has agreed with all others on what becomes
             of the default group (``regroup.plan_for``), and has read the one key of NCCL's
             rendezvous: here the function would make the group, and begin a step

``first`` is the first simulated rank that knows of the fault: all before that is detection. Left
out is what belongs to the backend and the user: the abort of communicators, NCCL's or Gloo's
connecting, and what the function does. The phases of the incident, of the new rank 0, are printed
as well.

All ranks share the cores of one machine. ``CPU`` is what the server, and all simulated ranks
together, have used from the fault on: divided by the cores it is a lower bound of the time here,
and nothing of the kind where each rank has a core.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import psutil
from bench_restart_scale import (
    OURS,
    RANKS_OF_A_HOST,
    TIMEOUT,
    Gates,
    Host,
    assignment_of,
    read_line,
)

FAULTS = ("exception", "kill")
PHASES = ("first", "known", "left", "placed", "met")
KNOWN, LEFT, PLACED, MET = range(4)
# As ``Connections`` names the first call of a wrapped function.
PREFIX = "ncclops/call0"
_MARK = struct.Struct("iid")  # iteration, what, when
_SETTLED_S = 1.0  # between two faults, for what is deleted and moved in the background
_NCCL_ID = bytes(range(128))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--faults", choices=FAULTS, nargs="+", default=list(FAULTS))
    parser.add_argument("--rounds", type=int, default=3, help="at most 5")
    parser.add_argument("--per-process", type=int, default=64, help="hosts in a process")
    parser.add_argument("--all-fail", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        with ending_all():
            conduct(json.loads(arguments.worker))
        return
    for ranks in arguments.ranks:
        for fault in arguments.faults:
            given = {"ranks": ranks, "fault": fault, "all_fail": arguments.all_fail}
            given |= {"rounds": min(arguments.rounds, 5), "per_process": arguments.per_process}
            print_rounds(ranks, fault, measure(given))


def measure(given: dict[str, Any]) -> list[dict[str, Any]]:
    """The rounds of one job."""
    server = subprocess.Popen(
        [sys.executable, "-m", f"{OURS}.store_server", "0"], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    port = int(server.stdout.readline().rpartition(":")[2])
    with tempfile.TemporaryDirectory() as incidents:
        given |= {"port": port, "server": server.pid, "incidents": incidents, "prefix": PREFIX}
        worker = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, "--worker", json.dumps(given)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "error"},
            start_new_session=True,
        )
        try:
            rounds: list[dict[str, Any]] = json.loads(read_line(worker))
            return rounds
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
            server.kill()
            worker.wait()
            server.wait()


def print_rounds(ranks: int, fault: str, rounds: Sequence[dict[str, Any]]) -> None:
    """Medians, and the whole time of each round."""

    def median(name: str) -> float:
        return float(statistics.median(each[name] for each in rounds))

    each = " ".join(f"{1000 * round_['met']:.0f}" for round_ in rounds)
    phases = ", ".join(f"{name} {1000 * median(name):.0f}" for name in PHASES)
    print(f"{ranks:>6} ranks  {fault:<9}  {phases} ms ({each})", flush=True)
    of_incident = ", ".join(
        f"{name} {statistics.median(each['incident'][name] for each in rounds):.0f}"
        for name in rounds[0]["incident"]
    )
    print(f"{'':>14}incident of the new rank 0: {of_incident} ms")
    print(
        f"{'':>14}CPU: server {1000 * median('server_s'):.0f} ms, all simulated ranks "
        f"{1000 * median('simulated_s'):.0f} ms; load {os.getloadavg()[0]:.1f}",
        flush=True,
    )


# --- in the worker: one that starts all ranks, and every rank ----------------------------------


@contextlib.contextmanager
def ending_all() -> Iterator[None]:
    """Whatever fails anywhere, the run is worth nothing."""
    try:
        yield
    except Exception:  # noqa: BLE001
        traceback.print_exc()
        os.killpg(0, signal.SIGKILL)


def conduct(given: dict[str, Any]) -> None:
    """Start all ranks, have one of them fail in each round, and print what took how long."""
    import torch.distributed  # noqa: F401 - once, for all children

    import ncclops.restart  # noqa: F401

    os.environ |= {"NCCLOPS_STORE": f"127.0.0.1:{given['port']}", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": str(given["port"]), "WORLD_SIZE": str(given["ranks"])}
    os.environ["LOCAL_WORLD_SIZE"] = str(RANKS_OF_A_HOST)
    gates, marks = Gates(given["rounds"]), Marks()
    real = {rank: RealRank(given, rank, gates, marks) for rank in range(RANKS_OF_A_HOST)}
    simulated = []
    each = given["per_process"] * RANKS_OF_A_HOST
    for first in range(RANKS_OF_A_HOST, given["ranks"], each):
        simulated.append(os.fork())
        if simulated[-1] == 0:
            live(given, range(first, min(first + each, given["ranks"])), gates, marks)
    hosts = -(-given["ranks"] // RANKS_OF_A_HOST) - 1
    marks.last_of_all(0, MET, hosts + len(real))
    rounds = []
    for number in range(given["rounds"]):
        time.sleep(_SETTLED_S)
        before = [cpu_s_of(pid) for pid in (given["server"], *simulated)]
        failing = real[RANKS_OF_A_HOST - 2 - number]
        began = time.monotonic()
        if given["fault"] == "kill":
            os.kill(failing.pid, signal.SIGKILL)
            del real[failing.rank]
        else:
            failing.fail()
        if given["all_fail"]:
            gates.open(number)
            for other in set(real.values()) - {failing}:
                other.fail()
        found = {
            "met": marks.last_of_all(number + 1, MET, hosts + len(real)),
            "placed": marks.last_of_all(number + 1, PLACED, hosts + len(real)),
            "left": marks.last_of_all(number, LEFT, len(real)),
            "known": marks.last_of_all(number, KNOWN, hosts),
            "first": marks.first(number, KNOWN),
        }
        found = {name: at - began for name, at in found.items()}
        after = [cpu_s_of(pid) for pid in (given["server"], *simulated)]
        found["server_s"] = after[0] - before[0]
        found["simulated_s"] = sum(after[1:]) - sum(before[1:])
        rounds.append({**found, "incident": phases_of_incident(given, number)})
    print(json.dumps(rounds), flush=True)


def cpu_s_of(pid: int) -> float:
    """Of all its threads, with those that have ended."""
    times = psutil.Process(pid).cpu_times()
    total: float = times.user + times.system
    return total


def phases_of_incident(given: dict[str, Any], number: int) -> dict[str, float]:
    """Milliseconds, as the new rank 0 has written them."""
    path = Path(given["incidents"], str(number), "incident.json")
    deadline = time.monotonic() + 30
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"there is no {path}")
        time.sleep(0.05)
    phases: dict[str, float] = json.loads(path.read_text())["phases_ms"]
    return phases


class Marks:
    """What ranks and hosts say when they have come to a phase, over one pipe."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        self._at: dict[tuple[int, int], list[float]] = {}

    def say(self, iteration: int, what: int) -> None:
        os.write(self._write, _MARK.pack(iteration, what, time.monotonic()))

    def last_of_all(self, iteration: int, what: int, count: int) -> float:
        """When the last of ``count`` has come to it. Raises where one has not in time."""
        while len(at := self._at.get((iteration, what), [])) < count:
            if not select.select([self._read], [], [], TIMEOUT.total_seconds())[0]:
                raise TimeoutError(f"{len(at)} of {count} have come to {iteration, what}")
            said_in, said, when = _MARK.unpack(os.read(self._read, _MARK.size))
            self._at.setdefault((said_in, said), []).append(when)
        return max(at)

    def first(self, iteration: int, what: int) -> float:
        return min(self._at[iteration, what])


class RealRank:
    """A process with the wrapper, whose function waits until it is told to raise."""

    def __init__(self, given: dict[str, Any], rank: int, gates: Gates, marks: Marks) -> None:
        self.rank = rank
        told, self._tell = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                gates.leave_to_parent()
                os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                run_wrapped(given, told, marks)
            finally:
                traceback.print_exc()
                os._exit(1)

    def fail(self) -> None:
        os.write(self._tell, b"x")


def run_wrapped(given: dict[str, Any], told: int, marks: Marks) -> None:
    """The function of a real rank."""
    from torch import distributed

    from ncclops import restart

    @restart.Wrapper(
        incident_dir=given["incidents"],
        store_kwargs={"wait_for_workers": False},  # torch's count of workers
        soft_timeout=TIMEOUT,
        hard_timeout=2 * TIMEOUT,
        barrier_timeout=3 * TIMEOUT,
        heartbeat_timeout=TIMEOUT,
        health_check=None,
    )
    def function(call: restart.CallWrapper) -> None:
        marks.say(call.iteration, PLACED)
        try:
            store, rank, size = next(iter(distributed.rendezvous("env://")))
            meet(store, rank, size)
            marks.say(call.iteration, MET)
            os.read(told, 1)
            raise ValueError("the loss is not finite")
        finally:
            marks.say(call.iteration, LEFT)

    function()


def meet(store: Any, rank: int, size: int) -> None:
    """Agree on the default group, and read what NCCL's ranks read of rank 0."""
    offer(store, rank)
    if rank == 0:
        decide(store, size)
    hear(store, rank)


def offer(store: Any, rank: int) -> None:
    from ncclops.restart.regroup import Offer

    store.set(f"offer/{rank}", Offer("groups of nccl are not reconfigured").to_json())


def decide(store: Any, size: int) -> None:
    from ncclops.restart._groups.members import decided
    from ncclops.restart.regroup import Offer, plan_for

    def plan(said: Sequence[bytes]) -> str:
        return plan_for([Offer.from_json(each) for each in said]).to_json()

    decided(store, 0, range(size), "offer", "plan", None, plan)
    store.set("once/0", _NCCL_ID)


def hear(store: Any, rank: int) -> None:
    store.get("plan")
    if rank:
        store.get("once/0")


def live(given: dict[str, Any], ranks: Sequence[int], gates: Gates, marks: Marks) -> NoReturn:
    """The hosts of one process."""
    gates.leave_to_parent()
    threading.stack_size(512 * 1024)
    sys.setswitchinterval(1.0)  # see bench_restart_scale.py
    monitor = MonitorOfNeighbour(ranks[0]) if ranks[0] == RANKS_OF_A_HOST else None
    counts = memoryview(bytearray(8)).cast("q")
    for first in ranks[::RANKS_OF_A_HOST]:
        of_host = ranks[first - ranks[0] :][:RANKS_OF_A_HOST]
        arguments = (given, of_host, Host({**given, "way": "relay"}, counts), monitor, gates, marks)
        threading.Thread(target=simulate, args=arguments, daemon=True).start()
    while True:
        signal.pause()


class MonitorOfNeighbour:
    """A monitor process of a simulated rank, which the last real one is connected to."""

    def __init__(self, rank: int) -> None:
        from ncclops.restart._monitor.link import Watch
        from ncclops.restart.monitor_process import MonitorProcess, MonitorProcessSettings

        second = timedelta(seconds=1)
        self._process = MonitorProcess(
            MonitorProcessSettings(
                rank=rank,
                host="127.0.0.1",
                monitor_process_interval=second,
                heartbeat_interval=second,
                heartbeat_timeout=TIMEOUT,
                termination_grace_time=second,
                abort_timeout=TIMEOUT,
                logfile=None,
                pidfile=None,
                incident_dir=None,
                outside_view=None,
            )
        )
        self._process.page.watch = Watch.OFF
        self._process.start()
        self.address = self._process.address


def simulate(
    given: dict[str, Any],
    ranks: Sequence[int],
    host: Host,
    neighbour: MonitorOfNeighbour | None,
    gates: Gates,
    marks: Marks,
) -> None:
    """The ranks of a host, phase by phase."""
    with ending_all():
        parts = [SimulatedRank(given, rank, host) for rank in ranks]
        for part in parts:
            part.join(neighbour)
        for number in range(given["rounds"] + 1):
            for part in parts:
                part.take_place(number - 1)
            marks.say(number, PLACED)
            for part in parts:
                part.offer(number)
            for part in parts:
                part.hear()
            marks.say(number, MET)
            if number == given["rounds"]:
                return
            if given["all_fail"]:
                gates.wait(number)
                for part in parts:
                    part.fail(number)
            for part in parts:
                part.learn(number)
            marks.say(number, KNOWN)
            for part in parts:
                part.arrive(number)


class SimulatedRank:
    """What one rank does, in the order of the restart loop, up to each wait for others."""

    def __init__(self, given: dict[str, Any], rank: int, host: Host) -> None:
        from ncclops.restart._assignment.planning import choose_assigner
        from ncclops.restart.ledger import Ledger
        from ncclops.restart.state import State

        size = given["ranks"]
        self._port = given["port"]
        self._assigner = choose_assigner(assignment_of(OURS, "shift"), host.connect)
        self._ledger = Ledger(host.connect(), size, self._assigner.planner)
        self._of_monitor_thread = Ledger(host.connect(), size, self._assigner.planner)
        self._state = State(rank, size)
        self._gone: frozenset[int] = frozenset()
        self._store: Any = None

    def join(self, neighbour: MonitorOfNeighbour | None) -> None:
        """``Session``, and the barrier before the first iteration."""
        rank = self._state.initial_rank
        # Ranks behind the neighbour are looked up, and reached if that is lost.
        address = ("127.0.0.1", 1, "") if neighbour is None else neighbour.address[1:]
        self._ledger.publish_address(rank, (rank, *address))
        self.arrive(-1)

    def arrive(self, iteration: int) -> None:
        from ncclops.restart.agreement import Arrival

        state = self._state
        keys = self._assigner.keys(state, iteration)
        arrival = Arrival(state.initial_rank, state.rank, state.world_size, keys)
        self._ledger.arrive(iteration, arrival, self._gone)

    def take_place(self, iteration: int) -> None:
        agreement, placement = self._of_monitor_thread.wait_for_agreement(
            iteration, self._state.initial_rank, TIMEOUT
        )
        self._assigner.assign(self._state, agreement, placement)
        if iteration >= 0:
            self._state.advance()
        self._gone = agreement.gone

    def offer(self, iteration: int) -> None:
        """What ``Connections.for_groups`` gives, and this rank's part of the agreement."""
        from ncclops.restart.store import PrefixStore, connect_to_server

        store = connect_to_server("127.0.0.1", self._port, TIMEOUT)
        self._store = PrefixStore(f"{PREFIX}/{iteration}/groups/0", store)
        offer(self._store, self._state.rank)

    def hear(self) -> None:
        hear(self._store, self._state.rank)

    def learn(self, iteration: int) -> None:
        self._of_monitor_thread.wait_for_outcome(iteration, TIMEOUT)

    def fail(self, iteration: int) -> None:
        from ncclops.restart.attribution import Fault, FaultKind

        text = "RuntimeError: Connection closed by peer [10.0.0.1]:12345"
        state, kind = self._state, FaultKind.EXCEPTION
        fault = Fault(
            kind, state.initial_rank, state.rank, iteration, time.time(), text, "x" * 8000
        )
        self._ledger.record_fault(iteration, fault)


if __name__ == "__main__":
    main()
