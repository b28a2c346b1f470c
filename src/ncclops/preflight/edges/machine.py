"""What this host tells the others of itself, and what its kernel knows of its neighbours."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import resource
import secrets
import socket
import struct
import threading
from collections.abc import Collection, Mapping
from pathlib import Path

from ncclops.host_name import host_name
from ncclops.preflight.edges import interface
from ncclops.preflight.edges.model import FILES, Facts, Place
from ncclops.preflight.model import Finding
from ncclops.whole_numbers import MOST_PORT, whole_number

# Two tries of the usual resolver take 10 s: a name that is not needed does not hold up the others.
NAME_WITHIN_S = 3.0
STORE_PORT = 29500  # torchrun's default for MASTER_PORT
_ARP = struct.Struct("!6s6sHHHBBH6s4s6s4s")
_ETH_ARP = 0x0806
_ARP_WAIT_S = 1.0
_COMPLETE = 0x2  # a flag of an entry in /proc/net/arp


def own_place(facts: Facts) -> Place | None:
    """Where NCCL listens on the host of ``facts``, if others can reach it there."""
    if facts.place is None or interface.is_loopback(facts.place.address) or facts.too_few_files:
        return None
    return facts.place


def _files() -> int:
    """How many descriptors this process may have, after taking as many as it needs and may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < FILES:
        most = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    return 0 if soft == resource.RLIM_INFINITY else soft


def leads_here(address: str) -> bool:
    """Whether every host would reach itself there."""
    return interface.is_loopback(address)


async def read_facts(
    environ: Mapping[str, str],
    *,
    rank: int | None,
    name: str | None,
    findings: tuple[Finding, ...] = (),
) -> Facts:
    """This host's, but for the ports. Nothing in it waits longer than ``NAME_WITHIN_S``."""
    addresses = interface.read()
    chosen = interface.choose(addresses, environ)
    place = interface.describe(chosen) if chosen else None
    own = host_name()
    macs = interface.hardware_addresses()
    names, conflict = await asyncio.gather(lookup(own), _conflict(place, macs))
    return Facts(
        name=name or own,
        uid=secrets.token_hex(16),
        rank=rank,
        boot_id=_boot_id(),
        place=place,
        rule=interface.rule(addresses, environ),
        addresses=tuple(addresses),
        port_range=interface.port_range(),
        own_name=names,
        macs=macs,
        conflict=conflict,
        gloo=bool(environ.get("GLOO_SOCKET_IFNAME")),
        named_port=environ.get("MASTER_PORT", "").isdecimal(),
        files=_files(),
        findings=findings,
        nccl={each: environ[each] for each in _TOLD if each in environ},
    )


_TOLD = ("NCCL_SOCKET_IFNAME", "NCCL_SOCKET_FAMILY", "NCCL_COMM_ID")


def store_port(environ: Mapping[str, str]) -> int:
    """The port of torch's store, as MASTER_PORT has it."""
    text = environ.get("MASTER_PORT", "")
    return whole_number(text, MOST_PORT) or STORE_PORT


async def lookup(name: str) -> tuple[str, ...]:
    """The addresses that ``name`` stands for here; none without an answer in time.

    A lookup cannot be ended: it goes on in a thread that nothing waits for.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[tuple[str, ...]] = loop.create_future()

    def settle(found: tuple[str, ...]) -> None:
        if not answer.done():
            answer.set_result(found)

    def look_up() -> None:
        try:
            entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
            found = tuple(dict.fromkeys(str(each[4][0]).partition("%")[0] for each in entries))
        except (OSError, UnicodeError):
            found = ()
        try:
            loop.call_soon_threadsafe(settle, found)
        except RuntimeError:
            return  # the loop has ended meanwhile

    threading.Thread(target=look_up, name="ncclops-lookup", daemon=True).start()
    try:
        return await asyncio.wait_for(answer, NAME_WITHIN_S)
    except TimeoutError:
        return ()


def source_towards(address: str) -> str:
    """The address that this host's routes give to what it sends to ``address``; empty: no route."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((address, 9))  # a datagram socket: a route is chosen, nothing is sent
            return str(sock.getsockname()[0]).partition("%")[0]
    except OSError:
        return ""


def neighbours(root: Path = Path("/")) -> dict[str, str]:
    """Hardware addresses that the kernel has learned of IPv4 neighbours, by address."""
    try:
        lines = (root / "proc/net/arp").read_text().splitlines()[1:]
    except OSError:
        return {}
    found = {}
    for line in lines:
        words = line.split()
        if len(words) >= 4 and int(words[2], 16) & _COMPLETE:
            found[words[0]] = words[3].lower()
    return found


async def _conflict(place: Place | None, macs: Collection[str]) -> str:
    """The hardware address of another machine that claims ``place``'s address; empty if none.

    An ARP probe, as RFC 5227 has it: asks for our own address without giving one. Only where this
    process may (CAP_NET_RAW) and where there is such a link.
    """
    if place is None or place.family != 4 or not place.mac or leads_here(place.address):
        return ""
    try:
        mac = bytes.fromhex(place.mac.replace(":", ""))
        sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_ARP))
    except (OSError, ValueError, AttributeError):
        return ""
    with sock:
        try:
            sock.bind((place.interface.partition(":")[0], _ETH_ARP))
            sock.setblocking(False)
            own = ipaddress.IPv4Address(place.address).packed
            probe = _ARP.pack(
                b"\xff" * 6, mac, _ETH_ARP, 1, 0x0800, 6, 4, 1, mac, bytes(4), bytes(6), own
            )
            sock.send(probe)
            async with asyncio.timeout(_ARP_WAIT_S):
                return await _other_claim(sock, macs, own)
        except (OSError, struct.error):  # a timeout is an OSError, too
            return ""


async def _other_claim(sock: socket.socket, macs: Collection[str], own: bytes) -> str:
    """Who says that it has ``own``. Not this host over another of its interfaces, as Linux does."""
    loop = asyncio.get_running_loop()
    while True:
        frame = await loop.sock_recv(sock, 2048)
        if len(frame) < _ARP.size:
            continue
        fields = _ARP.unpack(frame[: _ARP.size])
        sender, address = bytes(fields[8]).hex(":"), bytes(fields[9])
        if address == own and sender not in macs:
            return sender


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
