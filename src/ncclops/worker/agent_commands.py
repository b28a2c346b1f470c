"""The agent's commands to a running worker: JSON messages over a socket that the worker inherits.

A thread waits for them. Handlers run in it: they must be quick, and must not depend on the main
thread, which may hang.

    restart   have all ranks start the script again (``in_process``)
    tighten   shorten timeouts (``timeout_phases``)
    abort     abort all process groups, since the process is about to be ended (``stopping``)
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from ncclops.record.variables import COMMANDS_FD

Command = Mapping[str, Any]
Handler = Callable[[Command], object]

_MOST_BYTES = 64 << 10
_handlers: dict[str, Handler] = {}


def on(name: str, handler: Handler) -> None:
    """Have ``handler`` carry out the command ``name``, in place of an earlier handler."""
    _handlers[name] = handler


def listen() -> None:
    """Start the thread; outside `launch` nothing happens. Call before anything may fork."""
    fd = os.environ.pop(COMMANDS_FD, None)
    if fd is None:
        return
    os.set_inheritable(int(fd), False)
    connection = socket.socket(fileno=int(fd))
    threading.Thread(target=_run, args=(connection,), name="ncclops-commands", daemon=True).start()


def _run(connection: socket.socket) -> None:
    while message := connection.recv(_MOST_BYTES):  # empty: the agent has ended
        command = json.loads(message)
        handler = _handlers.get(command["command"])
        if handler is None:
            continue
        try:
            handler(command)
        except Exception as error:  # noqa: BLE001 - the next command must still be read
            sys.stderr.write(f"ncclops: command {command['command']!r} failed: {error!r}\n")
