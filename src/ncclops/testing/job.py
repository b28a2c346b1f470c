"""``Job``: the ranks of one job, from their start to what became of them."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

from ncclops.errors import UsageError
from ncclops.restart.state import RETURNING
from ncclops.testing import _processes
from ncclops.testing._channel import Channel
from ncclops.testing._fork_server import ForkServer
from ncclops.testing._order import RankOrder
from ncclops.testing._store_proxy import ProxiedStore
from ncclops.testing._target import Target
from ncclops.testing._watch import RankWatch, Watch
from ncclops.testing.errors import DeadlineExceeded, FaultDidNotStrike, HarnessError, LeftBehind
from ncclops.testing.faults import Fault, FaultKind
from ncclops.testing.interpreter import Interpreter
from ncclops.testing.results import JobResult, Note

# Much more than a healthy job of a test takes, and less than pytest-timeout is usually set to.
DEADLINE = timedelta(seconds=120)
# Monitor processes and the store's server end by themselves when their ranks have.
GONE_WITHIN = timedelta(seconds=30)
_LOOK_AGAIN_S = 0.02
_DUMPED_WITHIN_S = 2.0


class Job:
    """``world_size`` ranks that each call ``target(*args, **kwargs)``, each a process of its own.

    ``target`` is a function at the top level of a module, wrapped or calling what is wrapped, or
    ``module:name`` or ``file.py:name``. ``args``, ``kwargs`` and what it returns are pickled.

    - ``faults``: what strikes; ranks are initial ranks. A fault whose rank never comes to its place
      fails the job, unless ``all_strike`` is False or another fault took that rank.
    - ``deadline``: from the start until all ranks have ended.
    - ``wrapper``: parameters of ``Wrapper`` that replace those in the code under test, in every
      call, such as ``{"soft_timeout": timedelta(seconds=3)}``: a test of a hang waits for them.
    - ``env``: variables of all ranks, besides those of this process, ``RANK``, ``WORLD_SIZE``,
      ``MASTER_ADDR`` and ``MASTER_PORT``. What a launcher has set here is not handed on.
    - ``gone_within``: monitor processes, forked children and the store's server have so long to end
      after the last rank.
    - ``proxied_store``: put a proxy between each rank and a store of the job's own; needed by
      ``store``, and implied by faults that do something to the store or lose a host.
    - ``directory``: for logs; made if it is not there.

    Raises ``UsageError`` for a function that another process could not find, for ranks that the
    job does not have, and for two faults of one rank at the same passing. For one thread at a time.
    """

    def __init__(
        self,
        target: Callable[..., Any] | str,
        *,
        world_size: int,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        faults: Iterable[Fault] = (),
        deadline: timedelta = DEADLINE,
        wrapper: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        proxied_store: bool = False,
        all_strike: bool = True,
        gone_within: timedelta = GONE_WITHIN,
        directory: Path,
        server: ForkServer,
    ) -> None:
        _check(world_size, deadline, gone_within, env or {})
        self.faults = _checked_faults(faults, world_size)
        self.world_size = world_size
        self.directory = directory
        self.port = _processes.free_port()
        self.tag = uuid.uuid4().hex
        self.env = dict(env or {})
        self.pids: dict[int, int] = {}
        self._target = Target.of(target)
        self._call = _pickled(
            args=tuple(args),
            kwargs=dict(kwargs or {}),
            faults=self.faults,
            wrapper=dict(wrapper or {}),
        )
        self._later_call = _pickled(
            args=tuple(args), kwargs=dict(kwargs or {}), faults=(), wrapper=dict(wrapper or {})
        )
        self._deadline = deadline
        self._end = 0.0
        self._all_strike = all_strike
        self._gone_within_s = gone_within.total_seconds()
        self._server = server
        self._proxied = proxied_store or any(fault.from_outside for fault in self.faults)
        self._store: ProxiedStore | None = None
        self._watch: Watch | None = None

    def run(self) -> JobResult:
        """Start, wait, and what became of it. See ``wait`` for what it raises."""
        return self.start().wait()

    def start(self) -> Job:
        """Start all ranks; returns when each has a process. Once for each job."""
        if self._end:
            raise UsageError("this job has been started before: make another one for another run")
        self.directory.mkdir(parents=True, exist_ok=True)
        self._end = time.monotonic() + self._deadline.total_seconds()
        if self._proxied:
            self._store = ProxiedStore(range(self.world_size), self.directory / "log-store")
        watches = {}
        for rank in range(self.world_size):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            watches[rank] = RankWatch(rank, Channel(ours, self.directory))
            with theirs:
                self._server.fork(self._order(rank), theirs)
        self._watch = watch = Watch(watches, self.faults, self._carry_out)
        self._until(lambda: all(each.pid for each in watches.values()), "the start")
        self.pids = {rank: each.pid for rank, each in watch.ranks.items() if each.pid is not None}
        return self

    def wait(self) -> JobResult:
        """Until all ranks have ended and nothing of the job is left.

        Raises ``DeadlineExceeded``, ``FaultDidNotStrike`` and ``LeftBehind``.
        """
        self.join()
        self.expect_nothing_left()
        result = self._started().result(self.directory)
        if self._all_strike:
            self._expect_strikes(result)
        return result

    def join(self) -> dict[int, int]:
        """Until all ranks have ended: their exit codes. Raises ``DeadlineExceeded``."""
        ranks = self._started().ranks
        self._until(lambda: all(each.code is not None for each in ranks.values()), "the end")
        return {rank: each.code for rank, each in ranks.items() if each.code is not None}

    def expect_nothing_left(self) -> None:
        """Until all processes of the job have ended. Raises ``LeftBehind``."""
        end = time.monotonic() + self._gone_within_s
        while left := self.processes():
            if time.monotonic() > end:
                raise LeftBehind(
                    f"all ranks have ended, and {self._gone_within_s:.0f} s later these processes "
                    f"of the job are still there: {left}; logs in {self.directory}"
                )
            time.sleep(_LOOK_AGAIN_S)  # other processes' ends announce nothing

    def wait_for(self, name: str, rank: int | None = None, count: int = 1) -> list[Note]:
        """Until there are ``count`` notes called ``name`` (of ``rank``).

        Raises ``DeadlineExceeded``, and ``HarnessError`` when the ranks have ended without them.
        """
        watch = self._started()
        ranks = watch.ranks.values() if rank is None else [watch.ranks[self._known(rank)]]
        what = f"{count} notes {name!r}" + ("" if rank is None else f" of rank {rank}")

        def enough() -> bool:
            return len(self.notes(name, rank)) >= count

        self._until(lambda: enough() or all(each.code is not None for each in ranks), what)
        if not enough():
            endings = ", ".join(
                f"rank {each.rank}: {each.result(self.directory).ending}" for each in ranks
            )
            raise HarnessError(
                f"{what} will not come, there are {len(self.notes(name, rank))}: {endings}; "
                f"logs in {self.directory}"
            )
        return self.notes(name, rank)

    def notes(self, name: str | None = None, rank: int | None = None) -> list[Note]:
        """The notes so far, in order of time; those called ``name`` and of ``rank``."""
        notes = self._started().notes()
        return [n for n in notes if name in (None, n.name) and rank in (None, n.rank)]

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Signal the main process of ``rank``; nothing where it has ended."""
        _processes.send(number, [self._pid(rank)])

    def replace(self, rank: int) -> None:
        """Start a new process for ``rank``, whose process has ended: with ``grow_timeout``, it
        takes its place. No fault strikes it; results are of it, notes and incidents of both.

        Raises ``UsageError`` where its process has not ended.
        """
        watch = self._started()
        if watch.ranks[self._known(rank)].code is None:
            raise UsageError(f"rank {rank}: its process has not ended; wait for that first")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        new = watch.replace(RankWatch(rank, Channel(ours, self.directory)))
        order = self._order(rank)
        environment = {**order.environment, RETURNING: "1"}
        with theirs:
            self._server.fork(
                replace(order, call=self._later_call, environment=environment), theirs
            )
        self._until(lambda: bool(new.pid), f"the start of rank {rank}")
        assert new.pid is not None
        self.pids[rank] = new.pid

    def lose_host(self, ranks: Collection[int]) -> None:
        """SIGKILL to all processes of ``ranks`` at once."""
        doomed: set[int] = set()
        for rank in ranks:
            doomed |= _processes.of_rank(self.tag, rank, self._pid(rank))
        _processes.vanish(doomed)

    @property
    def store(self) -> ProxiedStore:
        """The store, to reset its connections or slow it down while the job runs."""
        if self._store is None and self._proxied:
            self._started()
        if self._store is None:
            raise UsageError("this job has no store of its own: make it with proxied_store=True")
        return self._store

    def processes(self) -> list[int]:
        """The living processes of the job: ranks, what they have started, the store's server."""
        sessions = {each.pid for each in self._started().ranks.values() if each.pid is not None}
        own = {self._store.pid} if self._store is not None else set()
        return sorted(_processes.of_job(self.tag, sessions, self.port) - own)

    def close(self) -> None:
        """End what is still there. Idempotent."""
        if self._watch is not None:
            _processes.send(signal.SIGKILL, self.processes())
            self._watch.close()
            self._watch = None
        if self._store is not None:
            self._store.close()
            self._store = None

    # --- inside -------------------------------------------------------------------------------

    def _order(self, rank: int) -> RankOrder:
        environment = {
            **{name: value for name, value in os.environ.items() if name not in _OF_LAUNCHERS},
            "RANK": str(rank),
            "WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
            "NCCLOPS_STORE_LOG": str(self.directory / "log-store"),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            _processes.TAG: f"{self.tag}:{rank}",
            **({"NCCLOPS_STORE": self._store.addresses[rank]} if self._store is not None else {}),
            **self._server.interpreter.environment,
            **self.env,
        }
        path = [os.path.abspath(place) for place in sys.path]  # noqa: PTH100 - "" is this directory
        return RankOrder(
            rank=rank,
            target=self._target,
            call=self._call,
            directory=self.directory,
            environment=environment,
            working_directory=str(Path.cwd()),
            path=self._server.interpreter.path(path),
        )

    def _carry_out(self, fault: Fault) -> None:
        """In the thread of the watch: the rank waits at the place meanwhile."""
        match fault.kind:
            case FaultKind.LOST_HOST:
                self.lose_host({fault.rank, *fault.ranks})
            case FaultKind.LOST_CONNECTION:
                self.store.lose_connections(fault.rank, silent=fault.silent)
            case FaultKind.CUT_OFF:
                self.store.cut_off(fault.rank, silent=fault.silent)
            case FaultKind.SLOW_STORE:
                self.store.slow_down(fault.delay, fault.duration)
            case FaultKind.PAUSED_STORE:
                self.store.pause(fault.duration)

    def _known(self, rank: int) -> int:
        if rank not in range(self.world_size):
            raise UsageError(f"rank {rank}: the job has ranks 0 to {self.world_size - 1}")
        return rank

    def _pid(self, rank: int) -> int:
        pid = self._started().ranks[self._known(rank)].pid
        assert pid is not None
        return pid

    def _started(self) -> Watch:
        if self._watch is None:
            raise HarnessError(
                "this job is not running: call start() first, and nothing after close()"
            )
        return self._watch

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        watch = self._started()
        while not watch.wait(condition, self._end - time.monotonic()):
            raise DeadlineExceeded(self._late(watch, what))

    def _late(self, watch: Watch, what: str) -> str:
        late = [each for each in watch.ranks.values() if each.code is None]
        # each rank writes the stacks of its threads into its log, and ends
        _processes.send(signal.SIGABRT, {each.pid for each in late if each.pid is not None})
        watch.wait(lambda: all(each.code is not None for each in late), _DUMPED_WITHIN_S)
        tails = [
            f"--- rank {rank}, {result.ending}; {result.log}\n{result.log_tail()}"
            for rank, result in watch.result(self.directory).ranks.items()
        ]
        ranks = ", ".join(str(each.rank) for each in late) or "none"
        return (
            f"{what}: not within {self._deadline}; not ended: {ranks}; "
            f"struck: {', '.join(str(s.fault) for s in watch.strikes()) or 'nothing'}\n"
            + "\n".join(tails)
        )

    def _expect_strikes(self, result: JobResult) -> None:
        struck = [strike.fault for strike in result.strikes]
        missing = [f for f in self.faults if f not in struck and f.rank not in result.taken]
        if missing:
            raise FaultDidNotStrike(
                f"{'; '.join(map(str, missing))}: that rank did not come there so often; check the "
                "name of the place and n, or give all_strike=False"
            )

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


# What a launcher has said to this process is not meant for the ranks of a test.
_OF_LAUNCHERS = frozenset(
    {"LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "NCCLOPS_STORE"}
    | {"NCCLOPS_STORE_PREFIX", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID"}
)


def _check(
    world_size: int, deadline: timedelta, gone_within: timedelta, env: Mapping[str, str]
) -> None:
    if not isinstance(world_size, int) or world_size < 1:
        raise UsageError(f"world_size={world_size!r}: a job has 1 rank or more")
    for name, value in (("deadline", deadline), ("gone_within", gone_within)):
        if not isinstance(value, timedelta) or value <= timedelta(0):
            raise UsageError(
                f"{name}={value!r}: give a positive timedelta, as timedelta(seconds=60)"
            )
    for variable, text in env.items():
        if not (isinstance(variable, str) and isinstance(text, str)):
            raise UsageError(f"env={{{variable!r}: {text!r}}}: names and values are text")


def _checked_faults(faults: Iterable[Fault], world_size: int) -> tuple[Fault, ...]:
    given = [faults] if isinstance(faults, Fault) else list(faults)
    seen = set()
    for fault in given:
        if not isinstance(fault, Fault):
            raise UsageError(
                f"faults={faults!r}: give a list of faults, as [Fault.kill(1, 'step')]"
            )
        if not all(0 <= rank < world_size for rank in (fault.rank, *fault.ranks)):
            raise UsageError(f"{fault}: the job has ranks 0 to {world_size - 1}")
        where = (fault.rank, fault.at, fault.n)
        if where in seen:
            raise UsageError(f"{fault}: another fault strikes this rank there; change n")
        seen.add(where)
    return tuple(given)


def _pickled(**given: Any) -> bytes:
    """All values in one tuple. Raises ``UsageError`` that names one which cannot be pickled."""
    for name, value in given.items():
        try:
            pickle.dumps(value)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise UsageError(
                f"{name} cannot be pickled, and ranks are processes of their own: {error}"
            ) from error
    return pickle.dumps(tuple(given.values()))


class JobFactory:
    """Makes jobs, each with a directory below ``directory``, and ends what is left of them.

    Called like ``Job``, without ``directory`` and ``server``. ``server`` is shared where given; its
    ranks have an interpreter already. Otherwise they run ``interpreter``, or else this Python.
    A context manager.
    """

    def __init__(
        self,
        directory: Path,
        server: ForkServer | None = None,
        interpreter: Interpreter | None = None,
    ) -> None:
        self._directory = directory
        self._own_server = ForkServer(interpreter) if server is None else None
        self._server = server or self._own_server
        self._jobs: list[Job] = []

    def __call__(
        self,
        target: Callable[..., Any] | str,
        *,
        world_size: int,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        faults: Iterable[Fault] = (),
        deadline: timedelta = DEADLINE,
        wrapper: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        proxied_store: bool = False,
        all_strike: bool = True,
        gone_within: timedelta = GONE_WITHIN,
    ) -> Job:
        """A job that is not started yet; see ``Job``."""
        assert self._server is not None
        job = Job(
            target,
            world_size=world_size,
            args=args,
            kwargs=kwargs,
            faults=faults,
            deadline=deadline,
            wrapper=wrapper,
            env=env,
            proxied_store=proxied_store,
            all_strike=all_strike,
            gone_within=gone_within,
            directory=self._directory / f"job-{len(self._jobs)}",
            server=self._server,
        )
        self._jobs.append(job)
        return job

    @property
    def jobs(self) -> tuple[Job, ...]:
        """What it has made so far."""
        return tuple(self._jobs)

    def close(self) -> None:
        """End what is left of the jobs."""
        for job in self._jobs:
            job.close()
        if self._own_server is not None:
            self._own_server.close()

    def __enter__(self) -> JobFactory:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
