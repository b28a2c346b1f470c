"""Hosts for tests: network namespaces with a link each to one bridge, on this machine.

    h0 (10.93.N.1) ──┐
    h1 (10.93.N.2) ──┼── bridge in a namespace of its own (10.93.N.254)
    …                ┘

Each has a host name, its own loopback, and an interface ``eth0`` that can be cut. They share the
file system, as hosts of a cluster do.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
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

    def ip(self, host: str, *arguments: str) -> None:
        """``ip ARGUMENTS`` on ``host`` or ``hub``."""
        self._in(self._namespace(host), *arguments)

    def add_link(self, host: str, interface: str, bridge: str) -> str:
        """Another interface of ``host``, at ``bridge`` of the hub; the name of the hub's side."""
        link = f"{interface}-{host}"
        inside = self._namespace(host)
        peer = ("peer", "name", interface, "netns", inside)
        self.ip("hub", "link", "add", link, "type", "veth", *peer)
        self.ip("hub", "link", "set", link, "master", bridge, "up")
        self.ip(host, "link", "set", interface, "up")
        return link

    def drop(self, host: str, way: str, *conditions: str, link: str = "") -> None:
        """Lose IPv4 packets of TCP on the hub's side of ``host``'s link (its first, by default);
        ``way``: to or from it.

        All of ``conditions`` have to hold: ``src ADDRESS``, ``dst ADDRESS``, ``dport LOW HIGH``,
        ``opening`` (a SYN that opens a connection). The filter keeps no state.
        """
        hub, link = self._namespace("hub"), link or f"to-{host}"
        side = {"to": "egress", "from": "ingress"}[way]
        inside = ["ip", "netns", "exec", hub, "tc"]
        subprocess.run([*inside, "qdisc", "replace", "dev", link, "clsact"], check=True)
        code = _filter(conditions)
        subprocess.run(
            [*inside, "filter", "add", "dev", link, side, "bpf", "da", "bytecode", code],
            check=True,
        )

    def names(self, host: str, lines: str) -> None:
        """``lines`` are ``/etc/hosts`` on ``host``: for what is started from now on."""
        place = Path("/etc/netns") / self._namespace(host)
        place.mkdir(parents=True)
        (place / "hosts").write_text(lines)

    def delay(self, host: str, seconds: float) -> None:
        """What ``host`` sends and gets takes so much longer. Its link is a new one."""
        hub, link, address = self._namespace("hub"), f"slow-{host}", self.address(host)
        self.ip(host, "link", "del", "eth0")
        module = [sys.executable, "-m", "tests.preflight.slow_link"]
        process = subprocess.Popen(
            [
                "ip",
                "netns",
                "exec",
                hub,
                *module,
                self._namespace(host),
                "eth0",
                link,
                str(seconds),
            ],
            stdout=subprocess.PIPE,
        )
        self._started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.stdout.close()
        self.ip("hub", "link", "set", link, "master", "br0", "up")
        self.ip(host, "addr", "add", f"{address}/24", "dev", "eth0")
        self.ip(host, "link", "set", "eth0", "up")

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
            shutil.rmtree(Path("/etc/netns") / self._namespace(host), ignore_errors=True)

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


# Classic BPF (Documentation/networking/filter.rst), on Ethernet, IPv4 without options, TCP.
_LOAD_BYTE, _LOAD_HALF, _LOAD_WORD = 0x30, 0x28, 0x20
_EQUAL, _ABOVE, _AT_LEAST, _AND, _RETURN = 0x15, 0x25, 0x35, 0x54, 0x06
_SHOT, _UNDECIDED = 2, 0xFFFFFFFF  # TC_ACT_SHOT, TC_ACT_UNSPEC: linux/pkt_cls.h


def _filter(conditions: Iterable[str]) -> str:
    """The program, as ``tc`` reads it: each test goes on to the next or to the end."""
    tests: list[tuple[int, int, bool]] = []  # the jump, its value, and what has to come out
    program: list[tuple[int, int] | None] = []

    def test(load: int, offset: int, jump: int, value: int, *, holds: bool = True) -> None:
        program.extend([(load, offset), None])
        tests.append((jump, value, holds))

    test(_LOAD_HALF, 12, _EQUAL, 0x0800)
    test(_LOAD_BYTE, 23, _EQUAL, socket.IPPROTO_TCP)
    for condition in conditions:
        word, *values = condition.split()
        if word in ("src", "dst"):
            address = int(ipaddress.IPv4Address(values[0]))
            test(_LOAD_WORD, 26 if word == "src" else 30, _EQUAL, address)
        elif word == "dport":
            test(_LOAD_HALF, 36, _AT_LEAST, int(values[0]))
            test(_LOAD_HALF, 36, _ABOVE, int(values[1]), holds=False)
        elif word == "opening":
            program.append((_LOAD_BYTE, 47))
            program.append((_AND, 0x12))  # SYN and ACK
            program.append(None)
            tests.append((_EQUAL, 0x02, True))
        else:
            raise ValueError(condition)
    end, lines, waiting = len(program) + 1, [], iter(tests)
    for number, each in enumerate(program):
        if each is not None:
            lines.append(f"{each[0]} 0 0 {each[1]}")
            continue
        jump, value, holds = next(waiting)
        away = end - number - 1
        lines.append(f"{jump} {0 if holds else away} {away if holds else 0} {value}")
    lines += [f"{_RETURN} 0 0 {_SHOT}", f"{_RETURN} 0 0 {_UNDECIDED}"]
    return f"{len(lines)}," + ",".join(lines)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, 9)
    except ProcessLookupError:
        return
