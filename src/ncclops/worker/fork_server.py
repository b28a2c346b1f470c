"""Workers forked from one process that has imported torch: the fork server of a node.

``import torch`` takes seconds of a core, in every rank, at every start. The agent starts this
process once, with the command line of a worker (so that its workers look like others in ``ps``)
and before it meets the other nodes. It imports, and forks a worker for each request.

A fork copies what the kernel sees of a process and one thread of it. So it is done only where
nothing else is there to be copied: no second thread, whose locks would stay locked, no device
of CUDA, whose driver does not survive a fork, and nothing that the imports have changed for the
whole process, such as its directory. A server that has any of these says so and ends; its workers
are then started as usual. What the imports have changed in the environment, workers get.

A worker is to be the agent's own child, as one that is started afresh: what a parent alone may do
is wait for it, and have the kernel end it with the parent. So it is forked twice. The process
between ends at once, and the kernel gives its child to the next ancestor that asked for orphans
(``host.prctl.become_subreaper``), which is the agent.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from ncclops.classify import in_place
from ncclops.host import prctl
from ncclops.receipts import recorder
from ncclops.record import fork_messages
from ncclops.record.fork_messages import (
    FORK_SERVER_FD,
    FORK_SERVER_IMPORTS,
    STORE,
    Forked,
    ForkMessage,
    Ready,
    Refused,
    Unfit,
)
from ncclops.record.variables import COMMANDS_FD, RESTART
from ncclops.restart import store_server
from ncclops.worker import after_import, group_defaults, parent_death, process_state
from ncclops.worker.process_state import ProcessState

# Files that a process has open once CUDA or ROCm is in use in it.
_GPU_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri")


def serve_if_asked() -> None:
    """Be the fork server, if the agent has started this process as one; else do nothing.

    Returns in workers alone, each with its own environment and standard streams.
    """
    descriptor = os.environ.pop(FORK_SERVER_FD, None)
    if descriptor is None:
        return
    # The agent starts this process while it holds its own signals back.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    imports = json.loads(os.environ.pop(FORK_SERVER_IMPORTS))
    parent_death.tie_to_agent()
    os.set_inheritable(int(descriptor), False)
    _Server(socket.socket(fileno=int(descriptor))).serve(imports)


class _Server:
    def __init__(self, agent: socket.socket) -> None:
        self._agent = agent
        self._variables: dict[str, tuple[str | None, str | None]] = {}

    def serve(self, imports: Sequence[str]) -> None:
        """Import, then fork until the agent hangs up. Returns in workers alone."""
        began, environ, before = time.monotonic(), dict(os.environ), ProcessState.now()
        gc.disable()  # what modules make stays: looking through it again and again frees nothing
        failed = _import(imports)
        _prepare_workers()
        self._variables = process_state.changed_variables(environ)
        _end_threads_that_are_prepared()
        if (why := unfit(before)) is not None:
            self._say(Unfit(why=why))
            sys.exit(0)
        # A collection in a worker would otherwise write to, so copy, all pages. None is made here:
        # of what torch's import makes, it frees less than a megabyte, for a sixth of a second.
        gc.freeze()
        gc.enable()
        self._say(Ready(seconds=time.monotonic() - began, not_imported=failed))
        while True:
            message, descriptors, _, _ = socket.recv_fds(
                self._agent, fork_messages.MOST_BYTES, max(fork_messages.DESCRIPTORS.values())
            )
            if not message:
                sys.exit(0)  # the agent has ended, or needs no more workers
            if len(descriptors) != fork_messages.DESCRIPTORS.get(message):
                self._say(Refused(why=f"{len(descriptors)} descriptors came with {message!r}"))
            elif message == STORE and "torch.distributed" not in sys.modules:
                self._say(Refused(why="torch.distributed is not among its imports"))
            elif self._fork(message, descriptors):
                return
            for each in descriptors:
                os.close(each)

    def _fork(self, what: bytes, descriptors: Sequence[int]) -> bool:
        """Whether this is the worker."""
        agent_pid = os.getppid()
        pid_read, pid_write = os.pipe()
        go_read, go_write = os.pipe()
        try:
            between = os.fork()
        except OSError as error:
            self._say(Refused(why=f"fork: {error.strerror}"))
            between = -1
        if between == 0 and _fork_again(pid_write):
            for each in (pid_read, pid_write, go_write):
                os.close(each)
            self._agent.close()
            _wait_for_parent(go_read)
            if what == STORE:
                _be_store(descriptors, agent_pid)
            _become_worker(descriptors)
            process_state.change_variables(self._variables)
            return True
        if between > 0:
            os.close(pid_write)
            pid_write = -1
            os.waitpid(between, 0)  # from here on the worker is the agent's child
            said = os.read(pid_read, 32).decode()
            if said.isdecimal():
                self._say(Forked(pid=int(said)))
                os.write(go_write, b"g")
            else:
                self._say(Refused(why=f"fork: {said or 'it ended'}"))
        for each in (pid_read, pid_write, go_read, go_write):
            if each >= 0:
                os.close(each)
        return False

    def _say(self, message: ForkMessage) -> None:
        try:
            self._agent.send(fork_messages.encode(message))
        except OSError:
            os._exit(0)  # the agent has ended


def _fork_again(pid_write: int) -> bool:
    """In the process between: whether this is the worker. The other one ends here."""
    try:
        if (pid := os.fork()) == 0:
            return True
        os.write(pid_write, str(pid).encode())
    except OSError as error:
        os.write(pid_write, str(error.strerror).encode()[:32])
    os._exit(0)


def _wait_for_parent(go_read: int) -> None:
    """Return once the agent is the parent of this process."""
    if os.read(go_read, 1) != b"g":
        os._exit(1)  # the server has ended in between: nobody waits for this process
    os.close(go_read)


def _be_store(descriptors: Sequence[int], agent_pid: int) -> NoReturn:
    """Serve torch's store, as ``ncclops.agent.store_server`` does, under a name of its own."""
    try:
        listener, log = descriptors
        prctl.die_with_parent(agent_pid, signal.SIGKILL)
        prctl.show_as("ncclops-store")
        os.setsid()
        for number in (1, 2):
            os.dup2(log, number)
        with socket.socket(fileno=os.dup(listener)) as bound:
            port = bound.getsockname()[1]
        tcp_store = sys.modules["torch.distributed"].TCPStore
        store_server.serve_until_killed(listener, port, tcp_store)
    except BaseException:  # noqa: BLE001 - the boundary of the process; in the store's log
        traceback.print_exc()
    os._exit(1)


def _become_worker(descriptors: Sequence[int]) -> None:
    """What an interpreter that is started afresh has: its own streams, session, environment."""
    environment, *streams, commands = descriptors
    os.setsid()
    for number, each in enumerate(streams):
        os.dup2(each, number)
        os.close(each)
    with os.fdopen(environment, "rb") as file:
        file.seek(0)
        environ: dict[str, str] = json.load(file)
    os.environ.clear()
    os.environ.update(environ)
    os.environ[COMMANDS_FD] = str(commands)
    recorder.begin_as_worker()
    # `random` seeds itself anew in a fork. numpy does not, and all ranks would draw the same.
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()


def _import(names: Sequence[str]) -> dict[str, str]:
    """Import ``names``; of those that cannot be, why."""
    failed = {}
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - whatever a module's own code raises
            failed[name] = f"{type(error).__name__}: {error}"
    return failed


def _prepare_workers() -> None:
    """What each worker would otherwise import and read for itself, before its script."""
    if os.environ.get(RESTART) == "in-process":
        from ncclops.worker import in_process  # noqa: F401

        in_place.prepare()
    if group_defaults.MODULE in sys.modules:
        after_import.look_ahead(group_defaults.MODULE)


def _end_threads_that_are_prepared() -> None:
    """OpenBLAS, which numpy loads, ends its threads before a fork and starts them on demand."""
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)


def unfit(before: ProcessState, proc: Path = Path("/proc/self")) -> str | None:
    """Why a fork of the process under ``proc`` would not be safe, or as good as a new process;
    None if it is. ``before``: what this process was like when it had imported nothing."""
    main = (proc / "task").resolve().parent.name  # a thread has the number of its process
    others = [task for task in (proc / "task").iterdir() if task.name != main]
    if others:
        names = sorted((task / "comm").read_text().strip() for task in others)
        return f"the imports have started threads: {', '.join(names)}"
    for descriptor in (proc / "fd").iterdir():
        try:
            target = str(descriptor.readlink())
        except FileNotFoundError:
            continue
        if target.startswith(_GPU_DEVICES):
            return f"the imports have opened {target}"
    if changed := ProcessState.now().changed(before):
        return f"the imports have changed {', '.join(changed)}"
    return None
