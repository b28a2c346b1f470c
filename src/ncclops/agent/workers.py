"""One worker: its identity in the environment, its process, and how it ended."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ncclops.agent.attached import Streams
from ncclops.agent.forked import ForkedProcess
from ncclops.agent.hosted_store import StoreAddress
from ncclops.agent.layout import Layout, Nodes, Target
from ncclops.exhausted import described
from ncclops.host import process_tree, process_view
from ncclops.process_ends import describe_exit, exit_status, signal_name
from ncclops.record import worker_commands
from ncclops.record.regular_file import append_regular
from ncclops.record.run_directory import RunDirectory
from ncclops.record.variables import COMMANDS_FD
from ncclops.record.worker_commands import WorkerCommand

log = logging.getLogger(__name__)

_MODULE = "ncclops.worker"
_ROLE = "default"  # torchrun's name for the role of ordinary workers


@dataclass(frozen=True, kw_only=True)
class WorkerAttempt:
    """One start of all workers: 0 first, then one per restart of the processes."""

    number: int
    most: int
    job_id: str
    store: StoreAddress


def identity(layout: Layout, attempt: WorkerAttempt, local_rank: int) -> dict[str, str]:
    """The variables that identify a worker: those of torchrun, under the same names."""
    rank, nproc, world = layout.rank(local_rank), layout.nproc, layout.world_size
    values: dict[str, object] = {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": nproc,
        "GROUP_RANK": layout.nodes.rank,
        "GROUP_WORLD_SIZE": layout.nodes.count,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world,
        "ROLE_NAME": _ROLE,
        "MASTER_ADDR": attempt.store.host,
        "MASTER_PORT": attempt.store.port,
        "TORCHELASTIC_RUN_ID": attempt.job_id,
        "TORCHELASTIC_RESTART_COUNT": attempt.number,
        "TORCHELASTIC_MAX_RESTARTS": attempt.most,
        # env:// then joins our store as a client, under a prefix of this attempt,
        # instead of having rank 0 host one.
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }
    return {name: str(value) for name, value in values.items()}


def identity_names() -> frozenset[str]:
    """The names that ``identity`` gives; nothing else may set them."""
    nowhere = WorkerAttempt(number=0, most=0, job_id="", store=StoreAddress("", 0))
    return frozenset(identity(Layout(nodes=Nodes(), nproc=1), nowhere, 0))


def command(target: Target) -> list[str]:
    """The command line of a worker. ``PYTHON_EXEC`` replaces the interpreter, as under torchrun."""
    python = os.environ.get("PYTHON_EXEC") or sys.executable
    if target.kind == "program":
        return [python, "-P", "-m", "ncclops.worker.parent_death", target.name, *target.arguments]
    flags = {"module": ["-m"], "function": ["-f"]}.get(target.kind, [])
    # -u as torchrun has it: a line is in the file when print() returns, whatever happens next.
    # -P: no modules from the current directory; the worker adds the script's, as python would.
    return [python, "-u", "-P", "-m", _MODULE, *flags, target.name, *target.arguments]


@dataclass(frozen=True)
class Exit:
    """How a worker ended: ``code`` as the shell knows it from 0 to 255, or the signal's name."""

    code: int | None
    signal: str | None

    @property
    def ok(self) -> bool:
        return self.code == 0

    def __str__(self) -> str:
        return exit_status(self.code, self.signal)

    def describe(self) -> str:
        """Such as ``exited with code 1`` or ``was killed by SIGKILL``."""
        return describe_exit(self.code, self.signal)


class Forks(Protocol):
    """Where a worker may be forked, as ``fork_server.ForkServer``."""

    is_ready: bool | None

    def fork(self, environ: Mapping[str, str], descriptors: Sequence[int]) -> int:
        """A child of this process: its PID. Raises ``OSError``."""


class Worker:
    """A worker's process. ``exit`` is None while it runs.

    ``is_given_up``: SIGKILL has not ended it, as it is in the kernel (a driver, a file system that
    hangs) or frozen. None of its own code runs any more.
    """

    def __init__(
        self, rank: int, process: subprocess.Popen[bytes] | ForkedProcess, commands: socket.socket
    ) -> None:
        self.rank = rank
        self.forked = isinstance(process, ForkedProcess)
        self.commands = commands
        self.pid = process.pid
        self.exit: Exit | None = None
        self.is_given_up = False
        self.started = time.monotonic()
        self.ended: float | None = None
        self._process = process
        self.pidfd = os.pidfd_open(process.pid)

    @classmethod
    def spawn(
        cls,
        rank: int,
        argv: list[str],
        environ: dict[str, str],
        run: RunDirectory,
        streams: Streams,
        server: Forks | None = None,
    ) -> Worker:
        """Start ``argv``, forked by ``server`` if it can, its output appended to the rank's files.

        The worker writes into the files itself: no pipe can fill up, and what it wrote is kept
        whatever happens to the agent.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with (
            theirs,
            append_regular(run.paths.rank(rank).stdout_log) as out,
            append_regular(run.paths.rank(rank).stderr_log) as err,
            Path(os.devnull).open("rb") as nothing,
        ):
            if server is not None and server.is_ready:
                files = (nothing, out, err, theirs)
                try:
                    pid = server.fork(environ, [each.fileno() for each in files])
                except OSError as error:
                    log.warning("rank %d is started afresh: %s", rank, described(error))
                else:
                    return cls(rank, ForkedProcess(pid), ours)
            process = subprocess.Popen(
                argv,
                stdin=streams.stdin,
                stdout=out if streams.stdout is None else streams.stdout,
                stderr=err,
                env=environ | {COMMANDS_FD: str(theirs.fileno())},
                start_new_session=True,
                pass_fds=(theirs.fileno(),),
            )
        return cls(rank, process, ours)

    def send_command(self, command: WorkerCommand) -> bool:
        """Send ``command``; whether the worker will get it.

        False if it has ended, or does not read its commands.
        """
        try:
            self.commands.send(worker_commands.encode(command))
        except OSError:
            return False
        return True

    def send(self, signum: signal.Signals) -> None:
        """Send ``signum``; nothing happens if the worker has ended."""
        if self.exit is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(signum)

    def runs_another_program(self) -> bool:
        """Whether it has called exec: its end of the socket is closed, and it is not ending."""
        with suppress(ConnectionResetError):  # closed with a command unread
            if self.commands.recv(1):
                return False
        stat = process_view.read_stat(Path("/proc", str(self.pid)))
        return stat is not None and not stat.is_ending

    def reap(self) -> Exit:
        """Record how the worker ended; call when its pidfd says that it has."""
        code = self._process.wait()
        self.ended = time.monotonic()
        if code >= 0:
            self.exit = Exit(code, None)
        else:
            self.exit = Exit(None, signal_name(-code))
        os.close(self.pidfd)
        self.commands.close()
        return self.exit


def left_running(stay: AbstractSet[int]) -> str | None:
    """A line on processes that workers have forked and that still run, when all have ended well;
    ``stay`` are other descendants of the agent. They may be what the script was started for."""
    forks = process_tree.running(_MODULE, stay)
    if not forks:
        return None
    number = len(forks)
    some = "a process" if number == 1 else f"{number} processes"
    runs = "still runs, and is" if number == 1 else "still run, and are"
    return (
        f"{some} that workers have forked {runs} ended: a script that goes on in the background"
        " ends with its first process"
    )
