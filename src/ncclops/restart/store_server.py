"""The process that hosts the store's server, so that the server outlives every rank.

Rank 0 binds the port itself, so that it is not taken in between, and hands the listening socket to
this process, which has a session of its own and is reparented to init at once. It comes up

* in some 15 ms as a fork of rank 0, where that is safe: see ``_process.fork_is_safe``;
* in some 300 ms as a fresh interpreter anywhere else. It needs torch's TCPStore but not torch:
  loading only the extension module takes a tenth of the time and half of the memory of ``import
  torch``, and falls back to that where it fails.

It ends by itself when no client has been connected for 0.2 s.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import faulthandler
import functools
import importlib
import importlib.machinery
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from ncclops.restart._process import (
    duplicate_socket,
    fork_detached,
    fork_is_safe,
    ignore_what_is_sent_to_all,
    keep_alive,
)

# The ranks of a large job may take this long to come up before the first one connects.
_FIRST_CLIENT_WITHIN_S = 600.0
# Between the last disconnection and the end: a rank that reconnects finds the server there.
_LINGER_S = 0.2
_POLL_S = 0.1
_LOG_BYTES = 64 << 20
# A host that vanished never closes its connection; another client may, so look again.
_LOOK_AGAIN_S = 10.0

_BOOT = "import sys; sys.path[:0] = [{root!r}]; from {module} import main; main({path!r})"


def bind(port: int, *, loopback: bool = False) -> socket.socket | None:
    """A socket that listens on ``port``; ``None`` when the port is taken.

    On every interface, unless only this machine shall reach it.
    """
    sock, host = _unbound("127.0.0.1") if loopback else _unbound("::")
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keep_alive(sock)  # what it accepts inherits that: a host that vanished does not hang up
        sock.bind((host, port))
        sock.listen(4096)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise
    return sock


def _unbound(host: str) -> tuple[socket.socket, str]:
    """A socket for ``host``, and the host to bind it to: all of IPv4 where there is no IPv6."""
    if host == "::":
        try:
            sock = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            return sock, host
        except OSError:
            host = "0.0.0.0"
    return socket.socket(socket.AF_INET, socket.SOCK_STREAM), host


def start(listener: socket.socket, tcp_store: Any) -> Callable[[], object]:
    """Start the server on ``listener`` and return while it comes up: connections queue.

    ``tcp_store`` is torch's class. What is returned has to be called once the server answers: it
    reaps the process that has started it. The server writes its errors to the file that
    ``NCCLOPS_STORE_LOG`` names.
    """
    fd = listener.fileno()
    return start_detached(
        lambda: _host(fd, tcp_store),
        name="ncclops-store",
        module="ncclops.restart.store_server",
        keep=fd,
        arguments=(str(fd),),
    )


def start_detached(
    run: Callable[[], object], *, name: str, module: str, keep: int, arguments: Sequence[str]
) -> Callable[[], object]:
    """Call ``run``, or ``main`` of ``module`` with ``arguments``, in a process of its own.

    It outlives this one; see above for how it comes up, and ``_process.fork_detached``.
    """
    log = os.environ.get("NCCLOPS_STORE_LOG", os.devnull)
    if fork_is_safe():
        starter = fork_detached(name, run, keep=keep, log=log)
        return lambda: os.waitpid(starter, 0)
    return _start_interpreter(module, arguments, keep, log).wait


def _start_interpreter(
    module: str, arguments: Sequence[str], fd: int, log: str
) -> subprocess.Popen[bytes]:
    import ncclops

    root = str(Path(ncclops.__file__).parents[1])
    boot = _BOOT.format(root=root, module=module, path=list(sys.path))
    with Path(log).open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", boot, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=[fd],
            start_new_session=True,
        )


@functools.cache  # the extension cannot be initialised twice: the process would be aborted
def load_tcp_store() -> Any:
    """The TCPStore class, with as little of torch loaded as it needs."""
    if "torch._C" in sys.modules:  # by a sitecustomize, or a .pth file
        return importlib.import_module("torch.distributed").TCPStore
    try:
        return _load_extension_only()
    except Exception:  # noqa: BLE001 - what a future torch may need more, the full import has
        for name in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
            del sys.modules[name]
        return importlib.import_module("torch.distributed").TCPStore


def _load_extension_only() -> Any:
    """``torch._C`` without running ``torch/__init__.py``, whose thousand modules we do not need."""
    spec = importlib.machinery.PathFinder.find_spec("torch")
    if spec is None or spec.submodule_search_locations is None:
        raise ImportError("torch is not on the path")
    package = types.ModuleType("torch")
    package.__path__ = list(spec.submodule_search_locations)
    distributed = types.ModuleType("torch.distributed")
    distributed.__path__ = [str(Path(place) / "distributed") for place in package.__path__]
    sys.modules["torch"], sys.modules["torch.distributed"] = package, distributed
    extension = importlib.import_module("torch._C")
    extension._c10d_init()
    return importlib.import_module("torch._C._distributed_c10d").TCPStore


def serve(listener_fd: int | None, port: int, tcp_store: Any) -> Any:
    """A server in this process, on the given listening socket or on ``port``."""
    raise_fd_limit()
    limit_log()
    disable_name_lookups()
    address = ("localhost", port, None, True, timedelta(seconds=300))
    if listener_fd is None:
        return tcp_store(*address, wait_for_workers=False)
    try:
        return tcp_store(*address, wait_for_workers=False, master_listen_fd=listener_fd)
    except NotImplementedError:  # torch 2.5: its faster server cannot take over a socket
        return tcp_store(
            *address, wait_for_workers=False, master_listen_fd=listener_fd, use_libuv=False
        )


def serve_until_killed(listener_fd: int, port: int, tcp_store: Any) -> NoReturn:
    """As ``serve``, for a process that does nothing else, and says in its log that it does."""
    ignore_what_is_sent_to_all()
    store = serve(listener_fd, port, tcp_store)
    with contextlib.suppress(OSError):  # a full disk
        print(f"serving on port {store.port}", flush=True)
    while True:
        signal.pause()


def raise_fd_limit() -> None:
    """One descriptor per connection, and a few connections per rank: take what is allowed."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def limit_log() -> None:
    """Keep this process from filling a disk: no file of it grows beyond ``_LOG_BYTES``.

    It writes nothing but its log, in which torch notes clients at will: one line for each that
    connects, with ``TORCH_CPP_LOG_LEVEL=INFO``. Python ignores the signal that comes with the
    limit, so that a line is lost, and the server goes on.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    most = _LOG_BYTES if hard == resource.RLIM_INFINITY else min(_LOG_BYTES, hard)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


def disable_name_lookups() -> None:
    """Keep this process from querying a name server.

    torch's server looks up the name of each client that connects, in the thread that serves all
    of them: a query that gets lost would hold up the whole job, for 5 s with the usual resolver.
    """
    with contextlib.suppress(AttributeError):  # only glibc has it
        ctypes.CDLL(None).__nss_configure_lookup(b"hosts", b"files")


def wait_until_unused(port: int) -> None:
    """Return when no client but our own has been connected to ``port`` for ``_LINGER_S``.

    The sockets belong to torch's server thread, which does not report connections. So this looks
    for any one client and waits until that one has disconnected.
    """
    own = _own_ports(port)
    patience_s = _FIRST_CLIENT_WITHIN_S
    empty_since: float | None = None  # by two looks: this process may have been stopped meanwhile
    while True:
        now = time.monotonic()
        if (client := _find_client(port, own)) is not None:
            with client:
                _wait_for_disconnect(client)
            patience_s, empty_since = _LINGER_S, None
            continue
        if empty_since is None:
            empty_since = now
        elif now - empty_since >= patience_s:
            return
        time.sleep(_POLL_S)


def _own_ports(port: int) -> set[int]:
    """Where the connections of this process to its own server come from."""
    pairs = map(_ends, _open_fds())
    return {here for here, there in filter(None, pairs) if there == port}


def _find_client(port: int, own: set[int]) -> socket.socket | None:
    """A duplicate of a connection of another process; None if there is none."""
    for fd in reversed(_open_fds()):  # the newest are clients, if there are any
        ends = _ends(fd)
        if ends is not None and ends[0] == port and ends[1] not in own:
            return duplicate_socket(int(fd))
    return None


def _wait_for_disconnect(client: socket.socket) -> None:
    poll = select.poll()
    poll.register(client, select.POLLRDHUP)  # not for what it sends
    poll.poll(_LOOK_AGAIN_S * 1000)


def _ends(fd: str) -> tuple[int, int] | None:
    """The ports of a TCP connection, here and there; None for anything else."""
    sock = duplicate_socket(int(fd))
    if sock is None:
        return None
    with (
        sock,
        contextlib.suppress(OSError, IndexError, ValueError),
    ):  # a Unix socket's ends are names
        return int(sock.getsockname()[1]), int(sock.getpeername()[1])
    return None


def _open_fds() -> list[str]:
    return os.listdir("/proc/self/fd")  # noqa: PTH208 - names are all that is wanted, often


def serve_until_signalled(
    port: int, announce: Callable[[str], None], *, loopback: bool = False
) -> None:
    """``ncclops store serve``: host a store on ``port`` (0: any) until SIGTERM or SIGINT.

    With ``loopback``, for this machine only. ``announce`` is called with ``host:port`` once
    clients can connect. Raises ``OSError`` when the port is taken.
    """
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    listener = bind(port, loopback=loopback)
    if listener is None:
        raise OSError(errno.EADDRINUSE, f"port {port} is in use; choose another one")
    bound = listener.getsockname()[1]
    server = serve(listener.detach(), bound, load_tcp_store())
    announce(f"{'127.0.0.1' if loopback else socket.gethostname()}:{bound}")
    stop.wait()
    del server


def main(path: list[str]) -> None:
    """Entry of the fresh interpreter; ``path`` is where the starter finds its modules."""
    if os.fork():
        os._exit(0)
    sys.path.extend(place for place in path if place not in sys.path)
    faulthandler.enable()
    _host(int(sys.argv[1]), load_tcp_store())


def _host(listener_fd: int, tcp_store: Any) -> None:
    """Serve until no client is left."""
    ignore_what_is_sent_to_all()
    with socket.socket(fileno=os.dup(listener_fd)) as listener:
        port = listener.getsockname()[1]
    server = serve(listener_fd, port, tcp_store)
    wait_until_unused(port)
    del server


if __name__ == "__main__":
    serve_until_signalled(int(sys.argv[1]), lambda address: print(address, flush=True))
