"""What a main process and its monitor process share: a page of memory, and messages.

Standard library only, as the monitor process imports nothing else.
"""

from __future__ import annotations

import enum
import json
import math
import mmap
import os
import socket
import time
from typing import Any

_BYTES = 4096
_MOST_RANKS = 1 << 24

# An abort frees a thread that waits in NCCL within milliseconds.
FREED_WITHIN_S = 1.0


class Watch(enum.IntEnum):
    """Which timeouts the monitor process applies to the main thread at the moment."""

    OFF = -1  # the user switched hang protection off
    NONE = 0  # inside the wrapper's own waits, which carry deadlines of their own
    HARD = 1  # finalize and health checks: not interrupted, but ended at the hard timeout
    SOFT_AND_HARD = 2  # initialize and the wrapped function


class _Slot:
    """A number at a fixed place of the page."""

    def __init__(self, index: int) -> None:
        self._index = index

    def __get__(self, page: Page, _owner: type | None = None) -> float:
        return page.cells[self._index]

    def __set__(self, page: Page, value: float) -> None:
        page.cells[self._index] = value


class Page:
    """Progress, timeouts and identity of one rank.

    Written by the main process. The monitor process writes ``monitor_tick``, and ``soft_s`` and
    ``hard_s`` when another rank changes the timeouts of all.
    """

    main_beat = _Slot(0)  # the main thread executed bytecode
    ping = _Slot(1)  # the last manual heartbeat; 0 until the first one of the iteration
    watchdog_tick = _Slot(2)  # any Python thread of the process got to run
    monitor_tick = _Slot(3)  # the monitor process is alive
    watch = _Slot(4)  # a Watch
    soft_s = _Slot(5)  # timeouts in force outside phases
    hard_s = _Slot(6)
    phase_soft_s = _Slot(7)  # timeouts of the innermost phase; 0 outside phases
    phase_hard_s = _Slot(8)
    iteration = _Slot(9)
    number = _Slot(10)  # the rank's number in this iteration
    finished = _Slot(11)  # 1: the main process leaves the wrapper, and its exit is expected
    timeouts_stamp = _Slot(12)  # of the change that soft_s and hard_s come from, see next_stamp
    incidents_from = _Slot(13)  # 1 + the number of the incident that ends iteration 0; 0: unknown
    abort_began = _Slot(14)  # the abort of the groups is under way since; 0: it is not
    blocked_since = _Slot(15)  # aborted then, and nothing frees the main thread; 0: it is not so
    group_made_in = _Slot(16)  # 1 + the last iteration with a default group; 0: in none so far

    # The clock of both processes. Kept, as a script may put another one in the module.
    now = staticmethod(time.monotonic)

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, _BYTES)
        self._view = memoryview(self._map)
        self.cells = self._view.cast("d")

    def touch(self) -> None:
        """Start the progress clocks anew; the manual one is disarmed."""
        self.ping = 0.0
        self.main_beat = self.watchdog_tick = self.now()

    def blocked_s(self, now: float) -> float:
        """How long the main thread has been where no abort of its groups frees it; 0: it is not."""
        return now - self.blocked_since if self.blocked_since else 0.0

    def aborting_s(self, now: float) -> float:
        """How long an abort of the groups has been under way; 0: none is."""
        return now - self.abort_began if self.abort_began else 0.0

    def timeouts(self) -> tuple[float, float]:
        """The (soft, hard) timeouts in force, in seconds."""
        return self.phase_soft_s or self.soft_s, self.phase_hard_s or self.hard_s

    def change_timeouts(self, soft_s: float, hard_s: float, stamp: float) -> None:
        """Adopt the change with ``stamp``, unless a later one is already in force."""
        if stamp >= self.timeouts_stamp:
            self.soft_s, self.hard_s, self.timeouts_stamp = soft_s, hard_s, stamp

    def next_stamp(self, rank: int) -> float:
        """For a change that ``rank`` makes: later than the one in force here, on any clock.

        A whole number counts the changes, one after another; the rank, as a fraction, orders those
        that are made at the same time.
        """
        return math.floor(self.timeouts_stamp) + 1 + rank / _MOST_RANKS

    def close(self) -> None:
        """Unmap the page; using it afterwards raises ``ValueError``."""
        self.cells.release()
        self._view.release()
        self._map.close()


def create_page_fd() -> int:
    """A descriptor of a new, zeroed page, which ends with the last process that holds it."""
    fd = os.memfd_create("ncclops-progress", os.MFD_CLOEXEC)
    os.ftruncate(fd, _BYTES)
    return fd


Message = dict[str, Any]

# A report with a full traceback is far shorter; anything longer does not come from a rank.
_LONGEST_LINE = 1 << 20


class Peer:
    """One connection to another monitor process; never blocks."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.trusted = False
        self._received = b""
        self._unsent = b""

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, message: Message) -> None:
        """Queue ``message``, send what the socket takes. A broken connection shows on receive."""
        self._unsent += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send more of what is queued."""
        try:
            while self._unsent:
                self._unsent = self._unsent[self.sock.send(self._unsent) :]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self._unsent = b""

    def receive(self) -> list[Message] | None:
        """The messages that have arrived; ``None`` when the other side is gone."""
        try:
            data = self.sock.recv(65536)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError:
            return None
        if not data or len(self._received) + len(data) > _LONGEST_LINE:
            return None
        *lines, self._received = (self._received + data).split(b"\n")
        return [message for line in lines if (message := _parse(line)) is not None]

    def close(self) -> None:
        """Close the connection."""
        self.sock.close()


def receive_packet(sock: socket.socket) -> bytes | None:
    """The next packet of a socket pair that does not block.

    ``None`` if none waits, empty when the other end is gone and all it has sent was read.
    """
    for _ in range(2):
        try:
            return sock.recv(_LONGEST_LINE)
        except (BlockingIOError, InterruptedError):
            return None
        except ConnectionResetError:
            # The other end went without reading what we had sent. Linux says so, once, before it
            # hands out what that end had sent.
            continue
        except OSError:
            break
    return b""


def _parse(line: bytes) -> Message | None:
    # The port is open to the network: a stray connection may send anything.
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) and "op" in message else None
