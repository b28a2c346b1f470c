"""What the workers of the tests do. Each scenario is a function of a ``Worker``."""

from __future__ import annotations

import ctypes
import importlib.util
import inspect
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ncclops import capture
from ncclops import restart as inprocess
from ncclops.restart._groups.ending import wait_for_groups_to_end
from ncclops.restart.snapshots import OutsideViewSource
from ncclops.restart.state import FrozenState
from ncclops.testing import note
from tests.fakegpu.gpus import take_gpu


def seconds(number: float) -> timedelta:
    return timedelta(seconds=number)


class Worker:
    """One rank of a test job."""

    def __init__(self, rank: int, directory: Path, parameters: dict[str, Any]) -> None:
        self.rank = rank
        self.directory = directory
        self.parameters = parameters

    def note(self, event: str, **fields: Any) -> None:
        """Send ``fields`` to the test, as JSON would have them."""
        note(event, **json.loads(json.dumps(fields)))

    def wrap(self, fn: Any, **parameters: Any) -> Any:
        """``fn`` wrapped, with a pid file for the monitor process and incidents noted."""
        defaults: dict[str, Any] = {
            "monitor_process_pidfile": str(self.directory / "monitor-{rank}.pid"),
            "monitor_process_logfile": str(self.directory / "monitor-log-{rank}"),
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
        self.make_group()
        total = self.ones()
        dist.all_reduce(total)
        assert int(total) == dist.get_world_size()
        return dist.get_world_size()

    def make_group(self) -> None:
        """The default group, with the job's backend: a name, or a map of devices to names."""
        device = take_gpu(self.rank) if self.has_gpu else None
        eager = device if self.parameters["eager"] else None
        dist.init_process_group(self.parameters["backend"], device_id=eager)

    @property
    def has_gpu(self) -> bool:
        """Whether the groups are NCCL's."""
        return "nccl" in self.parameters["backend"]

    def ones(self) -> torch.Tensor:
        """A number for the groups to reduce, where they want it."""
        return torch.ones(1, device=take_gpu(self.rank) if self.has_gpu else "cpu")

    def finish(self, call: inprocess.CallWrapper) -> str:
        """The end of an iteration that went well."""
        dist.destroy_process_group()
        self.note("done", iteration=call.iteration, now=int(os.environ["RANK"]))
        return f"rank {self.rank} of iteration {call.iteration}"


SCENARIOS: dict[str, Callable[[Worker], Any]] = {}


def scenario(fn: Any) -> Any:
    SCENARIOS[fn.__name__] = fn
    return fn


def run(
    name: str, directory: Path, parameters: dict[str, Any], env_of: dict[int, dict[str, str]]
) -> None:
    """What each rank does: the scenario ``name``, or the program ``module:name``."""
    os.environ.update(env_of.get(int(os.environ["RANK"]), {}))
    logging.basicConfig(level=logging.DEBUG, format="%(asctime)s %(levelname)s %(message)s")
    worker = Worker(int(os.environ["RANK"]), directory, parameters)
    module, _, program = name.rpartition(":")
    act = getattr(importlib.import_module(module), program) if module else SCENARIOS[name]
    try:
        value = act(worker)
        worker.note("returned", value=value)
    except BaseException as error:
        worker.note("raised", error=repr(error), chain=_chain(error))
        raise


def _chain(error: BaseException | None) -> list[str]:
    chain: list[str] = []
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
def all_raise_much(worker: Worker) -> Any:
    """Every rank raises a long exception in iteration 0; rank 1 leaves with it."""

    def main(call: inprocess.CallWrapper) -> str:
        if call.iteration == 0:
            raise (SystemExit if worker.rank == 1 else ValueError)("x" * 10_000)
        return f"iteration {call.iteration}"

    return worker.wrap(main, **FAST)()


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
    if "busy" in worker.parameters:  # to wait for that rank is no hang
        timing = {**timing, "soft_timeout": seconds(60), "hard_timeout": seconds(90)}
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

    if importlib.util.find_spec("msgspec"):  # free-threading builds have none
        capture.install()
    return worker.wrap(main, incident_dir=str(worker.directory / "incidents"), **HANG)()


@scenario
def failing_callbacks(worker: Worker) -> Any:
    """Rank 1's callback ``which`` raises once, in iteration 0 or on the way to iteration 1."""
    which = worker.parameters["which"]
    raised: list[int] = []

    def fail(state: FrozenState) -> FrozenState:
        worker.note("callback", iteration=state.iteration, fault=repr(state.fn_exception))
        ready = which != "restart_health_check" or state.fn_exception is not None or raised
        if worker.rank == 1 and len(raised) < 1 and ready:
            raised.append(state.iteration)
            raise ValueError(f"{which} failed")
        return state

    class Initialize(inprocess.initialize.Initialize):
        __call__ = staticmethod(fail)

    class Finalize(inprocess.finalize.Finalize):
        __call__ = staticmethod(fail)

    class Check(inprocess.health_check.HealthCheck):
        __call__ = staticmethod(fail)

    callbacks: dict[str, Any] = {
        "initialize": {"initialize": Initialize()},
        "finalize": {"finalize": Finalize()},
        "health_check": {"health_check": Check()},
        "restart_health_check": {"health_check": Check()},
    }

    def main(call: inprocess.CallWrapper) -> str:
        worker.join()
        if (
            which in ("finalize", "restart_health_check")
            and call.iteration == 0
            and worker.rank == 1
        ):
            raise KeyError("boom")
        dist.barrier()
        return worker.finish(call)

    return worker.wrap(main, **callbacks[which], **FAST)()


@scenario
def reserves(worker: Worker) -> Any:
    """Two of three ranks are active; an active one is killed."""

    def main(call: inprocess.CallWrapper) -> str:
        world = worker.join()
        worker.note("entered", iteration=call.iteration, world=world, now=os.environ["RANK"])
        if call.iteration == 0 and worker.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
        return worker.finish(call)

    assignment = inprocess.Compose(
        inprocess.rank_assignment.MaxActiveWorldSize(2), inprocess.rank_assignment.ShiftRanks()
    )
    return worker.wrap(main, rank_assignment=assignment, **FAST)()


@scenario
def own_assignment(worker: Worker) -> Any:
    """A RankAssignment of the user's, which is called on every rank and uses the store."""

    class Backwards(inprocess.rank_assignment.RankAssignment):
        def __call__(self, ctx: Any) -> Any:
            ctx.store.set(f"seen/{ctx.state.rank}", "1")
            alive = [r for r in range(ctx.state.world_size) if r not in ctx.terminated_ranks]
            ctx.store.wait([f"seen/{rank}" for rank in alive], seconds(60))
            ctx.state.rank = len(alive) - 1 - alive.index(ctx.state.rank)
            ctx.state.world_size = len(alive)
            ctx.terminated_ranks.clear()
            return ctx

    assignment = inprocess.Compose(inprocess.rank_assignment.ActivateAllRanks(), Backwards())

    def main(call: inprocess.CallWrapper) -> str:
        worker.join()
        worker.note("entered", iteration=call.iteration, now=int(os.environ["RANK"]))
        if call.iteration == 0 and worker.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
        return worker.finish(call)

    return worker.wrap(main, rank_assignment=assignment, **FAST)()


@scenario
def groups_of_two(worker: Worker) -> Any:
    """Ranks work in pairs; the survivor of a broken pair is discarded."""
    assignment = inprocess.Compose(
        inprocess.rank_assignment.ActivateAllRanks(),
        inprocess.rank_assignment.ShiftRanks(),
        inprocess.rank_assignment.FilterCountGroupedByKey(
            key_or_fn=lambda state: state.rank // 2, condition=lambda count: count == 2
        ),
    )

    def main(call: inprocess.CallWrapper) -> str:
        worker.join()
        if call.iteration == 0 and worker.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
        return worker.finish(call)

    return worker.wrap(main, rank_assignment=assignment, **FAST)()


@scenario
def stores(worker: Worker) -> Any:
    """An exception with the store ``kind``."""
    kind = worker.parameters["kind"]

    class OwnStore(dist.TCPStore, inprocess.store.StoreMixin):
        """Hosted by rank 0 itself, which therefore leaves last."""

        def __init__(self, port: int) -> None:
            host = os.environ["RANK"] == "0"
            super().__init__("127.0.0.1", port, None, host, wait_for_workers=False)

        critical_ranks = (0,)

        def barrier(self, *_args: Any) -> None:
            raise AssertionError("the wrapper must not call what the user's store calls barrier")

    factories: dict[str, Any] = {
        "file": {
            "store_factory": inprocess.store.FileStore,
            "store_kwargs": {"file_name": str(worker.directory / "store"), "world_size": -1},
        },
        "own": {"store_factory": OwnStore, "store_kwargs": {"port": worker.parameters.get("port")}},
        "default": {},
    }

    def main(call: inprocess.CallWrapper) -> str:
        worker.join()
        if worker.rank == 1 and call.iteration < 2:
            raise ValueError("boom")
        dist.barrier()
        return worker.finish(call)

    return worker.wrap(main, **factories[kind], **FAST)()


@scenario
def unfinished(worker: Worker) -> Any:
    """In iteration 0 rank 1 works on and on when the others have finished."""

    def main(call: inprocess.CallWrapper) -> str:
        worker.join()
        dist.destroy_process_group()
        while call.iteration == 0 and worker.rank == 1:
            time.sleep(0.01)
        return f"iteration {call.iteration}"

    return worker.wrap(main, completion_timeout=seconds(1), **FAST)()


@scenario
def compiling(worker: Worker) -> Any:
    """A phase longer than the timeouts, then a hang that the tightened timeouts catch."""

    def main(call: inprocess.CallWrapper) -> str:
        worker.join()
        if call.iteration == 0:
            with call.phase("compile", soft_timeout=seconds(60), hard_timeout=seconds(90)):
                time.sleep(5)
            worker.note("compiled")
            if worker.rank == 1:
                time.sleep(600)
        dist.barrier()
        return worker.finish(call)

    return worker.wrap(main, **HANG)()


@scenario
def changing_timeouts(worker: Worker) -> Any:
    """Rank 2 shortens the timeouts of all ranks; rank 0 hangs."""

    def main(call: inprocess.CallWrapper) -> str:
        worker.join()
        if call.iteration == 0:
            if worker.rank == 2:
                call.set_timeouts(soft_timeout=seconds(3), hard_timeout=seconds(30))
            dist.barrier()
            if worker.rank == 0:
                time.sleep(600)
            dist.barrier()
        return worker.finish(call)

    timing = {**HANG, "soft_timeout": seconds(500), "hard_timeout": seconds(600)}
    return worker.wrap(main, barrier_timeout=seconds(700), **timing)()


@scenario
def unprotected(worker: Worker) -> Any:
    """Sections without timeouts: left by a restart, longer than both timeouts, and after them."""

    def main(call: inprocess.CallWrapper) -> str:
        worker.join()
        with call.disable_hang_protection():
            with call.disable_hang_protection():
                if call.iteration == 0 and worker.rank == 1:
                    raise ValueError("boom")
                dist.barrier()
            if call.iteration == 1:
                gil_holding_sleep(8)
        dist.barrier()
        if call.iteration == 1 and worker.rank == 0:
            time.sleep(600)
        dist.barrier()
        return worker.finish(call)

    return worker.wrap(main, **HANG)()


@scenario
def checkpointing(worker: Worker) -> Any:
    """Rank 1 fails while rank 0 is inside an atomic section."""

    def main(call: inprocess.CallWrapper) -> str:
        worker.join()
        if call.iteration == 0:
            if worker.rank == 1:
                while not (worker.directory / "writing").exists():
                    time.sleep(0.01)
                raise ValueError("boom")
            with call.atomic():
                (worker.directory / "writing").touch()
                time.sleep(1)
                worker.note("written")
            dist.barrier()
            worker.note("too far")
        return worker.finish(call)

    return worker.wrap(main, **FAST)()


def _exception_hooks() -> int:
    """How many of torch's exception hooks wrap each other."""
    hook, count = sys.excepthook, 0
    while hook.__name__ == "_distributed_excepthook":
        hook, count = inspect.getclosurevars(hook).nonlocals["old_hook"], count + 1
    return count


@scenario
def many_restarts(worker: Worker) -> Any:
    """Forty restarts; what the process holds is noted in each."""

    def main(call: inprocess.CallWrapper) -> str:
        wait_for_groups_to_end(60)
        worker.join()
        sub = dist.new_group([0, 1])
        dist.barrier(group=sub)
        worker.note(
            "holds",
            iteration=call.iteration,
            fds=len(list(Path("/proc/self/fd").iterdir())),
            threads=len(list(Path("/proc/self/task").iterdir())),
            hooks=_exception_hooks(),
        )
        if worker.rank == call.iteration % 2 and call.iteration < 40:
            raise ValueError("boom")
        dist.barrier()
        return worker.finish(call)

    limit = inprocess.initialize.RetryController(max_iterations=50)
    return worker.wrap(main, initialize=limit, **FAST)()


@scenario
def forking(worker: Worker) -> Any:
    """Rank 1 forks, and the child comes out of the function by ``how``."""
    how, parent = worker.parameters["how"], os.getpid()

    def main(call: inprocess.CallWrapper) -> str:
        worker.join()
        worker.note("entered", iteration=call.iteration)
        if worker.rank == 1:
            if (child := os.fork()) == 0:
                if how == "raise":
                    raise RuntimeError("in the child")
                if how == "exit":
                    sys.exit(7)
                return "child"
            worker.note("child", code=os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            time.sleep(1)  # a monitor process that was notified of an end would report it now
        dist.barrier()
        return worker.finish(call)

    try:
        value = worker.wrap(main, **FAST)()
    except RuntimeError:
        value = "raised"
    except SystemExit as end:
        value = f"exit {end.code}"
    if os.getpid() != parent:
        os._exit({"child": 11, "raised": 12, "exit 7": 13}[value])
    return value


@scenario
def repeated_calls(worker: Worker) -> Any:
    """The decorated function is called twice, with arguments, and restarts in both."""

    def main(number: int, call: inprocess.CallWrapper, *, word: str) -> str:
        worker.join()
        if call.iteration == 0 and worker.rank == number:
            raise ValueError("boom")
        dist.barrier()
        dist.destroy_process_group()
        return f"{word} {number} {call.iteration}"

    wrapped = worker.wrap(main, **FAST)
    return [wrapped(0, word="a"), wrapped(1, word="b")]


class NotingSnapshots:
    """A hook that notes how it is called; it may raise in each method."""

    def __init__(self, worker: Worker, rank: int) -> None:
        self._worker = worker
        self._note("made", for_rank=rank)

    def _note(self, call: str, **fields: Any) -> None:
        self._worker.note("hook", call=call, thread=threading.current_thread().name, **fields)
        if self._worker.parameters.get("raises") == call:
            raise RuntimeError("the hook is broken")

    def outside_view(self) -> OutsideViewSource | None:
        self._note("outside_view")
        return None

    def iteration_begins(self) -> None:
        self._note("iteration_begins")

    def function_left(self, error: BaseException) -> None:
        self._note("function_left", error=type(error).__name__)

    def take(self, directory: Path) -> None:
        self._note("take", directory=str(directory), groups_are_there=dist.is_initialized())

    def record_lost(self, directory: Path, rank: int, reason: str) -> None:
        written = (directory / "incident.json").exists()
        self._note("record_lost", lost=rank, reason=reason, written=written)

    def close(self, timeout_s: float) -> None:
        self._note("close")


@scenario
def hooked(worker: Worker) -> Any:
    """Rank 1 leaves with an exception; both ranks have a hook of their own."""

    def main(call: inprocess.CallWrapper) -> str:
        worker.join()
        if call.iteration == 0:
            if worker.rank == 1:
                sys.exit(3)
            dist.barrier()
        return worker.finish(call)

    def make(rank: int) -> NotingSnapshots:
        return NotingSnapshots(worker, rank)

    chosen: dict[str, Any] = {}
    if worker.parameters["registered"]:
        inprocess.snapshots.register(make)
    else:
        chosen["snapshots"] = make
    incidents = str(worker.directory / "incidents")
    return worker.wrap(main, incident_dir=incidents, **chosen, **FAST)()


@scenario
def written_incidents(worker: Worker) -> Any:
    def main(call: inprocess.CallWrapper) -> str:
        worker.join()
        if call.iteration == 0 and worker.rank == 1:
            sys.exit(3)
        dist.barrier()
        return worker.finish(call)

    if worker.parameters["snapshots"]:
        capture.install()
    return worker.wrap(main, incident_dir=str(worker.directory / "incidents"), **FAST)()
