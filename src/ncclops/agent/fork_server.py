"""Workers that are forked on this node instead of started afresh: the agent's side.

The process itself is ``ncclops.worker.fork_server``, which says when a fork is safe. Whatever
comes between, workers are started afresh, and the log of the agent says why.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from ncclops.agent import workers
from ncclops.agent.condition import Condition
from ncclops.agent.fork_server_process import ForkServerProcess
from ncclops.agent.job import Job
from ncclops.exhausted import described
from ncclops.host import process_view
from ncclops.record import fork_messages, variables
from ncclops.record.fork_messages import Forked, ForkMessage, Ready, Unfit

log = logging.getLogger(__name__)

# A fork takes milliseconds, or some tenths of a second where memory is short.
_FORK_LIMIT_S = 5.0
# Of a process that has been killed; one that waits for a file server ends later.
_END_LIMIT_S = 5.0
# An import that uses no CPU for so many looks in a row hangs. A host's pause is one look.
_LOOK, _LOOKS_WITHOUT_CPU = timedelta(seconds=3), 5
# Read when process groups and devices are made, or where the restart core connects: the imports of
# the server do not depend on them.
_READ_LATER = (
    *("NCCL_", "TORCH_NCCL_", "TORCH_FR_", "TORCHELASTIC_", "CUDA_VISIBLE_DEVICES"),
    *("NCCLOPS_STORE", "NCCLOPS_RESTART_HOST"),
)


class ForkServers:
    """The fork server of this node, made anew where the environment of workers changes.

    Made and used in the agent's event loop. ``started`` is the first one, where it runs already.
    """

    def __init__(
        self, job: Job, condition: Condition, started: ForkServerProcess | None = None
    ) -> None:
        self._job, self._condition = job, condition
        self._server: ForkServer | None = None
        if started is not None:
            self._server = ForkServer(started, condition.notify)

    @property
    def pids(self) -> set[int]:
        """Processes that outlive an attempt."""
        return set() if self._server is None else {self._server.pid}

    def open(self) -> None:
        """Start the first server, unless it runs or workers are to be started afresh."""
        if self._server is None:
            self._begin(self._job.environ_of(0))

    def _begin(self, environ: Mapping[str, str]) -> None:
        if self._job.warm_imports is None:
            return
        self.close()
        try:
            started = ForkServerProcess(self._job, environ)
            self._server = ForkServer(started, self._condition.notify)
        except OSError as error:
            log.warning("workers are started afresh: no fork server: %s", described(error))

    async def for_workers(
        self, environs: Iterable[Mapping[str, str]], give_up: Callable[[], object]
    ) -> ForkServer | None:
        """A server that can fork workers with each of ``environs``; None: start them afresh.

        Waits until it has imported, as the workers would have to themselves, or ``give_up()``; not
        for imports that hang, or a process that was stopped.
        """
        first, *others = environs
        if self._server is not None and not self._server.fits(first):
            self._begin(first)
        server = self._server
        if server is None or not all(server.fits(each) for each in others):
            return None
        looks, used_s = 0, None
        while not await self._condition.until(
            lambda: server.is_ready is not None or give_up(), _LOOK
        ):
            before_s, used_s = used_s, server.cpu_s()
            looks = looks + 1 if used_s == before_s else 0
            if looks == _LOOKS_WITHOUT_CPU:
                server.give_up("its imports hang, or it was stopped")
        return server if server.is_ready else None

    def close(self) -> None:
        """End the server; its workers go on."""
        if self._server is not None:
            self._server.close()
            self._server = None


class ForkServer:
    """A running server; it has been started with (mostly) the environment of its workers.

    ``is_ready`` is None while it imports, and False once it can fork no more.
    """

    def __init__(self, started: ForkServerProcess, changed: Callable[[], None]) -> None:
        self.is_ready: bool | None = None
        self._environ = seen_at_import(started.environ)
        self._changed = changed
        self._socket, self._process = started.socket, started.process
        self._socket.settimeout(_FORK_LIMIT_S)
        asyncio.get_running_loop().add_reader(self._socket, self._on_message)

    @property
    def pid(self) -> int:
        """Of the server's process."""
        return self._process.pid

    def cpu_s(self) -> float | None:
        """The CPU time that it has used, in seconds; None once it has ended."""
        stat = process_view.read_stat(Path(f"/proc/{self.pid}"))
        return None if stat is None else stat.user_s + stat.system_s

    def give_up(self, why: str) -> None:
        """Wait for it no longer, and end it."""
        self._end(why)
        self._process.kill()

    def fits(self, environ: Mapping[str, str]) -> bool:
        """Whether the imports of a worker with ``environ`` would see what the server's saw."""
        return seen_at_import(environ) == self._environ

    def fork(self, environ: Mapping[str, str], descriptors: Sequence[int]) -> int:
        """A new worker with ``environ``, a child of this process: its PID.

        ``descriptors`` are its standard input, output and error, and its end of the socket for
        commands. Raises ``OSError`` where there is none; the server may be of no more use then.
        """
        with os.fdopen(os.memfd_create("environ"), "w+b", buffering=0) as file:
            file.write(json.dumps(dict(environ)).encode())
            return self._fork(fork_messages.WORKER, [file.fileno(), *descriptors])

    def fork_store(self, listener: int, log: int) -> int:
        """A server of torch's store on the socket ``listener``, as ``fork``."""
        return self._fork(fork_messages.STORE, [listener, log])

    def _fork(self, what: bytes, descriptors: Sequence[int]) -> int:
        try:
            socket.send_fds(self._socket, [what], descriptors)
            answer = self._answer()
        except OSError as error:
            self._end(described(error))
            raise
        if not isinstance(answer, Forked):
            raise OSError(errno.EAGAIN, f"the fork server: {answer}")
        try:
            os.waitid(os.P_PID, answer.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            self._end("its workers do not become children of the agent")
            os.kill(answer.pid, signal.SIGKILL)
            raise
        return answer.pid

    def _answer(self) -> ForkMessage | None:
        try:
            message = self._socket.recv(fork_messages.MOST_BYTES)
        except TimeoutError:
            # It may just have forked: what it has said by its end counts.
            self._end(f"it did not answer within {_FORK_LIMIT_S:g} s")
            self._process.kill()
            self._process.wait()
            message = self._socket.recv(fork_messages.MOST_BYTES)
        if not message:
            self._end("it has ended")
        return fork_messages.decode(message)

    def close(self) -> None:
        """End the process; its workers go on."""
        self._end(None)
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_LIMIT_S)
        self._socket.close()

    def _on_message(self) -> None:
        message = fork_messages.decode(self._socket.recv(fork_messages.MOST_BYTES))
        if isinstance(message, Ready):
            self.is_ready = True
            log.info("the fork server (pid %d) is ready after %.1f s", self.pid, message.seconds)
            for name, why in message.not_imported.items():
                log.warning("the fork server cannot import %s: %s", name, why)
        else:
            self._end(message.why if isinstance(message, Unfit) else "it has ended")
        self._changed()

    def _end(self, why: str | None) -> None:
        if self.is_ready is False:
            return
        asyncio.get_running_loop().remove_reader(self._socket)
        self.is_ready = False
        if why is not None:
            log.warning("workers are started afresh: the fork server: %s", why)


def seen_at_import(environ: Mapping[str, str]) -> dict[str, str]:
    """Of ``environ``, what the code of an imported module, or its library, may have read."""
    later = workers.identity_names().union(variables.OURS)
    return {
        name: value
        for name, value in environ.items()
        if name not in later and not name.startswith(_READ_LATER)
    }
