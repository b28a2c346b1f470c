"""The snapshot server: a thread of each worker that takes snapshots of it on request.

It sleeps in ``accept`` and costs nothing until a request comes. For the case that no Python thread
can run there is a second means: faulthandler's C-level dump of all stacks, registered on a
real-time signal, into a memory file opened in advance (``signal_stacks`` has the other side).
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ncclops.capture.rank_snapshot import Identity, RankSnapshot, prepare
from ncclops.capture.signal_stacks import STACKS_NAME
from ncclops.host import process_view
from ncclops.record import snapshot_server_record
from ncclops.record.paths import RankPaths, RunPaths
from ncclops.record.snapshot_server_record import SnapshotServerRecord

# A request is a line with a path in it; a client that needs longer to send it is not ours.
_REQUEST_BYTES = 64 << 10
_REQUEST_WITHIN_S = 5.0
# Beyond which the recorder is left out of a snapshot.
TAKE_WITHIN_S = 2.0

_current: SnapshotServer | None = None


@dataclass(frozen=True)
class Contact:
    """How the snapshot server is reached; see ``signal_stacks.StackDumper`` for the numbers."""

    pid: int
    started_ticks: int
    tid: int
    signal: int
    stacks_fd: int
    main_thread: int
    address: str  # of a socket in Linux's abstract name space


class SnapshotServer:
    """One per process. ``since_ns`` (wall time) is when the present iteration began."""

    def __init__(self, who: Identity) -> None:
        self.who = who
        self.since_ns = 0
        self._address = f"ncclops-snapshots-{os.urandom(12).hex()}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind("\0" + self._address)
        self._listener.listen(8)
        self._stacks_fd, self._signal = _arm_stack_dump()
        self._thread = threading.Thread(target=self._serve, name="ncclops-snapshots", daemon=True)
        self._thread.start()
        # A forked child has the socket and not the thread: no thread would answer there.
        os.register_at_fork(after_in_child=self._listener.close)

    @property
    def contact(self) -> Contact:
        """For snapshot-server.json and for the monitor process."""
        pid = os.getpid()
        stat = process_view.read_stat(Path(f"/proc/{pid}"))
        return Contact(
            pid=pid,
            started_ticks=stat.started_ticks if stat is not None else 0,
            tid=self._thread.native_id or 0,
            signal=self._signal,
            stacks_fd=self._stacks_fd,
            main_thread=threading.main_thread().ident or 0,
            address=self._address,
        )

    def announce(self) -> None:
        """Write ``ranks/<rank>/snapshot-server.json``, by which ``where`` and the agent find us."""
        if self.who.rank_dir is None:
            return
        device = {name: os.environ[name] for name in _DEVICE if name in os.environ}
        with suppress(OSError):  # a full disk does not stop training
            record = SnapshotServerRecord(
                rank=self.who.rank,
                host=self.who.host,
                device=device,
                boot_id=process_view.boot_id(),
                **vars(self.contact),
            )
            snapshot_server_record.write(RankPaths(self.who.rank_dir).snapshot_server, record)

    def _serve(self) -> None:
        prepare()
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # too many open files, say: the next one may be lucky
                if self._listener.fileno() < 0:
                    return
                time.sleep(1)  # nothing announces that descriptors are to be had again
                continue
            with connection, suppress(OSError):
                if _is_ours(connection):
                    self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        connection.settimeout(_REQUEST_WITHIN_S)
        with connection.makefile("rb") as stream:
            line = stream.readline(_REQUEST_BYTES)
        try:
            request = json.loads(line)
            snapshot = RankSnapshot(self.who, self.since_ns)
            snapshot.take(TAKE_WITHIN_S)
            snapshot.read_gpu()
            snapshot.write(Path(request["directory"]))
            answer: dict[str, Any] = {"ok": True}
        except Exception as error:  # noqa: BLE001 - a request must never harm the worker
            answer = {"ok": False, "reason": f"{type(error).__name__}: {error}"}
        connection.sendall(json.dumps(answer).encode() + b"\n")


_DEVICE = ("LOCAL_RANK", "CUDA_VISIBLE_DEVICES")


def start(rank: int, run: Path | None) -> SnapshotServer:
    """This process's server, started if there is none yet. ``run`` is the run directory.

    Raises ``OSError`` where the system has no thread, socket or memory for it.
    """
    global _current  # one per process: signal and thread are the process's
    if _current is None or _current.who.pid != os.getpid():  # a fork has the object alone
        rank_dir = None if run is None else RunPaths(run).rank(rank).root
        _current = SnapshotServer(Identity(rank, rank_dir))
        _current.announce()
    return _current


def start_worker(environ: Mapping[str, str], run_variable: str) -> None:
    """Start the server of a worker of ``ncclops launch``, if that is possible.

    A worker that crashes in C (Gloo aborts one that is sent too much) prints its stacks as well.
    """
    run = environ.get(run_variable)
    if run is not None:
        with suppress(OSError, RuntimeError, ValueError):
            faulthandler.enable()
        with suppress(OSError, RuntimeError, ValueError):
            start(int(environ.get("RANK", "0")), Path(run))


def _arm_stack_dump() -> tuple[int, int]:
    """Have faulthandler dump all stacks into a memory file on a signal; (descriptor, signal).

    Signal 0: none is free, and stacks can only be had from Python.
    """
    stacks_fd = os.memfd_create(STACKS_NAME, os.MFD_CLOEXEC)
    _append_only(stacks_fd)
    caught = process_view.signal_sets(os.getpid(), os.getpid())[2]
    # From the top: the restart core, and others who need one, look from the bottom.
    numbers = range(signal.SIGRTMAX - 1, signal.SIGRTMIN, -1)
    number = next((n for n in numbers if _is_unused(n, caught)), 0)
    if number:
        faulthandler.register(number, file=stacks_fd, all_threads=True, chain=False)
    return stacks_fd, number


def _append_only(fd: int) -> None:
    import fcntl

    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_APPEND)


def _is_unused(number: int, caught: int) -> bool:
    return not caught & 1 << (number - 1) and signal.getsignal(number) == signal.SIG_DFL


def _is_ours(connection: socket.socket) -> bool:
    """Whether the other side is the same user, or root: all can see the socket's name."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    _, uid, _ = struct.unpack("iII", credentials)
    return uid in (0, os.getuid())
