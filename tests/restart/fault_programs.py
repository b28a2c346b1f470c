"""Programs of test_faults_places.py and test_faults_interruption.py: faults in awkward places."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import re
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from refusal import refuse_pidfds
from scenarios import FAST, HANG, SCENARIOS, Worker, seconds
from torch.nn.parallel import DistributedDataParallel

from ncclops import restart as inprocess
from ncclops.restart._groups import open_operations
from ncclops.restart._store import connections as _connections
from ncclops.restart.state import FrozenState
from ncclops.restart.store import another_connection


def dying(worker: Worker) -> Any:
    """Rank ``on`` ends by signal ``how`` in the callback ``place`` on the way to iteration 1.

    It is rank 1's exception that starts the restart, so that the death comes in the middle of it.
    """
    place, on, how = (worker.parameters[name] for name in ("place", "on", "how"))

    def die(state: FrozenState, callback: str) -> FrozenState:
        on_the_way = state.iteration == (1 if callback == "initialize" else 0)
        restarting = callback == "initialize" or (worker.directory / "raised").exists()
        if worker.rank == on and callback == place and on_the_way and restarting:
            os.kill(os.getpid(), signal.Signals[how])
            time.sleep(600)
        return state

    def main(call: inprocess.CallWrapper) -> str:
        world = worker.join()
        worker.note("entered", iteration=call.iteration, world=world)
        if call.iteration == 0 and worker.rank == 1:
            (worker.directory / "raised").touch()
            raise ValueError("boom")
        dist.barrier()
        return worker.finish(call)

    return worker.wrap(
        main,
        initialize=callback_of(inprocess.initialize.Initialize, "initialize", die),
        finalize=callback_of(inprocess.finalize.Finalize, "finalize", die),
        health_check=callback_of(inprocess.health_check.HealthCheck, "health_check", die),
        **FAST,
    )()


def callback_of(base: type, name: str, function: Callable[[FrozenState, str], FrozenState]) -> Any:
    return type(base.__name__, (base,), {"__call__": lambda _, state: function(state, name)})()


def waiting_in_the_barrier(worker: Worker, timing: Mapping[str, Any] = FAST) -> Any:
    """All but rank 0 wait in the barrier between iterations, until the file ``go`` is there.

    Rank 1 has failed by then; if it is to be ``told``, when the file ``fail`` is there.
    """

    def hold_up(state: FrozenState, _: str) -> FrozenState:
        worker.note("finalize", pid=os.getpid())
        while worker.rank == 0 and not (worker.directory / "go").exists():
            time.sleep(0.02)
        return state

    def main(call: inprocess.CallWrapper) -> str:
        world = worker.join()
        worker.note("entered", iteration=call.iteration, world=world)
        if call.iteration == 0 and worker.rank == 1:
            while worker.parameters.get("told") and not (worker.directory / "fail").exists():
                time.sleep(0.02)
            raise ValueError("boom")
        dist.barrier()
        return worker.finish(call)

    finalize = callback_of(inprocess.finalize.Finalize, "finalize", hold_up)
    return worker.wrap(main, finalize=finalize, **timing)()


def raising_in_clean_up(worker: Worker) -> Any:
    """Rank 0 raises; what the others raise while they clean up comes during that restart."""
    aborting, out = threading.Event(), threading.Event()

    class LateError(Exception):
        """Tells when it is looked at: then it has left the function."""

        def __str__(self) -> str:
            out.set()
            return "the second"

    def abort(state: FrozenState, _: str) -> FrozenState:
        aborting.set()
        if worker.rank:
            out.wait()
        return state

    local: weakref.ref[torch.nn.Module] | None = None

    def main(call: inprocess.CallWrapper) -> str:
        nonlocal local
        worker.join()
        worker.note("entered", iteration=call.iteration, holds=local is not None and bool(local()))
        if call.iteration == 0:
            model = torch.nn.Linear(2, 2)
            local = weakref.ref(model)

            def fail(error: Exception) -> None:
                assert model is not None  # the function holds it, too
                raise error

            if worker.rank == 0:
                others = dist.get_world_size() - 1
                while len(list(worker.directory.glob("waits-*"))) < others:
                    time.sleep(0.01)
                fail(ValueError("the first"))
            (worker.directory / f"waits-{worker.rank}").touch()
            aborting.wait()
            fail(LateError())
        dist.barrier()
        return worker.finish(call)

    first = callback_of(inprocess.abort.Abort, "abort", abort)
    both = inprocess.Compose(inprocess.abort.AbortTorchDistributed(), first)
    return worker.wrap(main, abort=both, **FAST)()


def connecting_while_another_thread_does(worker: Worker) -> Any:
    """Rank 0 waits in vain, on a store that it has connected to while its reporter did; rank 1 does
    on a store of its own, made before the call, which is of use after it.
    """
    connecting = threading.Event()
    own = dist.PrefixStore("own", dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False))

    def slowly(store: dist.Store, address: str | None) -> dist.Store:
        if threading.current_thread() is not threading.main_thread():
            connecting.set()
            time.sleep(0.5)  # for the main thread, which does not announce that it waits
        return another_connection(store, address)

    def main(call: inprocess.CallWrapper) -> str:
        worker.note("entered", iteration=call.iteration)
        assert own.add("entered", 1) == call.iteration + 1
        if call.iteration == 0:
            if worker.rank == 1:
                own.get("nothing")
            call.request_restart("with the first report the reporter connects")
            connecting.wait()
        worker.join()
        return worker.finish(call)

    _connections.another_connection = slowly  # type: ignore[assignment,attr-defined] # looked up there
    return worker.wrap(main, **FAST)()


def hanging_in_the_abort(worker: Worker) -> Any:
    """Rank 2 raises; the abort hangs on the others, and rank 0 is where nothing interrupts it."""

    def hang(state: FrozenState, _: str) -> FrozenState:
        if worker.rank < 2:
            threading.Event().wait()
        return state

    def main(call: inprocess.CallWrapper) -> str:
        worker.join()
        if call.iteration == 0:
            if worker.rank == 2:
                raise ValueError("boom")
            if worker.rank == 0:
                lock, lock_mutex = (
                    ctypes.create_string_buffer(64),
                    ctypes.CDLL(None).pthread_mutex_lock,
                )
                lock_mutex(lock)
                lock_mutex(lock)
            time.sleep(600)
        dist.barrier()
        return worker.finish(call)

    abort = callback_of(inprocess.abort.Abort, "abort", hang)
    both = inprocess.Compose(abort, inprocess.abort.AbortTorchDistributed())
    timeouts = {"soft": seconds(500), "hard": seconds(600), "barrier": seconds(1300)}
    timing = {f"{name}_timeout": limit for name, limit in timeouts.items()}
    return worker.wrap(main, abort=both, abort_timeout=seconds(1), **FAST, **timing)()


def leaving_a_group_behind(worker: Worker) -> Any:
    """The abort finds no group, as when one is completed just after it has looked."""

    def main(call: inprocess.CallWrapper) -> str:
        worker.note("entered", iteration=call.iteration)
        worker.join()
        if call.iteration == 0:
            raise ValueError("boom")
        return worker.finish(call)

    return worker.wrap(main, abort=None, **FAST)()


def raising_at_once(worker: Worker) -> Any:
    """Each rank raises in the first line of the function, in as many iterations as it has left."""

    def main(call: inprocess.CallWrapper) -> str:
        worker.note("entered", iteration=call.iteration)
        if call.iteration <= worker.rank:
            raise ValueError(f"rank {worker.rank}")
        worker.join()
        return worker.finish(call)

    return worker.wrap(main, **FAST)()


def raising_in_signal_handlers(worker: Worker) -> Any:
    """A handler of rank 1 raises when a restart is under way, and again in the next iteration."""

    def strike(state: FrozenState, _: str) -> FrozenState:
        if worker.rank == 1:
            signal.raise_signal(signal.SIGALRM)
        return state

    def fail(number: int, _: object) -> None:
        raise TimeoutError(f"signal {number}")

    def main(call: inprocess.CallWrapper) -> str:
        worker.join()
        worker.note("entered", iteration=call.iteration)
        if call.iteration < 2 and worker.rank == 1:
            signal.signal(signal.SIGALRM, fail)
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            time.sleep(600)
        dist.barrier()
        worker.note("has", handler=getattr(signal.getsignal(signal.SIGALRM), "__name__", None))
        return worker.finish(call)

    finalize = callback_of(inprocess.finalize.Finalize, "finalize", strike)
    return worker.wrap(main, finalize=finalize, **FAST)()


def abandoning_an_inner_call(worker: Worker) -> Any:
    """Rank 0 raises when rank 1 waits for it in the first barrier of an inner call."""
    inner = worker.wrap(print, **FAST)

    def main(call: inprocess.CallWrapper) -> str:
        if call.iteration == 0 and worker.rank == 1:
            (worker.directory / "there").touch()
            inner()
        if call.iteration == 0:
            while not (worker.directory / "there").exists():
                time.sleep(0.01)
            time.sleep(1)
            raise ValueError("boom")
        worker.note("threads", names=[thread.name for thread in threading.enumerate()])
        worker.join()
        return worker.finish(call)

    return worker.wrap(main, **FAST)()


def awkward(worker: Worker) -> Any:
    """Rank 0 raises when rank 1 is in the middle of ``where``."""
    where = PLACES[worker.parameters["where"]]

    def main(call: inprocess.CallWrapper) -> str:
        worker.join()
        worker.note("entered", iteration=call.iteration)
        if call.iteration == 0 and worker.rank == 0:
            while not (worker.directory / "there").exists():
                time.sleep(0.01)
            time.sleep(0.05)
            raise ValueError("boom")
        if call.iteration == 0 and worker.rank == 1:
            (worker.directory / "there").touch()
            where()
            worker.note("survived")
        dist.barrier()
        return worker.finish(call)

    return worker.wrap(main, **(HANG if where is in_endless_swallowing else FAST))()


def in_del() -> None:
    """An exception that is raised in a finalizer is printed and lost."""

    class Slow:
        def __del__(self) -> None:
            end = time.monotonic() + 0.02
            while time.monotonic() < end:
                pass

    while True:
        Slow()
        time.sleep(0.02)


def in_except() -> None:
    """The handler of another exception."""
    while True:
        try:
            raise KeyError("something else")
        except KeyError:
            with contextlib.suppress(ValueError):
                time.sleep(0.01)


def in_swallowing_except() -> None:
    """A handler of everything, in a loop: the usual retry of a third-party library."""
    for _ in range(5):
        try:
            while True:
                time.sleep(0.001)
        except BaseException:  # noqa: BLE001 - that is the point
            continue
    while True:
        time.sleep(0.01)


def in_endless_swallowing() -> None:
    """A retry without an end: it would never leave the function."""
    while True:
        with contextlib.suppress(BaseException):
            while True:
                time.sleep(0.001)


def in_suppressing() -> None:
    """Goes on with its groups when they have been aborted."""
    while dist.is_initialized():
        with contextlib.suppress(BaseException):
            dist.barrier()
    dist.barrier()


def in_clean_up() -> None:
    """A context manager that is just closing."""

    @contextlib.contextmanager
    def resource() -> Any:
        try:
            yield
        finally:
            time.sleep(0.01)

    while True:
        with resource():
            pass


def in_generator_exit() -> None:
    """A generator that takes its time to close."""

    def batches() -> Any:
        try:
            while True:
                yield
        finally:
            for _ in range(100):
                time.sleep(0.01)

    while True:
        batch = batches()
        next(batch)
        batch.close()


def in_cancellation() -> None:
    """A task of asyncio that takes its time to end when it is cancelled."""

    async def cancelled() -> None:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            for _ in range(100):
                time.sleep(0.01)
            raise

    async def main() -> None:
        while True:
            task = asyncio.create_task(cancelled())
            await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    asyncio.run(main())


def in_task_group() -> None:
    """Tasks of a group, of which one is interrupted and the others are cancelled for that."""

    async def work() -> None:
        while True:
            sum(range(2000))
            await asyncio.sleep(0)

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(work())
            group.create_task(work())

    asyncio.run(main())


def in_executor() -> None:
    """The end of a ``with`` waits for a thread that goes on."""
    with ThreadPoolExecutor(1) as executor:
        executor.submit(time.sleep, 600)
        time.sleep(600)


def in_exit_stack() -> None:
    """Several context managers that take their time to close, one after the other."""

    @contextlib.contextmanager
    def resource() -> Any:
        try:
            yield
        finally:
            for _ in range(10):
                time.sleep(0.02)

    with contextlib.ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(resource())
        time.sleep(600)


def in_c_code() -> None:
    """C code that calls Python and cannot hand an exception on: ctypes prints and forgets it."""
    compare_type = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    numbers = (ctypes.c_int * 64)(*range(64))

    def compare(_a: int, _b: int) -> int:
        return len([None] * 500) - 500

    callback = compare_type(compare)
    libc = ctypes.CDLL(None)
    while True:
        libc.qsort(numbers, 64, ctypes.sizeof(ctypes.c_int), callback)
        time.sleep(0.005)


def in_an_extension() -> None:
    """An operation of torch that takes a while and does not look for exceptions."""
    matrix = torch.ones(600, 600)
    while True:
        matrix = torch.clamp(matrix @ matrix, max=1.0)


PLACES = {
    "del": in_del,
    "except": in_except,
    "swallowing": in_swallowing_except,
    "endless-swallowing": in_endless_swallowing,
    "suppressing": in_suppressing,
    "clean-up": in_clean_up,
    "generator-exit": in_generator_exit,
    "cancellation": in_cancellation,
    "task-group": in_task_group,
    "c-callback": in_c_code,
    "extension": in_an_extension,
    "executor": in_executor,
    "exit-stack": in_exit_stack,
}


def many_groups(worker: Worker) -> Any:
    """Rank 2 raises while the others are blocked, each in another of many groups."""

    def main(call: inprocess.CallWrapper) -> str:
        worker.make_group()
        members = list(range(dist.get_world_size()))
        groups = [dist.new_group(members) for _ in range(8)]
        pairs = [dist.new_group([a, 2]) for a in (0, 1)]
        for group in groups:
            dist.all_reduce(worker.ones(), group=group)
        worker.note("entered", iteration=call.iteration, world=len(members))
        dist.barrier()  # with NCCL nothing else has rank 2 wait until the others have noted that
        if call.iteration == 0:
            if worker.rank == 2:
                raise ValueError("boom")
            dist.barrier(group=pairs[worker.rank])
        dist.barrier(group=groups[3])
        return worker.finish(call)

    return worker.wrap(main, **FAST)()


def receiving(worker: Worker) -> Any:
    """Ranks 0 and 1 wait for a message of rank 2, which raises; each pair has had one before."""

    def main(call: inprocess.CallWrapper) -> str:
        worker.join()
        messages = 1 if call.iteration == 0 else 2
        for number in range(2):
            for peer in (0, 1):
                if worker.rank == 2 and number == messages:
                    worker.note("entered", iteration=call.iteration)
                    raise ValueError("boom")
                if worker.rank == 2:
                    dist.send(worker.ones() * number, peer)
            if worker.rank != 2:
                message = worker.ones()
                dist.recv(message, 2)
                assert int(message) == number  # waits for the device, too
        worker.note("entered", iteration=call.iteration)
        return worker.finish(call)

    return worker.wrap(main, **FAST)()


def waiting_for_the_device(worker: Worker) -> Any:
    """Rank 0 waits for what the device does not end, again and again, and has a next statement."""
    waits: dict[str, Callable[[dist.Work, torch.Tensor], object]] = {
        "device": lambda _, __: torch.cuda.synchronize(),
        "stream": lambda work, _: (work.wait(), torch.cuda.current_stream().synchronize()),
        "item": lambda work, number: (work.wait(), number.item()),
    }
    wait = waits[worker.parameters["on"]]

    def main(call: inprocess.CallWrapper) -> str:
        worker.join()
        if call.iteration < worker.parameters["times"]:
            if worker.rank == 1:
                time.sleep(0.1)  # nothing announces that the other one waits
                raise ValueError("boom")
            number = worker.ones()
            wait(dist.all_reduce(number, async_op=True), number)
            os.mkdir(worker.directory / f"after-{call.iteration}")  # noqa: PTH102 - no Python code
        return worker.finish(call)

    return worker.wrap(main, **FAST)()


def making_a_pair(worker: Worker) -> Any:
    """Ranks 0 and 1 make a communicator of their own in groups that have all been used, when rank
    2 raises; where ``missing``, so does rank 1, and does not come to it. torch's first engine makes
    it for the pair's ``first message``, the second one for a ``new group``, by all ranks."""

    def main(call: inprocess.CallWrapper) -> str:
        worker.join()
        pair = dist.new_group([0, 1])
        if dist.get_rank() < 2:
            dist.all_reduce(worker.ones(), group=pair)
        if call.iteration == 0:
            if worker.rank == 2 or (worker.rank == 1 and worker.parameters["missing"]):
                while not (worker.directory / "there").exists():
                    time.sleep(0.01)
                time.sleep(0.3)  # nothing announces that rank 0 is in NCCL
                raise ValueError("boom")
            (worker.directory / "there").touch()
            if worker.parameters["by"] == "new group":
                dist.new_group([0, 1])
            else:
                move = dist.send if worker.rank == 0 else dist.recv
                move(worker.ones(), 1 - worker.rank, group=pair)
            dist.barrier()
        return worker.finish(call)

    return worker.wrap(main, **FAST)()


class OnHost(torch.nn.Module):
    """Has its weight on the device, and multiplies with it on the host."""

    def __init__(self, weight: torch.nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * self.weight.cpu()


def first_backward(worker: Worker) -> Any:
    """Rank 1 raises when rank 0 makes the pair's communicator in a backward pass, out of C++."""

    def main(call: inprocess.CallWrapper) -> str:
        worker.join()
        pair = dist.new_group([0, 1])
        if worker.rank < 2:
            weights = torch.nn.Parameter(worker.ones())
            model = DistributedDataParallel(OnHost(weights), process_group=pair, init_sync=False)
        if call.iteration == 0:
            if worker.rank == 1:
                while not (worker.directory / "there").exists():
                    time.sleep(0.01)
                time.sleep(0.3)  # nothing announces that rank 0 is in NCCL
                raise ValueError("boom")
            if worker.rank == 0:
                loss = model(torch.ones(4, 2)).sum()
                (worker.directory / "there").touch()
                loss.backward()
            dist.barrier()
        return worker.finish(call)

    return worker.wrap(main, **FAST)()


def ending_groups(worker: Worker) -> Any:
    """Rank 1 raises when the others are in the end of their groups."""

    def main(call: inprocess.CallWrapper) -> str:
        worker.join()
        dist.new_group([0, 1, 2])
        if call.iteration == 0 and worker.rank == 1:
            while not (worker.directory / "there").exists():
                time.sleep(0.01)
            time.sleep(0.3)  # nothing announces that the others are in torch
            raise ValueError("boom")
        (worker.directory / "there").touch()
        return worker.finish(call)

    return worker.wrap(main, **FAST)()


class RecorderHook:
    """In the place of the object that torch holds for each group from 2.15 on."""


def recorder_hooks(worker: Worker) -> Any:
    """Rank 1 raises; rank 0 looks at the flight recorder's hooks when the abort has begun."""
    hooks: list[weakref.ref[Any]] = []

    def main(call: inprocess.CallWrapper) -> str:
        if call.iteration == 1:
            worker.note("hooks", held=[hook() is not None for hook in hooks])
        worker.join()
        if call.iteration == 0:
            world = dist.distributed_c10d._world
            if not hasattr(world, "pg_flight_recorder_hooks"):
                world.pg_flight_recorder_hooks = {dist.group.WORLD: RecorderHook()}
            hooks.extend(map(weakref.ref, world.pg_flight_recorder_hooks.values()))
            dist.barrier()
            if worker.rank == 1:
                raise ValueError("boom")
            try:
                while True:
                    time.sleep(0.01)
            finally:
                assert not world.pg_flight_recorder_hooks
                worker.note("hooks", held=[hook() is not None for hook in hooks])
        return worker.finish(call)

    return worker.wrap(main, **FAST)()


def told_by_nccl(worker: Worker) -> Any:
    """NCCL fails on rank 1, in the collective of iteration 0 for which both wait."""

    def main(call: inprocess.CallWrapper) -> str:
        worker.join()
        total = worker.ones()
        dist.all_reduce(total)
        total.item()
        worker.note("compiler", is_loaded="torch._inductor" in sys.modules)
        return worker.finish(call)

    return worker.wrap(main, **FAST)()


def raises_amid_operations(worker: Worker) -> Any:
    """Rank 1, in iteration 0, between the operations that NCCL is to run as one."""

    def main(call: inprocess.CallWrapper) -> str:
        worker.join()
        total = worker.ones()
        with dist._coalescing_manager(device=total.device):
            dist.all_reduce(total)
            if call.iteration == 0 and worker.rank == 1:
                raise RuntimeError("amid operations")
        total.item()
        return worker.finish(call)

    return worker.wrap(main, **FAST)()


def exchanging(worker: Worker) -> Any:
    """Rank 1 raises in iteration 0 while rank 0 is in the middle of a batch of messages, where it
    ``waits`` for the restart, which waits for the end of the batch, or for good."""
    in_batch = worker.directory / "in-batch"

    def in_the_middle() -> None:
        in_batch.touch()
        while worker.parameters["waits"] == "for good" or not open_operations._restarts:
            time.sleep(0.001)

    def exchange(call: inprocess.CallWrapper) -> float:
        """What the rank before has sent, in the way of ``batch_isend_irecv``."""
        rank, size = dist.get_rank(), dist.get_world_size()
        sent, received = worker.ones() * rank, worker.ones()
        with dist._coalescing_manager(device=sent.device, async_ops=True) as batch:
            dist.isend(sent, (rank + 1) % size)
            if call.iteration == 0 and rank == 0:
                in_the_middle()
            dist.irecv(received, (rank - 1) % size)
        batch.wait()
        return received.item()

    def main(call: inprocess.CallWrapper) -> str:
        worker.join()
        if call.iteration == 0 and worker.rank == 1:
            while not in_batch.exists():
                time.sleep(0.001)
            raise ValueError("boom")
        assert exchange(call) == (dist.get_rank() - 1) % dist.get_world_size()
        return worker.finish(call)

    return worker.wrap(main, **FAST)()


def meets_a_cuda_error(worker: Worker) -> Any:
    """CUDA fails on rank 1, in the collective of iteration 0."""

    def main(call: inprocess.CallWrapper) -> str:
        worker.join()
        total = worker.ones()
        dist.all_reduce(total)
        total.item()
        return worker.finish(call)

    return worker.wrap(main, **FAST)()


def silent(worker: Worker) -> Any:
    """All wait for the file ``go`` in iteration 0, without any need of each other."""

    def main(call: inprocess.CallWrapper) -> str:
        worker.note("entered", iteration=call.iteration, world=int(os.environ["WORLD_SIZE"]))
        while call.iteration == 0:
            time.sleep(0.02)
        worker.join()
        return worker.finish(call)

    patient = {"soft_timeout": seconds(40), "hard_timeout": seconds(50)}
    return worker.wrap(main, **{**HANG, **patient})()


def waiting_for_a_busy_rank(worker: Worker) -> Any:
    """The others wait for rank 0 until the file ``go`` is there."""

    def main(call: inprocess.CallWrapper) -> str:
        worker.join()
        worker.note("entered", iteration=call.iteration)
        while worker.rank == 0 and not (worker.directory / "go").exists():
            time.sleep(0.02)
        dist.barrier()
        return worker.finish(call)

    limits = {"soft_timeout": seconds(6), "hard_timeout": seconds(8)}
    return worker.wrap(main, **{**HANG, **limits})()


def without_pidfds(worker: Worker) -> Any:
    """The scenario ``then`` where a seccomp filter refuses pidfds."""
    refuse_pidfds()
    return SCENARIOS[worker.parameters["then"]](worker)


class Endless(Exception):
    """One that cannot be put into words."""

    def __str__(self) -> str:
        time.sleep(600)
        return ""


def raising_what_hangs(worker: Worker) -> Any:
    """Rank 1 raises it; the other one waits in a collective."""

    def main(call: inprocess.CallWrapper) -> str:
        worker.join()
        worker.note("entered", iteration=call.iteration)
        if call.iteration == 0 and worker.rank == 1:
            raise Endless
        dist.barrier()
        return worker.finish(call)

    return worker.wrap(main, **HANG)()


def failing_to_start_a_thread(worker: Worker) -> Any:
    """Rank 1, in its main thread: its stack would be larger than the address space."""

    def main(call: inprocess.CallWrapper) -> str:
        worker.join()
        worker.note("entered", iteration=call.iteration)
        if call.iteration == 0 and worker.rank == 1:
            threading.stack_size(1 << 48)
            try:
                threading.Thread(target=print).start()
            finally:
                threading.stack_size(0)
        dist.barrier()
        return worker.finish(call)

    return worker.wrap(main, **HANG)()


def leaving_modes_in_force(worker: Worker) -> Any:
    """Rank 0 raises where torch's modes are not restored; it counts on them in iteration 1."""

    def main(call: inprocess.CallWrapper) -> str:
        worker.join()
        weight = torch.ones(2, 2, requires_grad=True)
        product = weight @ weight
        product.sum().backward()
        assert product.dtype is torch.float32
        if call.iteration == 0 and worker.rank == 0:
            torch.set_grad_enabled(False)
            torch.autocast("cpu", dtype=torch.bfloat16).__enter__()
            raise ValueError("boom")
        dist.barrier()
        return worker.finish(call)

    return worker.wrap(main, **FAST)()


def leaving_keys_behind(worker: Worker) -> Any:
    """Each iteration has a group and a call inside it; the last one lists what there is."""
    times = 4

    def main(call: inprocess.CallWrapper) -> str:
        worker.join()
        dist.destroy_process_group()
        worker.wrap(lambda: None, on_incident=None, **FAST)()
        worker.join()
        if call.iteration < times:
            if worker.rank == call.iteration % 2:
                raise ValueError("boom")
            time.sleep(600)
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(*address, is_master=False)
        earlier = re.compile(rf"call0/[0-{times - 1}]/(groups|call)")
        while worker.rank == 0 and any(map(earlier.search, store.list_keys())):
            time.sleep(0.02)  # another thread deletes them, which announces nothing
        return worker.finish(call)

    return worker.wrap(main, **FAST)()


def making_groups_again(worker: Worker) -> Any:
    """Group after group in an iteration; on rank 0 the store is used without a group once."""

    def main(call: inprocess.CallWrapper) -> str:
        for number in range(8):
            if worker.rank == 0 and number == 5:
                next(dist.rendezvous("env://"))
            worker.join()
            dist.destroy_process_group()
        if call.iteration == 0 and worker.rank == 0:
            raise ValueError("boom")
        worker.join()
        return worker.finish(call)

    return worker.wrap(main, **FAST)()
