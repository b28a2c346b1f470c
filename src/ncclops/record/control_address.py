"""The address of a run's server, and its token: ``<run>/control/http.sock`` and ``token``.

The address of a Unix socket holds 107 bytes, and run directories have longer names. So sockets are
bound and reached through a descriptor of their directory, ``/proc/self/fd/<n>/http.sock``.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ncclops.errors import UsageError
from ncclops.record.paths import RunPaths
from ncclops.record.regular_file import open_regular
from ncclops.whole_numbers import MOST_PORT, whole_number

_BACKLOG = 512
_MOST_TOKEN_BYTES = 4096
_SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "ncclops-"
_IN_THE_MAKING_S = 60.0
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


def sweep_sockets() -> None:
    """Remove the sockets of this user in shared memory at which no process listens any more."""
    for path in _SHARED_MEMORY.glob(f"{_PREFIX}{os.getuid()}-*.sock"):
        with suppress(OSError):
            found = path.lstat()
            ours = stat.S_ISSOCK(found.st_mode) and found.st_uid == os.geteuid()
            # One that is being made takes no connections for a moment.
            if ours and found.st_mtime < time.time() - _IN_THE_MAKING_S and not _is_served(path):
                path.unlink()


def _is_served(path: Path) -> bool:
    try:
        _connect(path, 0).close()  # 0: no wait; one whose clients have to wait is served
    except ConnectionRefusedError:
        return False
    except OSError:
        return True
    return True


def remove_leftovers(run_dir: Path) -> None:
    """Remove socket and token of a run whose processes were killed."""
    if not _is_served(RunPaths(run_dir).socket):
        remove_socket(run_dir)
        with suppress(OSError):
            RunPaths(run_dir).token.unlink()


def connect_unix(run_dir: Path, timeout_s: float) -> socket.socket:
    """A connection to the server of a run. Raises ``OSError`` where no process listens."""
    return _connect(RunPaths(run_dir).socket, timeout_s)


def _connect(path: Path, timeout_s: float) -> socket.socket:
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        client.settimeout(timeout_s)
        with _short(path) as address:
            client.connect(address)
    except BaseException:
        client.close()
        raise
    return client


def tcp_address(text: str) -> tuple[str, int]:
    """Host and port of ``PORT`` (on loopback) or ``HOST:PORT``. Raises ``UsageError``."""
    host, _, port = text.rpartition(":")
    number = whole_number(port, MOST_PORT)
    if number is None:
        raise UsageError(
            f"--control-listen {text[:80]}: no address to listen on: write PORT or HOST:PORT"
        )
    return host.strip("[]") or "127.0.0.1", number


def listen_tcp(text: str, in_use: Callable[[int], str] = lambda _: "") -> socket.socket:
    """A listening socket at ``text``: ``PORT`` (on loopback) or ``HOST:PORT``; port 0 is any.

    Raises ``UsageError`` when that is no address, or is taken; ``in_use`` says by whom.
    """
    host, number = tcp_address(text)
    try:
        family = socket.getaddrinfo(host, number, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, number), family=family, backlog=_BACKLOG)
    except OSError as error:
        why = error.strerror or str(error)
        if error.errno == errno.EADDRINUSE:
            why = os.strerror(errno.EADDRINUSE) + in_use(number)
        raise UsageError(
            f"cannot listen on {host}:{number} ({why}):"
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


def read_token(run_dir: Path) -> tuple[str, int]:
    """The token of a run, and its owner's user id.

    Links are not followed: who has made the run directory could have any file of the reader sent
    to whatever listens there. Raises ``OSError`` where it is not there, or not ours to read.
    """
    path = RunPaths(run_dir).token
    flags = os.O_NOFOLLOW | os.O_CLOEXEC
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | flags)
    try:
        with open_regular(Path(f"/proc/self/fd/{folder}", path.name), follow=False) as file:
            token, owner = file.read(_MOST_TOKEN_BYTES), os.fstat(file.fileno()).st_uid
    finally:
        os.close(folder)
    return token.decode("ascii", "replace").strip(), owner


def user_of_peer(connection: socket.socket) -> int:
    """The user id of the process that listens at the other end of a Unix socket."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    user: int = struct.unpack("iII", credentials)[1]
    return user


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
