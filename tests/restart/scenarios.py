"""What the workers of the tests do. Each scenario is a function of a ``Worker``."""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ncclops import restart as inprocess
from ncclops.restart.state import FrozenState

seconds = lambda number: timedelta(seconds=number)  # noqa: E731


class Worker:
    """One rank of a test job."""

    def __init__(self, rank: int, directory: Path, parameters: dict[str, Any]) -> None:
        self.rank = rank
        self.directory = directory
        self.parameters = parameters
        self._events = (directory / f"events-{rank}").open("a")

    def note(self, event: str, **fields: Any) -> None:
        """Tell the test."""
        line = {"event": event, "rank": self.rank, "at": time.time(), **fields}
        self._events.write(json.dumps(line) + "\n")
        self._events.flush()

    def wrap(self, fn: Any, **parameters: Any) -> Any:
        """``fn`` wrapped, with a pid file for the guardian and incidents noted."""
        defaults: dict[str, Any] = {
            "monitor_process_pidfile": str(self.directory / "guardian-{rank}.pid"),
            "monitor_process_logfile": str(self.directory / "guardian-log-{rank}"),
            "on_incident": self._on_incident,
            "initialize": inprocess.initialize.RetryController(max_iterations=30),
        }
        return inprocess.Wrapper(**{**defaults, **parameters})(fn)

    def _on_incident(self, incident: Any) -> None:
        self.note(
            "incident", **{k: v for k, v in incident.to_dict().items() if k not in ("at", "rank")}
        )

    def join(self) -> int:
        """Make the default group and prove that it works; the world size."""
        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        assert int(total) == dist.get_world_size()
        return dist.get_world_size()

    def finish(self, call: inprocess.CallWrapper) -> str:
        """The end of an iteration that went well."""
        dist.destroy_process_group()
        self.note("done", iteration=call.iteration, now=int(os.environ["RANK"]))
        return f"rank {self.rank} of iteration {call.iteration}"


SCENARIOS = {}


def scenario(fn: Any) -> Any:
    SCENARIOS[fn.__name__] = fn
    return fn


def run(name: str, rank: int, directory: Path, parameters: dict[str, Any]) -> None:
    """Entry from the zygote."""
    faulthandler.enable()
    import logging

    logging.basicConfig(level=logging.DEBUG, format="%(asctime)s %(levelname)s %(message)s")
    worker = Worker(rank, directory, parameters)
    try:
        value = SCENARIOS[name](worker)
        worker.note("returned", value=value)
    except BaseException as error:
        worker.note("raised", error=repr(error), chain=_chain(error))
        raise


def _chain(error: BaseException | None) -> list[str]:
    chain = []
    while error is not None and len(chain) < 10:
        chain.append(f"{type(error).__name__}: {error}")
        error = error.__cause__ or error.__context__
    return chain


FAST = {
    "monitor_process_interval": seconds(0.1),
    "progress_watchdog_interval": seconds(0.1),
    "monitor_thread_interval": seconds(0.2),
    "heartbeat_interval": seconds(0.1),
    "termination_grace_time": seconds(0.5),
}
# For the tests of hangs. On a busy machine a healthy rank may be slow for seconds.
HANG = {
    **FAST,
    "soft_timeout": seconds(3),
    "hard_timeout": seconds(6),
    "heartbeat_timeout": seconds(4),
}


def gil_holding_sleep(duration_s: int) -> None:
    ctypes.PyDLL(None).sleep(duration_s)


@scenario
def raising(worker: Worker) -> Any:
    """Ranks in ``on`` raise in the iterations ``at``; the others wait for them in a collective."""

    def main(call: inprocess.CallWrapper) -> str:
        worker.note("entered", iteration=call.iteration, world=int(os.environ["WORLD_SIZE"]))
        faulty = (
            worker.rank in worker.parameters["on"] and call.iteration in worker.parameters["at"]
        )
        if faulty and worker.parameters.get("first_line"):
            raise ValueError(f"first line {call.iteration}")
        worker.join()
        if faulty:
            raise ValueError(f"boom {call.iteration}")
        dist.barrier()
        return worker.finish(call)

    limit = inprocess.initialize.RetryController(max_iterations=worker.parameters.get("limit", 30))
    return worker.wrap(main, initialize=limit)()


@scenario
def leaving(worker: Worker) -> Any:
    """Rank ``on`` leaves with a BaseException, or ends by a signal it sends itself."""

    def main(call: inprocess.CallWrapper) -> str:
        world = worker.join()
        worker.note("entered", iteration=call.iteration, world=world)
        if worker.rank in worker.parameters["on"] and call.iteration == 0:
            how = worker.parameters["how"]
            if how == "exit":
                sys.exit(5)
            if how == "interrupt":
                raise KeyboardInterrupt
            os.kill(os.getpid(), signal.Signals[how])
            time.sleep(100)
        dist.barrier()
        return worker.finish(call)

    def on_terminate(state: FrozenState) -> FrozenState:
        worker.note("terminate", mode=state.mode.name)
        return state

    class Terminate(inprocess.terminate.Terminate):
        __call__ = staticmethod(on_terminate)

    return worker.wrap(main, terminate=Terminate(), **FAST)()


@scenario
def waiting(worker: Worker) -> Any:
    """In iteration 0 all ranks wait in a collective for rank ``busy``, until something happens."""

    def main(call: inprocess.CallWrapper) -> str:
        world = worker.join()
        worker.note("entered", iteration=call.iteration, world=world, pid=os.getpid())
        if call.iteration == 0 and worker.rank == worker.parameters.get("busy", -1):
            while not (worker.directory / "go").exists():
                time.sleep(0.02)
        dist.barrier()
        if call.iteration == 0 and "busy" not in worker.parameters:
            dist.barrier(group=dist.new_group(timeout=seconds(600))) if worker.rank else time.sleep(
                600
            )
        return worker.finish(call)

    timing = HANG if worker.parameters.get("hang") else FAST
    return worker.wrap(main, **timing)()


@scenario
def hanging(worker: Worker) -> Any:
    """Rank ``on`` hangs in iteration 0, in the way ``how``."""

    def main(call: inprocess.CallWrapper) -> str:
        world = worker.join()
        worker.note("entered", iteration=call.iteration, world=world)
        if call.iteration == 0:
            if worker.rank in worker.parameters["on"]:
                hang(call)
            dist.barrier()
        return worker.finish(call)

    def hang(call: inprocess.CallWrapper) -> None:
        how = worker.parameters["how"]
        if how == "sleep":
            time.sleep(600)
        elif how == "lock":
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        elif how == "gil":
            gil_holding_sleep(600)
        elif how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif how == "livelock":
            call.ping()
            while True:
                time.sleep(0.01)
        elif how == "store":
            dist.distributed_c10d._get_default_store().get("never")
        else:
            raise AssertionError(how)

    return worker.wrap(main, **HANG)()
