"""What all parts of the rendezvous process share: configuration, store, socket to the agent."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import termios
import threading
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from ncclops.cluster import messages


@dataclass(frozen=True, kw_only=True)
class Config:
    """What the agent starts the process with; times in seconds. See ``rendezvous_config``.

    ``launcher`` is the process that the user started; ``script`` its name, empty where the nodes
    may have different ones.
    """

    backend: str
    host: str
    port: int
    job_id: str
    active: int
    most: int
    rank: int | None
    name: str
    launcher: int
    script: str
    run_dir: str
    join_s: float
    last_call_s: float
    beat_s: float
    missed_beats: int

    @property
    def nnodes(self) -> str:
        """The size of the job, as ``--nnodes`` has it."""
        return f"{self.active}:{self.most}" if self.most > self.active else str(self.active)

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class Refused(Exception):
    """No round came about; the message says why, for people."""


class NotNeeded(Exception):
    """The job has ended without this node having taken part."""


class Link:
    """The way to the job's store, and to the agent over the socket ``agent``. Any thread."""

    def __init__(self, config: Config, agent: socket.socket) -> None:
        self.config = config
        self.first = ""  # the node that has named the job, and its run
        self._agent = agent
        self._sending = threading.Lock()
        self._tcp_store = _tcp_store_class(config.backend)

    def connect(self) -> Any:
        """Another connection to the store; a blocking ``wait`` occupies the one it is called on."""
        limit = timedelta(seconds=self.config.join_s)
        return self._tcp_store(
            self.config.host, self.config.port, None, False, limit, wait_for_workers=False
        )

    def send(self, message: messages.Message) -> None:
        """Send ``message`` to the agent."""
        line = messages.encode(message)
        with self._sending:
            try:
                self._agent.sendall(line)
            except OSError:
                return  # the agent has ended, which the thread that reads its commands notices

    def unread(self) -> int:
        """What the agent has not read of it yet, in bytes of the kernel's; 0 where not known."""
        try:  # of a Unix socket, what has not been received at the other end
            answer = fcntl.ioctl(self._agent, termios.TIOCOUTQ, bytes(4))
        except OSError:
            return 0
        return int(struct.unpack("i", answer)[0])


def _tcp_store_class(backend: str) -> Any:
    if backend == "static":
        from ncclops.restart.store_server import load_tcp_store

        return load_tcp_store()
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # workers get a store from us
    from torch.distributed import TCPStore

    return TCPStore


def first_line(error: BaseException) -> str:
    """The first line of the message, which says what went wrong; torch appends C++ frames."""
    return str(error).partition("\n")[0]
