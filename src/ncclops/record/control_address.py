"""The address of a run's server, and its token: ``<run>/control/http.sock`` and ``token``.

The address of a Unix socket holds 107 bytes, and run directories have longer names. So sockets are
bound and reached through a descriptor of their directory, ``/proc/self/fd/<n>/http.sock``.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ncclops.errors import UsageError
from ncclops.record.paths import RunPaths

_BACKLOG = 512
_SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "ncclops-"
# Errors of file systems that do not support sockets (some cluster and FUSE ones), or that forbid
# them in this directory.
_NO_SOCKETS_HERE = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EROFS)


def listen_unix(run_dir: Path) -> socket.socket:
    """A listening socket behind ``RunPaths.socket``, and a fresh token, both for their owner only.

    Raises ``OSError``. Where the file system takes no sockets, the path is a link to one in shared
    memory.
    """
    path = RunPaths(run_dir).socket
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_socket(run_dir)
    _make_token(run_dir)
    try:
        return _bind(path)
    except OSError as error:
        if error.errno not in _NO_SOCKETS_HERE:
            raise
    target = _SHARED_MEMORY / f"{_PREFIX}{os.getuid()}-{secrets.token_hex(8)}.sock"
    listener = _bind(target)
    path.symlink_to(target)
    return listener


def remove_socket(run_dir: Path) -> None:
    """Remove the socket of a run, and what its path is a link to."""
    path = RunPaths(run_dir).socket
    with suppress(OSError):
        target = path.readlink()
        if target.parent == _SHARED_MEMORY and target.name.startswith(_PREFIX):
            target.unlink()
    with suppress(OSError):
        path.unlink()


def connect_unix(run_dir: Path, timeout_s: float) -> socket.socket:
    """A connection to the server of a run. Raises ``OSError`` where no process listens."""
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        client.settimeout(timeout_s)
        with _short(RunPaths(run_dir).socket) as address:
            client.connect(address)
    except BaseException:
        client.close()
        raise
    return client


def listen_tcp(text: str) -> socket.socket:
    """A listening socket at ``text``: ``PORT`` (on loopback) or ``HOST:PORT``; port 0 is any.

    Raises ``UsageError`` when that is no address, or is taken.
    """
    host, _, port = text.rpartition(":")
    host = host.strip("[]") or "127.0.0.1"
    if not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"{text!r} is no address to listen on: write PORT or HOST:PORT")
    try:
        family = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, int(port)), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise UsageError(
            f"cannot listen on {host}:{port} ({error.strerror or error}):"
            " give another port, or 0 to have a free one picked"
        ) from error


def _make_token(run_dir: Path) -> None:
    """A fresh token, written where its owner alone can read it."""
    token, path = secrets.token_urlsafe(32), RunPaths(run_dir).token
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w") as file:
        os.fchmod(fd, 0o600)  # whatever the directory's default ACL has made of it
        file.write(token + "\n")


def read_token(run_dir: Path) -> str:
    """The token of a run. Raises ``OSError`` where it is not there or not ours to read."""
    return RunPaths(run_dir).token.read_text().strip()


def _bind(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _short(path) as address:
            listener.bind(address)
        path.chmod(0o600)
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


@contextmanager
def _short(path: Path) -> Iterator[str]:
    """``path`` by a name that fits into a socket's address, as long as the context is open."""
    fd = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{path.name}"
    finally:
        os.close(fd)
