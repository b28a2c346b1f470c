"""The agent's side of its rendezvous process: starts it, sends commands, receives messages."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ncclops.agent.in_thread import in_thread
from ncclops.cluster import messages
from ncclops.cluster.messages import Message
from ncclops.cluster.records import Record
from ncclops.cluster.rendezvous_link import Config
from ncclops.cluster.store_values import NodeFacts
from ncclops.host.kept_running import KeptRunning
from ncclops.record.regular_file import append_regular

# A rendezvous process that was sent ``leave`` has at most a rendezvous to close.
_LEAVES_WITHIN_S = 5.0


class Peers:
    """A running rendezvous process, to be used in the agent's event loop.

    ``deliver`` gets its messages, and ``ProcessEnded`` when it ends without a command to leave.
    """

    def __init__(self, config: Config, log: Path, deliver: Callable[[Message], None]) -> None:
        self._deliver = deliver
        self._rest = b""
        self._leaving = False
        self._heard = False
        self._socket, theirs = socket.socketpair()
        environ = {
            **os.environ,
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }  # no line for each wait that times out
        with theirs, append_regular(log) as output:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",  # no modules from the current directory
                    "-m",
                    "ncclops.cluster.rendezvous_process",
                    str(theirs.fileno()),
                    config.to_json(),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environ,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        asyncio.get_running_loop().add_reader(self._socket, self._on_readable)
        # Stopped, it sends no heartbeats: the other nodes would go on without this one.
        self._kept = KeptRunning(self.process, "the rendezvous process")

    def meet(self, attempt: int, facts: NodeFacts) -> None:
        """Take part in the next round, with these facts about our node."""
        self._send(messages.Meet(attempt, facts))

    def post(self, record: Record) -> None:
        """Put a record into the log of the round."""
        self._send(messages.Post(record))

    async def leave(self, *, over: bool) -> None:
        """End the process gracefully; with ``over`` no node may join the job any more."""
        self._leaving = True
        if not self._heard:  # it imports torch, or connects: no other node knows of this one
            self.process.kill()
        self._send(messages.Leave(over))
        with suppress(TimeoutError):  # the kernel does not let it go
            await in_thread(self._wait_for_end, 2 * _LEAVES_WITHIN_S)
        self._kept.end()
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()

    def _wait_for_end(self) -> None:
        try:
            self.process.wait(_LEAVES_WITHIN_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _send(self, command: messages.Command) -> None:
        # The process has a thread that only reads commands: this does not block.
        with suppress(OSError):
            self._socket.sendall(messages.encode(command))

    def _on_readable(self) -> None:
        try:
            data = self._socket.recv(1 << 20, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(self._socket)
            if not self._leaving:
                asyncio.get_running_loop().call_soon(self._deliver, messages.ProcessEnded())
            return
        self._heard = True
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:  # each by itself: an error in one must not lose those behind it
            asyncio.get_running_loop().call_soon(self._deliver, messages.decode(line))
