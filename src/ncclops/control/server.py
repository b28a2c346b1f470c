"""The server's process, a child of the agent.

    python -m ncclops.control.server [--token-for-reads] RUN_DIR AGENT_PID LINK_FD LISTENER_FD...

LINK_FD is a socket to the agent: a JSON line for each command, a JSON line for each answer. The
process ends with the agent, or when the agent closes the link.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import resource
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ncclops.control import http
from ncclops.control.commands import Command, ControlRefused
from ncclops.control.routes import Entrance, Routes
from ncclops.host import prctl
from ncclops.record import control_address
from ncclops.status.reading import LiveSights

# Training comes first: on a machine without a free core, requests have to wait. (As a batch
# process it does not interrupt another one either when a request comes.)
_NICE = 19
# The agent answers at once, unless its event loop is held by a disk that hangs.
_ANSWER_LIMIT_S = 20.0
# For the files that are read meanwhile, and what the interpreter has open.
_OWN_DESCRIPTORS = 40


class AgentLink:
    """The way of commands to the agent, and of its answers back."""

    def __init__(self, link: socket.socket) -> None:
        self._socket = link
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[str]] = {}

    async def open(self) -> None:
        self._reader, self._writer = await asyncio.open_connection(sock=self._socket)

    async def forward(self, command: Command) -> str:
        """See ``routes.Forward``."""
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            line = json.dumps({"id": number, "command": command.model_dump()})
            self._writer.write(line.encode() + b"\n")
            return await asyncio.wait_for(answer, _ANSWER_LIMIT_S)
        finally:
            del self._waiting[number]

    async def receive(self) -> None:
        """Take answers until the agent has gone."""
        while line := await self._reader.readline():
            reply = json.loads(line)
            answer = self._waiting.get(reply["id"])
            if answer is None or answer.done():
                continue  # no request waits for it any more
            if reply["ok"]:
                answer.set_result(reply["message"])
            else:
                answer.set_exception(ControlRefused(reply["message"]))


async def run(
    run_dir: Path, link: socket.socket, listeners: list[socket.socket], *, token_for_reads: bool
) -> None:
    """Serve on each of ``listeners`` until the agent closes ``link``."""
    agent = AgentLink(link)
    await agent.open()
    sights, (token, _) = LiveSights(run_dir), control_address.read_token(run_dir)
    limits = _limits(len(listeners))
    serving = []
    for listener in listeners:
        entrance = Entrance.of(listener, token_for_reads=token_for_reads)
        routes = Routes(sights, token, agent.forward, entrance)
        serving.append(asyncio.create_task(http.serve(listener, routes.answer, limits)))
    with suppress(ConnectionError):
        await agent.receive()
    for task in serving:
        task.cancel()


def _limits(listeners: int) -> http.Limits:
    """Connections are counted per listener: many on the network leave the owner's socket free."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    usual = http.Limits()
    room = (most - _OWN_DESCRIPTORS) // listeners if most != resource.RLIM_INFINITY else most
    return replace(usual, connections=max(1, min(usual.connections, room)))


def main(arguments: list[str]) -> None:
    token_for_reads = arguments[0] == "--token-for-reads"
    arguments = arguments[token_for_reads:]
    run_dir, agent_pid, *fds = Path(arguments[0]), *map(int, arguments[1:])
    prctl.die_with_parent(agent_pid, signal.SIGKILL)
    os.nice(_NICE)
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    # The terminal's signals are the supervisor's; this process ends with the link.
    link, *listeners = (socket.socket(fileno=fd) for fd in fds)
    asyncio.run(run(run_dir, link, listeners, token_for_reads=token_for_reads))


if __name__ == "__main__":
    main(sys.argv[1:])
