"""Hosts for tests: network namespaces with a link each to one bridge, on this machine.

    h0 (10.93.N.1) ──┐
    h1 (10.93.N.2) ──┼── bridge in a namespace of its own (10.93.N.254)
    …                ┘

Each has a host name, its own loopback, and an interface ``eth0`` that can be cut. They share the
file system, as hosts of a cluster do.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.conftest import LIMIT_S, clean_environ

Background = subprocess.Popen[bytes]


def why_not() -> str | None:
    """Why this machine allows no network namespaces; None if it does."""
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return "needs iproute2 and util-linux"
    probe = f"ncclops-probe-{secrets.token_hex(3)}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode != 0:
        return f"network namespaces cannot be made here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", probe], check=True)
    return None


class Hosts:
    """``count`` hosts, ``h0`` and so on; and ``hub``, where the bridge is."""

    def __init__(self, count: int, directory: Path) -> None:
        self.directory = directory
        self._mark = f"nc{secrets.token_hex(3)}"
        self._number = int(self._mark[2:6], 16) % 250
        self._started: list[Background] = []
        self._count = count
        hub = self._namespace("hub")
        _ip("netns", "add", hub)
        self._in(hub, "link", "set", "lo", "up")
        self._in(hub, "link", "add", "br0", "type", "bridge")
        self._in(hub, "addr", "add", f"{self.address('hub')}/24", "dev", "br0")
        self._in(hub, "link", "set", "br0", "up")
        for number in range(count):
            self._add_host(number)

    def _add_host(self, number: int) -> None:
        host, hub, link = f"h{number}", self._namespace("hub"), f"to-h{number}"
        inside = self._namespace(host)
        _ip("netns", "add", inside)
        self._in(hub, "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", inside)
        self._in(hub, "link", "set", link, "master", "br0", "up")
        self._in(inside, "link", "set", "lo", "up")
        self._in(inside, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
        self._in(inside, "link", "set", "eth0", "up")

    def address(self, host: str) -> str:
        last = 254 if host == "hub" else int(host[1:]) + 1
        return f"10.93.{self._number}.{last}"

    def cut(self, host: str) -> None:
        """Take the host off the network, as a pulled cable does: without notice to any process."""
        self._in(self._namespace("hub"), "link", "set", f"to-{host}", "down")

    def start(
        self, host: str, *command: str | Path, env: Mapping[str, str] | None = None
    ) -> Background:
        """Start ``ncclops COMMAND`` on ``host``; its output goes to ``<host>.out``."""
        return self.run(host, sys.executable, "-m", "ncclops", *command, env=env)

    def run(
        self, host: str, *command: str | Path, env: Mapping[str, str] | None = None
    ) -> Background:
        """Likewise, for any command."""
        inner = [*map(str, command)]
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', host, *inner]
        with (self.directory / f"{host}.out").open("ab") as output:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self._namespace(host), *named],
                cwd=self.directory,
                env=clean_environ({"GLOO_SOCKET_IFNAME": "eth0"} | dict(env or {})),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        self._started.append(process)
        return process

    def output(self, host: str) -> str:
        return (self.directory / f"{host}.out").read_text(errors="replace")

    def pids(self, host: str) -> list[int]:
        """Everything that runs on ``host``."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self._namespace(host)], capture_output=True, text=True
        )
        return [int(pid) for pid in listed.stdout.split()]

    def sockets(self, host: str, *wanted: str) -> str:
        """What ``ss`` says of the TCP sockets of ``host``, and whose they are."""
        inside = ["ip", "netns", "exec", self._namespace(host)]
        listed = subprocess.run(
            [*inside, "ss", "-tnpH", *wanted], check=True, capture_output=True, text=True
        )
        return listed.stdout

    def close(self) -> None:
        for host in ("hub", *(f"h{number}" for number in range(self._count))):
            for pid in self.pids(host):
                _kill(pid)
        for process in self._started:
            process.kill()
            process.wait(LIMIT_S)
        for host in ("hub", *(f"h{number}" for number in range(self._count))):
            subprocess.run(["ip", "netns", "del", self._namespace(host)], check=False)

    def _namespace(self, host: str) -> str:
        return f"{self._mark}-{host}"

    def _in(self, namespace: str, *arguments: str) -> None:
        _ip("-n", namespace, *arguments)


@contextmanager
def hosts(count: int, directory: Path) -> Iterator[Hosts]:
    made = Hosts(count, directory)
    try:
        yield made
    finally:
        made.close()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, 9)
    except ProcessLookupError:
        return
