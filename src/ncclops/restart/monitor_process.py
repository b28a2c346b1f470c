"""A rank's monitor process as its main process sees it: start it, replace it, send to it.

It is a fresh interpreter (``subprocess`` uses ``vfork`` and ``exec``, safe with threads and with a
CUDA context; all descriptors but four are closed) that runs without ``site`` and without torch: up
in some 20 ms, about 10 MB. What it does is in ``_monitor.main``.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import secrets
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import ncclops
from ncclops.restart._interrupt.delicate import is_delicate
from ncclops.restart._monitor.link import Page, create_page_fd, receive_packet
from ncclops.restart.snapshots import OutsideViewSource

log = logging.getLogger("ncclops.restart")

_BOOT = (
    "import sys; sys.path.insert(0, {root!r}); "
    "from ncclops.restart._monitor.main import main; main()"
)


@dataclass(frozen=True)
class MonitorProcessSettings:
    """What a monitor process is started with."""

    rank: int
    host: str
    monitor_process_interval: timedelta
    heartbeat_interval: timedelta
    heartbeat_timeout: timedelta
    termination_grace_time: timedelta
    abort_timeout: timedelta
    logfile: str | None
    pidfile: str | None
    incident_dir: str | None
    outside_view: OutsideViewSource | None


class MonitorProcess:
    """The handle of one rank's monitor process.

    ``page`` and the listening socket belong to the main process and survive a monitor process
    that has to be replaced; its peers reconnect to the same ``address``. ``send`` may be called
    by any thread; the watchdog thread alone reads and replaces.
    """

    def __init__(self, settings: MonitorProcessSettings) -> None:
        self._settings = settings
        self._page_fd = create_page_fd()
        self.page = Page(self._page_fd)
        self._token = secrets.token_hex(16)
        self._listener = socket.create_server(
            (settings.host, 0), family=_family(settings.host), backlog=16
        )
        self._lock = threading.Lock()
        self._link: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.started_at = 0.0  # the last start, by the clock of the page

    @property
    def address(self) -> tuple[int, str, int, str]:
        """Rank, host, port and token, as a ``_monitor.ring.Address``."""
        port: int = self._listener.getsockname()[1]
        return (self._settings.rank, self._settings.host, port, self._token)

    @property
    def pid(self) -> int | None:
        """The process id of the monitor process, ``None`` before the start and after the end."""
        return self._process.pid if self._process is not None else None

    def fileno(self) -> int:
        """The link, for ``poll``; -1 while there is no monitor process."""
        return self._link.fileno() if self._link is not None else -1

    def start(self) -> None:
        """Start the monitor process, or another one after the last was lost."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.send(self._token.encode())
        ours.setblocking(False)
        # Opened here, so that a death is seen that comes before the monitor process has come up.
        pidfd = _open_pidfd()
        fds = (self._page_fd, theirs.fileno(), self._listener.fileno())
        boot = _BOOT.format(root=str(Path(ncclops.__file__).parents[1]))
        config = json.dumps(self._config(*fds, pidfd))
        command = [sys.executable, "-I", "-S", "-c", boot, config]
        # Before it runs: it takes a first tick that is late for a machine that was stopped.
        self.started_at = self.page.monitor_tick = self.page.now()
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=fds if pidfd is None else (*fds, pidfd),
                start_new_session=True,
            )
        finally:
            theirs.close()
            if pidfd is not None:
                os.close(pidfd)
        with self._lock:
            self._link, self._process = ours, process
        if self._settings.pidfile is not None:
            _write_pid(process.pid, Path(self._settings.pidfile))

    @is_delicate  # holds a lock
    def send(self, message: dict[str, Any]) -> None:
        """Send ``message``; it is lost if the process is gone or does not read."""
        with self._lock, contextlib.suppress(OSError):
            if self._link is not None:
                self._link.send(json.dumps(message).encode())

    def receive(self) -> dict[str, Any] | None:
        """The next message; ``None``: none waits. Raises ``EOFError`` when the process is gone."""
        if self._link is None:
            raise EOFError
        data = receive_packet(self._link)
        if data is None:
            return None
        if not data:
            raise EOFError
        message: dict[str, Any] = json.loads(data)
        return message

    def replace(self) -> None:
        """End the monitor process, whatever state it is in, and start another."""
        self._end(grace_s=0)
        self.start()

    def abandon(self) -> None:
        """End the monitor process without starting another."""
        self._end(grace_s=0)

    def stop(self) -> None:
        """Have the process end, and release everything that was shared with it."""
        self.page.finished = 1
        self.send({"op": "bye"})
        self._end(grace_s=5)
        self._listener.close()
        self.page.close()
        os.close(self._page_fd)

    def leave_behind(self, reason: str) -> None:
        """Have the process stay until it has reported that this rank left, because of ``reason``.

        ``stop`` is still to be called, and does not end it.
        """
        self.page.finished = 1
        self.send({"op": "departed", "detail": reason})
        with self._lock:
            link, process = self._link, self._process
            self._link = self._process = None
        if link is not None:
            link.close()
        if process is not None:
            threading.Thread(target=process.wait, name="ncclops-reap", daemon=True).start()

    def _end(self, grace_s: float) -> None:
        with self._lock:
            link, process = self._link, self._process
            self._link = self._process = None
        if link is not None and not grace_s:
            link.close()
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(grace_s)
            process.kill()
            process.wait()
        if link is not None:
            link.close()

    def _config(
        self, page_fd: int, link_fd: int, listen_fd: int, pidfd: int | None
    ) -> dict[str, Any]:
        settings = self._settings
        return {
            "rank": settings.rank,
            "page_fd": page_fd,
            "link_fd": link_fd,
            "listen_fd": listen_fd,
            "pidfd": pidfd,
            "monitor_process_interval_s": settings.monitor_process_interval.total_seconds(),
            "heartbeat_interval_s": settings.heartbeat_interval.total_seconds(),
            "heartbeat_timeout_s": settings.heartbeat_timeout.total_seconds(),
            "termination_grace_time_s": settings.termination_grace_time.total_seconds(),
            "abort_timeout_s": settings.abort_timeout.total_seconds(),
            "logfile": settings.logfile,
            "main_pid": os.getpid(),
            "incident_dir": settings.incident_dir,
            "outside_view": settings.outside_view,
            "log_level": log.getEffectiveLevel(),
        }


def _open_pidfd() -> int | None:
    """Of this process; ``None`` where the kernel or a seccomp filter refuses that."""
    try:
        return os.pidfd_open(os.getpid())
    except (AttributeError, OSError) as error:  # the former: Python was built for an older kernel
        _say_that_pidfds_are_refused(str(error))
        return None


@functools.cache  # once
def _say_that_pidfds_are_refused(error: str) -> None:
    log.warning(
        "pidfd_open is refused (%s): the end of this process is noticed up to "
        "monitor_process_interval later than at once; allow pidfd_open and pidfd_send_signal in "
        "the container's seccomp profile, or use Linux 5.3 or newer",
        error,
    )


def _write_pid(pid: int, path: Path) -> None:
    """The file always holds a whole number: a reader may be about to send a signal to it."""
    draft = path.with_name(f".{path.name}.{pid}")
    draft.write_text(f"{pid}\n")
    draft.replace(path)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
