"""The agent's commands to a running worker (``record.worker_commands``), carried out in it.

They come over a socket that the worker inherits, and a thread waits for them. Handlers run in it:
they must be quick, and must not depend on the main thread, which may hang.

    restart   have all ranks start the script again (``in_process``)
    tighten   shorten timeouts (``timeout_phases``)
    ending    start the script no more, since the attempt is ending (``no_restart``)
    abort     abort all process groups, since the process is about to be ended (``last_resort``)
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from ncclops.record import worker_commands
from ncclops.record.variables import COMMANDS_FD
from ncclops.record.worker_commands import WorkerCommand

_MOST_BYTES = 64 << 10
_handlers: dict[type[WorkerCommand], Callable[[Any], object]] = {}
Kind = TypeVar("Kind", bound=WorkerCommand)


def on(kind: type[Kind], handler: Callable[[Kind], object]) -> None:
    """Have ``handler`` carry out commands of ``kind``, in place of an earlier handler."""
    _handlers[kind] = handler


def listen() -> None:
    """Start the thread; outside `launch` nothing happens. Call before anything may fork."""
    fd = os.environ.pop(COMMANDS_FD, None)
    if fd is None:
        return
    os.set_inheritable(int(fd), False)
    connection = socket.socket(fileno=int(fd))
    threading.Thread(target=_run, args=(connection,), name="ncclops-commands", daemon=True).start()


def _run(connection: socket.socket) -> None:
    with connection:
        while message := connection.recv(_MOST_BYTES):  # empty: the agent has ended
            _carry_out(message)


def _carry_out(message: bytes) -> None:
    command = worker_commands.decode(message)
    handler = None if command is None else _handlers.get(type(command))
    if command is None or handler is None:
        return
    try:
        handler(command)
    except Exception as error:  # noqa: BLE001 - the next command must still be read
        name = worker_commands.name_of(command)
        sys.stderr.write(f"ncclops: command {name!r} failed: {error!r}\n")
