"""A rank's side of the relay that the ranks of its host share, see ``_store.relay``.

``join`` finds the relay by the name of its socket, which is the same on all ranks of the host, or
starts it: binding the name is what makes a rank the starter. A rank connects to the store itself at
first, and at once where its relay has ended: a relay takes a moment to come up, and the store's
server goes when it has no client. ``_store.connections`` moves it to the relay, in the background.
A relay that is silent for five beats is stopped, and is killed, which ends it for all its ranks.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import select
import signal
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch import distributed

from ncclops.restart._store import relay
from ncclops.restart._store.relay import BEAT_EVERY_S, Frames, encode, peer_of

log = logging.getLogger("ncclops.restart")

# As many beats that do not come mean that the relay is stopped. They are counted one by one: where
# this process was stopped as well, only one of them is late.
_MOST_SILENT_BEATS = 5
# A fresh interpreter with torch's library takes 0.3 s, on a machine that is busy some seconds.
_UP_WITHIN_S = 10.0
# Binding and connecting may each meet a relay that ends just then.
_MOST_MEETINGS = 10


class RelayClients:
    """Of one process and one store. ``answer_s`` is the patience with a request, in seconds."""

    def __init__(self, server: tuple[str, int], name: str, answer_s: float) -> None:
        self._server = server
        self._answer_s = answer_s
        identity = json.dumps([os.getuid(), *server, name]).encode()
        self._name = f"\0ncclops-store-{hashlib.sha256(identity).hexdigest()[:32]}"

    def join(self, prefix: str) -> RelayedStore | None:
        """The store under ``prefix``, over the relay; ``None`` where that cannot be had.

        Blocks for 10 s at most. Any thread.
        """
        deadline = time.monotonic() + _UP_WITHIN_S
        with contextlib.ExitStack() as until_met:
            try:
                for _ in range(_MOST_MEETINGS):
                    if (store := self._meet(prefix, deadline, until_met)) is not None:
                        return store
            except (OSError, distributed.DistNetworkError) as error:
                log.warning("no relay to the store, which is used directly: %s", error)
        return None

    def _meet(
        self, prefix: str, deadline: float, until_met: contextlib.ExitStack
    ) -> RelayedStore | None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        if sock.connect_ex(self._name) != 0:
            sock.close()
            self._start(until_met)
            return None
        seen, user = peer_of(sock)
        if user != os.getuid():
            raise PermissionError(f"user {user} listens in the place of the relay")
        store = RelayedStore(sock, prefix, self._answer_s)
        try:
            pid = store.greet(deadline)
        except distributed.DistNetworkError:
            if time.monotonic() < deadline:
                return None  # it was about to end
            raise
        # Connected before it listened itself: what is seen is who has started it.
        return store if seen in (pid, 0) else None

    def _start(self, until_met: contextlib.ExitStack) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            try:
                listener.bind(self._name)
            except OSError:
                return  # another rank was first
            listener.listen(1024)
            # Should this process end meanwhile, the relay sees that its last rank has gone.
            until_met.enter_context(first := socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            first.connect(self._name)
            reap = relay.start(listener, self._server, self._answer_s, distributed.TCPStore)
        reap()


class RelayedStore:
    """What the ledger needs of torch's store, done by the relay. One thread's.

    Raises ``DistNetworkError`` when the relay has ended, has stopped, or when the store behind it
    does not answer; it is of no use after that.
    """

    def __init__(
        self,
        sock: socket.socket,
        prefix: str,
        answer_s: float,
        silent_beats: float = _MOST_SILENT_BEATS,
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._prefix = prefix
        self._answer_s = answer_s
        self._silent_beats = silent_beats
        self._frames = Frames()
        self._pid = 0
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._poll_room = select.poll()
        self._poll_room.register(sock, select.POLLOUT)
        self.timeout = timedelta(seconds=answer_s)

    def __del__(self) -> None:
        self._sock.close()

    def greet(self, deadline: float) -> int:
        """The process id of the relay, as that sees it, once it is up."""
        pid = int(self._ask(["hello"], deadline, silent_beats=math.inf))
        if peer_of(self._sock)[0] == pid:
            self._pid = pid
        return pid

    def shut_down(self) -> None:
        """End the call that waits on it. Any thread."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    # --- as torch's stores ----------------------------------------------------------------------

    def has_extended_api(self) -> bool:
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        """Of ``get``."""
        self.timeout = timeout

    def add(self, key: str, amount: int) -> int:
        return int(self._request("add", self._full(key), amount))

    def set(self, key: str, value: str) -> None:
        self._request("set", self._full(key), value)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return str(self._request("compare_set", self._full(key), expected, desired)).encode()

    def append(self, key: str, value: str) -> None:
        self._request("append", self._full(key), value)

    def list_keys(self) -> list[str]:
        return [str(key) for key in self._request("list_keys", self._full(""))]

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._request("check", [*map(self._full, keys)]))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        values = self._request("multi_get", [*map(self._full, keys)])
        return [str(value).encode() for value in values]

    def multi_set(self, keys: Sequence[str], values: Sequence[str]) -> None:
        self._request("multi_set", [*map(self._full, keys)], list(values))

    def delete_key(self, key: str) -> bool:
        return bool(self._request("delete_key", self._full(key)))

    def get(self, key: str) -> bytes:
        """The value of a key that is written once, when it has one.

        Raises ``DistStoreError`` when that takes longer than ``timeout``.
        """
        deadline = time.monotonic() + self.timeout.total_seconds()
        value = self._ask(["get", self._full(key)], deadline)
        if value is None:
            raise distributed.DistStoreError(f"{key} was not set within {self.timeout}")
        return str(value).encode()

    # --- messages -------------------------------------------------------------------------------

    def _full(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def _request(self, *message: object) -> Any:
        return self._ask(message, time.monotonic() + self._answer_s)

    def _ask(
        self, message: Sequence[object], deadline: float, silent_beats: float | None = None
    ) -> Any:
        """The relay's answer. At the deadline ``None`` for a wait, for all else an error."""
        silent_beats = silent_beats or self._silent_beats
        try:
            self._send(encode(message), silent_beats)
            return self._receive(message[0], deadline, silent_beats)
        except OSError as error:
            failure = str(error)
            if isinstance(error, TimeoutError):
                self._kill_relay()
        except BaseException:  # an interruption: the answer would be taken for the next one's
            self.shut_down()
            raise
        self.shut_down()
        # With nothing behind it, like torch's own: it is looked for what else has led to an end.
        raise distributed.DistNetworkError(f"the relay to the store: {failure}")

    def _send(self, data: bytes, silent_beats: float) -> None:
        """Have the relay take ``data``, with no limit to the time in all.

        The plan of a large job is more than a socket holds, and a busy machine slow to move it.
        """
        unsent, silent = memoryview(data), 0
        while unsent:
            if self._poll_room.poll(round(1000 * BEAT_EVERY_S)):
                unsent, silent = unsent[self._sock.send(unsent) :], 0
                continue
            silent += 1
            if silent >= silent_beats:
                raise TimeoutError(f"it took nothing for {silent * BEAT_EVERY_S:g} s")

    def _receive(self, operation: object, deadline: float, silent_beats: float) -> Any:
        silent = 0
        while True:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                if operation != "get":
                    raise OSError(f"{operation} was not answered in time")
                self._send(encode(["cancel"]), silent_beats)
                operation, deadline = "cancel", time.monotonic() + self._answer_s
                continue
            pause_s = min(left_s, BEAT_EVERY_S)
            if not self._poll.poll(max(1, round(1000 * pause_s))):
                silent += pause_s == BEAT_EVERY_S
                if silent >= silent_beats:
                    raise TimeoutError(f"it was silent for {silent * BEAT_EVERY_S:g} s")
                continue
            silent = 0
            data = self._sock.recv(1 << 18)
            if not data:
                raise OSError("it has ended")
            for frame in self._frames.feed(data):
                if frame:
                    return json.loads(frame)

    def _kill_relay(self) -> None:
        """A relay that is stopped is of no use to any rank, and would stay."""
        if not self._pid:
            return  # of another pid name space
        log.warning("the relay to the store, process %d, does not run: it is killed", self._pid)
        with contextlib.suppress(OSError):
            pidfd = os.pidfd_open(self._pid)
            # One that has ended would show; so that is still its number.
            if not self._poll.poll(0):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
