"""The agent's side of the control plane: the server's process, and the commands that it sends."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from ncclops.control.commands import ControlRefused, Controls, parse_command, run_command
from ncclops.exhausted import described
from ncclops.host.kept_running import KeptRunning
from ncclops.record import control_address
from ncclops.record.paths import RunPaths
from ncclops.record.regular_file import append_regular
from ncclops.record.variables import RUN_DIR

# A server that ends is replaced, but not one that keeps ending.
_MOST_STARTS = 5
# Its imports take half a second of a core, which workers need at the start of a run; a run that is
# over before has no use for it. Later the agent's event loop may be held, and could not start it.
_STARTED_WITHIN_S = 10.0


class ControlServer:
    """The control plane of one run, for an agent with a running event loop.

    ``controls`` runs the commands. ``listeners`` are the sockets of the server
    (``control_address.listen_unix``, ``listen_tcp``), closed here in the end; with
    ``token_for_reads`` those in the network ask for the token also where a client only reads.
    ``say`` gets a line for the operator when there is a reason. No failure here ends the run: at
    worst it takes no commands, and a line says so.
    """

    def __init__(
        self,
        run_dir: Path,
        controls: Controls,
        *,
        listeners: Sequence[socket.socket],
        say: Callable[[str], None],
        token_for_reads: bool = False,
    ) -> None:
        self._run_dir = run_dir
        self._controls = controls
        self._say = say
        self._listeners = list(listeners)
        self._options = ["--token-for-reads"] if token_for_reads else []
        self._process: subprocess.Popen[bytes] | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def pids(self) -> frozenset[int]:
        """The server's process, which is to outlive workers and what they leave behind."""
        return frozenset() if self._process is None else frozenset({self._process.pid})

    def start(self) -> None:
        """Start the server with the first client, or soon. Clients queue at the sockets."""
        if self._listeners:
            self._serving = asyncio.get_running_loop().create_task(self._keep_serving())

    async def close(self) -> None:
        """End the server and take its socket and token away. Does nothing the second time."""
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.wait([self._serving])
            self._serving = None
        self._refuse_clients()
        control_address.remove_socket(self._run_dir)
        with suppress(OSError):
            RunPaths(self._run_dir).token.unlink()

    def _refuse_clients(self) -> None:
        """From now on: in a queue that nobody serves they would wait."""
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()

    async def _first_client(self) -> None:
        """Return when a client has come, or after a while."""
        if any(listener.family != socket.AF_UNIX for listener in self._listeners):
            return  # who holds a port is known by the environment of the server's process
        loop, come = asyncio.get_running_loop(), asyncio.Event()
        for listener in self._listeners:
            loop.add_reader(listener, come.set)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(_STARTED_WITHIN_S):
                    await come.wait()
        finally:
            for listener in self._listeners:
                loop.remove_reader(listener)

    async def _keep_serving(self) -> None:
        await self._first_client()
        try:
            for _ in range(_MOST_STARTS):
                try:
                    process, reader, writer = await self._start_process()
                except OSError as error:
                    self._say(f"the control plane cannot be started: {described(error)}")
                    self._refuse_clients()
                    return
                kept = KeptRunning(process, "the server of the control plane")
                try:
                    await self._obey(reader, writer)
                finally:
                    kept.end()
                    writer.close()
                    self._end_process()
        finally:
            self._end_process()  # also where the run ended while its link was being opened
        self._say(f"the control plane ended {_MOST_STARTS} times: {self._log()}")
        self._refuse_clients()

    def _open_log(self) -> BinaryIO:
        """Where the run directory has been moved away, nothing is kept of what the server says."""
        try:
            return append_regular(self._log())
        except OSError:
            return Path(os.devnull).open("wb")

    async def _start_process(
        self,
    ) -> tuple[subprocess.Popen[bytes], asyncio.StreamReader, asyncio.StreamWriter]:
        ours, theirs = socket.socketpair()
        fds = [theirs.fileno(), *(listener.fileno() for listener in self._listeners)]
        with theirs, self._open_log() as output:
            self._process = process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",  # no modules from the current directory
                    "-m",
                    "ncclops.control.server",
                    *self._options,
                    str(self._run_dir),
                    str(os.getpid()),
                    *map(str, fds),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=fds,
                env=os.environ | {RUN_DIR: str(self._run_dir)},  # by which `holders` knows it
                start_new_session=True,
            )
        return process, *await asyncio.open_connection(sock=ours)

    async def _obey(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Do what comes in, and answer, until the process has gone."""
        with suppress(ConnectionError):
            while line := await reader.readline():
                asked = json.loads(line)
                answer = {"id": asked["id"], **self._do(json.dumps(asked["command"]))}
                writer.write(json.dumps(answer).encode() + b"\n")

    def _do(self, command: str) -> dict[str, Any]:
        try:
            return {"ok": True, "message": run_command(self._controls, parse_command(command))}
        except ControlRefused as refusal:
            return {"ok": False, "message": str(refusal)}
        except Exception as error:  # noqa: BLE001 - a command must not end the agent
            self._say(f"a command from outside failed: {error!r}")
            return {"ok": False, "message": f"the agent failed to do it: {error!r}"}

    def _end_process(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _log(self) -> Path:
        return RunPaths(self._run_dir).server_log
