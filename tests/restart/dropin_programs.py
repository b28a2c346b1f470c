"""Programs as users of the other wrapper write them, with the import changed and nothing else.

They use the public API only, in the forms that its guides show. ``worker`` is how they report to
the test; annotations are real objects here and text in ``dropin_annotations``.
"""

import contextlib
import datetime
import logging
import os
import signal
import socket
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
from scenarios import Worker

from ncclops import restart as inprocess


class Recorder:
    """The order in which a rank's callbacks are called, and with what."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def __call__(self, name: str, state: Any) -> Any:
        assert type(state) is inprocess.FrozenState
        self.worker.note(
            "callback",
            name=name,
            iteration=state.iteration,
            mode=state.mode.name,
            error=repr(state.fn_exception) if state.fn_exception else None,
        )
        return state


def recording(base: type, name: str, record: Recorder) -> Any:
    """An instance of a user's subclass of ``base``."""

    def call(self: Any, state: Any) -> Any:
        return record(name, state)

    return type(f"My{base.__name__}", (base,), {"__call__": call})()


def everything(worker: Worker) -> Any:
    """Every documented parameter, with callbacks of the user's own next to the shipped ones."""
    record = Recorder(worker)
    mine = {
        "initialize": recording(inprocess.initialize.Initialize, "initialize", record),
        "abort": recording(inprocess.abort.Abort, "abort", record),
        "finalize": recording(inprocess.finalize.Finalize, "finalize", record),
        "health_check": recording(inprocess.health_check.HealthCheck, "health_check", record),
        "completion": recording(inprocess.completion.Completion, "completion", record),
        "terminate": recording(inprocess.terminate.Terminate, "terminate", record),
    }

    @inprocess.Wrapper(
        store_factory=inprocess.store.TCPStore,
        store_kwargs={"timeout": datetime.timedelta(seconds=100), "use_libuv": True},
        initialize=inprocess.Compose(
            mine["initialize"],
            inprocess.initialize.RetryController(
                max_iterations=4, min_world_size=2, min_active_world_size=2
            ),
        ),
        abort=inprocess.Compose(
            mine["abort"],
            inprocess.abort.AbortTransformerEngine(),
            inprocess.abort.AbortTorchDistributed(),
        ),
        finalize=inprocess.Compose(
            mine["finalize"],
            inprocess.finalize.ThreadedFinalize(
                timeout=datetime.timedelta(seconds=50),
                fn=worker.note,
                args=("finalizing",),
                kwargs={"thread": True},
            ),
        ),
        health_check=inprocess.Compose(
            mine["health_check"],
            inprocess.health_check.CudaHealthCheck(timeout=datetime.timedelta(seconds=30)),
            inprocess.health_check.FaultCounter(max_rank_faults=2),
        ),
        rank_assignment=inprocess.Compose(
            inprocess.rank_assignment.ActivateAllRanks(),
            inprocess.rank_assignment.ShiftRanks(),
        ),
        monitor_thread_interval=datetime.timedelta(seconds=1),
        monitor_process_interval=datetime.timedelta(seconds=1),
        heartbeat_interval=datetime.timedelta(seconds=1),
        progress_watchdog_interval=datetime.timedelta(seconds=1),
        soft_timeout=datetime.timedelta(seconds=60),
        hard_timeout=datetime.timedelta(seconds=90),
        heartbeat_timeout=datetime.timedelta(seconds=30),
        barrier_timeout=datetime.timedelta(seconds=120),
        completion_timeout=datetime.timedelta(seconds=120),
        last_call_wait=datetime.timedelta(milliseconds=100),
        termination_grace_time=datetime.timedelta(seconds=0),
        monitor_process_logfile=str(worker.directory / "monitor-{rank}.log"),
        monitor_process_pidfile=str(worker.directory / "monitor-{rank}.pid"),
        enabled=True,
        completion=mine["completion"],
        terminate=mine["terminate"],
    )
    def train(steps: int, call_wrapper: inprocess.CallWrapper | None = None) -> str:
        assert call_wrapper is not None
        dist.init_process_group(backend="gloo")
        rank, world_size = dist.get_rank(), dist.get_world_size()
        assert (rank, world_size) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        pid = int((worker.directory / f"monitor-{worker.rank}.pid").read_text())
        os.kill(pid, 0)  # it is a process that runs
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for step in range(steps):
            call_wrapper.ping()
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            if step == 1 and call_wrapper.iteration == 0 and rank == 1:
                raise RuntimeError("example fault")
            with call_wrapper.atomic(), call_wrapper.atomic():
                torch.save(model.state_dict(), worker.directory / f"checkpoint-{rank}")
        with call_wrapper.disable_hang_protection():
            dist.barrier()
        dist.destroy_process_group()
        return f"{steps} steps in iteration {call_wrapper.iteration}"

    return train(4)


def older_names(worker: Worker) -> Any:
    """The older guide's job: ``rank_filter=``, two-argument keys, and warnings for each."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wrapper = inprocess.Wrapper(
            rank_assignment=inprocess.Compose(
                inprocess.rank_assignment.ShiftRanks(),
                inprocess.rank_assignment.FilterGroupedByKey(
                    key_or_fn=lambda rank, _: rank // 8,
                    condition=lambda count: count >= 2,
                ),
            ),
            rank_filter=inprocess.Compose(
                inprocess.rank_filter.WorldSizeDivisibleBy(2),
                inprocess.rank_filter.MaxActiveWorldSize(2),
            ),
        )
    deprecated = [w for w in caught if w.category is DeprecationWarning]
    worker.note("warned", about=[str(w.message) for w in deprecated])
    return wrapper(_two_of_three(worker))()


def divisible(worker: Worker) -> Any:
    """The newer guide's spelling of the same."""
    wrapper = inprocess.Wrapper(
        rank_assignment=inprocess.Compose(
            inprocess.rank_assignment.ActiveWorldSizeDivisibleBy(2),
            inprocess.rank_assignment.MaxActiveWorldSize(2),
            inprocess.rank_assignment.FillGaps(),
            inprocess.rank_assignment.FilterCountGroupedByKey(
                key_or_fn=lambda _: socket.gethostname(),
                condition=lambda count: count >= 2,
                timeout=datetime.timedelta(seconds=60),
            ),
        ),
    )
    return wrapper(_two_of_three(worker))()


def tree(worker: Worker) -> Any:
    """A host layer under a root layer, with reserves, and a filter for the world size."""
    reserve = inprocess.rank_assignment.LayerFlag.RESERVE
    backfill = inprocess.rank_assignment.LayerFlag.BACKFILL
    wrapper = inprocess.Wrapper(
        rank_assignment=inprocess.rank_assignment.Tree(
            [
                inprocess.rank_assignment.Layer(
                    min_ranks=1, max_ranks=256, key_or_fn="root", flag=reserve
                ),
                inprocess.rank_assignment.Layer(
                    min_ranks=1,
                    max_ranks=8,
                    key_or_fn=lambda _: socket.gethostname(),
                    flag=reserve | backfill,
                ),
            ],
            world_size_filter=lambda world_size: world_size // 2 * 2,
        )
    )
    return wrapper(_two_of_three(worker))()


def _two_of_three(worker: Worker) -> Any:
    """Two ranks work, the third waits; number 0 is killed, and the third takes part."""

    def work(call: inprocess.CallWrapper) -> str:
        dist.init_process_group("gloo")
        worker.note("entered", iteration=call.iteration, now=os.environ["RANK"])
        dist.barrier()
        if call.iteration == 0 and dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
        size = dist.get_world_size()
        dist.destroy_process_group()
        return f"world of {size}"

    return work


def nested(worker: Worker) -> Any:
    """An outer restarter reads the log; the job gives up after two iterations."""
    lines = logging.FileHandler(worker.directory / f"nested-{worker.rank}")
    logger = logging.getLogger("ncclops.restart.nested_restarter")
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)

    @inprocess.Wrapper(
        initialize=inprocess.Compose(
            inprocess.nested_restarter.NestedRestarterHandlingCompleted(),
            inprocess.initialize.RetryController(max_iterations=worker.parameters["limit"]),
        ),
        abort=inprocess.Compose(
            inprocess.abort.AbortTorchDistributed(),
            inprocess.nested_restarter.NestedRestarterHandlingStarting(),
        ),
        completion=inprocess.nested_restarter.NestedRestarterFinalized(),
        terminate=inprocess.nested_restarter.NestedRestarterAborted(),
    )
    def work(call: inprocess.CallWrapper) -> None:
        dist.init_process_group("gloo")
        if call.iteration == 0 and worker.rank == 0:
            raise inprocess.monitor_thread.RankShouldRestart("asked for")
        if call.iteration == 1 and worker.rank == 1:
            raise ValueError("the second fault")
        dist.barrier()
        dist.destroy_process_group()

    return work()


def late_finalize(worker: Worker) -> Any:
    """Rank 1's clean-up does not end; it is taken out and the others go on."""
    stuck = worker.rank == 1

    @inprocess.Wrapper(
        finalize=inprocess.finalize.ThreadedFinalize(
            datetime.timedelta(seconds=0.2), time.sleep, args=(600 if stuck else 0,)
        )
    )
    def work(call: inprocess.CallWrapper) -> str:
        dist.init_process_group("gloo")
        if call.iteration == 0 and worker.rank == 0:
            raise ValueError("example fault")
        dist.barrier()
        return f"world of {dist.get_world_size()}"

    return work()


def counted_faults(worker: Worker) -> Any:
    """Rank 1 faults once more than FaultCounter allows."""

    @inprocess.Wrapper(health_check=inprocess.health_check.FaultCounter(max_rank_faults=1))
    def work(call: inprocess.CallWrapper) -> str:
        dist.init_process_group("gloo")
        if worker.rank == 1:
            raise ValueError(f"fault {call.iteration}")
        dist.barrier()
        return f"iteration {call.iteration}, world of {dist.get_world_size()}"

    return work()


def swallowing(worker: Worker) -> Any:
    """The function suppresses interruptions, which DEBUG reports with the place."""

    @inprocess.Wrapper(monitor_thread_interval=datetime.timedelta(milliseconds=50))
    def work(call: inprocess.CallWrapper) -> int:
        dist.init_process_group("gloo")
        waiting = worker.directory / "rank-0-waits"
        if call.iteration == 0 and worker.rank == 1:
            # Not before the other rank is where it swallows; in its set-up it would restart.
            while not waiting.exists():
                time.sleep(0.01)
            raise ValueError("example fault")
        while call.iteration == 0:
            try:
                waiting.touch()
                while True:
                    time.sleep(0.01)
            except BaseException:  # noqa: BLE001 - what the guides forbid
                pass  # swallowed in this line
            # A second time: the report compares two looks at the stack, and the first may come
            # between the interruption and its arrival.
            with contextlib.suppress(BaseException):
                time.sleep(5)
            time.sleep(5)
        return call.iteration

    return work()


def abort_by_user(worker: Worker) -> Any:
    """RestartAbort in the function ends its rank; the wrapped function is called again later."""

    @inprocess.Wrapper()
    def work(leaving: int, call: inprocess.CallWrapper) -> str:
        dist.init_process_group("gloo")
        if dist.get_rank() == leaving:
            raise inprocess.exception.RestartAbort("no more of this")
        dist.barrier()
        return f"world of {dist.get_world_size()}"

    values = [work(-1)]
    dist.destroy_process_group()
    try:
        values.append(work(1) if worker.rank == 1 else work(-1))
    except inprocess.exception.RestartAbort as error:
        values.append(str(error))
    return values


def slow_completion(worker: Worker) -> Any:
    """Rank 1 is still in its completion callback when rank 0 has left, and the store with it."""

    class Slow(inprocess.completion.Completion):
        def __call__(self, state: inprocess.FrozenState) -> inprocess.FrozenState:
            while state.initial_rank == 1 and not (worker.directory / "server-is-gone").exists():
                worker.note("completing")
                time.sleep(0.05)
            return state

    @inprocess.Wrapper(completion=Slow())
    def work(call: inprocess.CallWrapper) -> str:
        dist.init_process_group("gloo")
        if call.iteration == 0 and worker.rank == 0:
            raise ValueError("example fault")
        dist.barrier()
        dist.destroy_process_group()
        return f"iteration {call.iteration}"

    return work()


def failing_key(worker: Worker) -> Any:
    """The key of rank 1 cannot be found when ranks are assigned anew."""

    def host(state: inprocess.State) -> str:
        if state.mode is inprocess.Mode.ACTIVE and worker.rank == 1:
            raise OSError("no host name")
        return "host"

    @inprocess.Wrapper(
        rank_assignment=inprocess.Compose(
            inprocess.rank_assignment.ShiftRanks(),
            inprocess.rank_assignment.FilterCountGroupedByKey(host, lambda count: count > 0),
        )
    )
    def work(call: inprocess.CallWrapper) -> str:
        dist.init_process_group("gloo")
        if call.iteration == 0 and worker.rank == 0:
            raise ValueError("example fault")
        dist.barrier()
        return f"world of {dist.get_world_size()}"

    return work()
