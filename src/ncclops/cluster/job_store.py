"""The job's store, which the agents of several nodes share: served here or elsewhere, or lost."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from pathlib import Path

from ncclops.agent import hosted_store
from ncclops.cluster.heartbeat import Silence


class JobStore:
    """The store at ``address``. ``lost`` says why it is out of reach, from :meth:`lose` on.

    ``on_lost`` is called once, with the reason. In the agent's event loop only.
    """

    def __init__(self, address: str, on_lost: Callable[[str], None]) -> None:
        self.address = address
        self.lost: str | None = None
        self.is_connected = False  # it has answered our rendezvous process
        self._on_lost = on_lost
        self._server: hosted_store.StoreServer | None = None
        self._silence: Silence | None = None
        self._lost_after_s = 0.0

    @property
    def is_ours(self) -> bool:
        """Whether this node serves it."""
        return self._server is not None

    @property
    def loss(self) -> str:
        """Why it is out of reach, and where to look: for a node that can do nothing without it."""
        return f"{self.lost}: look at the output of the host that serves it"

    @property
    def pids(self) -> set[int]:
        return set() if self._server is None else {self._server.process.pid}

    def serve(self, listener: socket.socket, host: str, log: Path) -> None:
        """Serve it on ``listener``, in a process that writes its output to ``log``."""
        self._server = hosted_store.serve(listener, host, log)
        self._server.keep_running()

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    def answered(self) -> None:
        """Something has come from it."""
        if self._silence is not None:
            self._silence.received(time.monotonic())

    def lose(self, why: str) -> None:
        """It is out of reach; only the first reason counts."""
        if self.lost is None:
            why += self._stood_still()
            self.lost = f"the job's store at {self.address} is lost ({why})"
            self._on_lost(why)

    def _stood_still(self) -> str:
        """Whether this node did, for too long; the others go on without it then, or have ended."""
        stood_s = 0.0 if self._silence is None else self._silence.stood_still(time.monotonic())
        if stood_s <= self._lost_after_s:
            return ""
        limit = f"the others wait {self._lost_after_s:g}s for one"
        return f", once this node had stood still for {stood_s:.0f}s: {limit}"

    def watch(self, lost_after_s: float) -> None:
        """Take it for lost when no message comes from it for so long: until :meth:`pause`.

        The rendezvous process passes on each heartbeat; there are none between two rounds.
        """
        self._lost_after_s = lost_after_s
        pause, loop = lost_after_s / 3, asyncio.get_running_loop()
        silence = self._silence = Silence(pause, time.monotonic())

        def look() -> None:
            if silence is not self._silence or self.lost is not None:
                return
            quiet = silence.look(time.monotonic())
            if quiet > lost_after_s:
                self.lose(f"no answer for {quiet:.0f}s")
                return
            loop.call_later(pause, look)

        loop.call_later(pause, look)

    def pause(self) -> None:
        """A round is over: missing messages mean nothing until the next one is watched."""
        self._silence = None
