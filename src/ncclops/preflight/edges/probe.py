"""One connection to another host, an exchange over it, and how it failed if it did."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import os
import socket
import struct
import time
from dataclasses import dataclass
from typing import Literal

from ncclops.preflight.edges import wire
from ncclops.preflight.edges.listener import sockaddr
from ncclops.preflight.edges.model import How, Place

_HOWS: dict[int, How] = {
    errno.ECONNREFUSED: "refused",
    errno.ETIMEDOUT: "timeout",
    errno.EHOSTUNREACH: "unreachable",
    errno.ENETUNREACH: "unreachable",
    errno.EHOSTDOWN: "unreachable",
    errno.ENETDOWN: "unreachable",
    errno.EINVAL: "forbidden",  # a route of type blackhole
    errno.EACCES: "forbidden",  # a route of type prohibit, or a firewall
    errno.EPERM: "forbidden",  # a firewall's DROP for what this host sends
    errno.ECONNRESET: "reset",
    errno.EPIPE: "reset",
    errno.EMFILE: "own",
    errno.ENFILE: "own",
    errno.ENOBUFS: "own",
    errno.ENOMEM: "own",
    errno.EADDRNOTAVAIL: "own",
    errno.EADDRINUSE: "own",
}


# linux/tcp.h, struct tcp_info, since Linux 4.19: where it has what was sent again, the packets with
# data, and those of them that the other end had twice, so that none was lost.
_TCP_INFO_BYTES, _RESENT, _SENT, _TWICE = 224, 100, 156, 216
# Likewise: the smallest round trip in microseconds, all ones before there is one. The kernels of
# both ends answer for it, whatever keeps their processes from running.
_LEAST_RTT, _NO_RTT = 148, 0xFFFFFFFF
# Likewise: the packets that the other end has not acknowledged, and the bytes not sent yet; and, at
# its beginning, the state.
_UNACKED, _UNSENT, _ESTABLISHED = 24, 144, 1

# linux/in.h, in6.h, errqueue.h: struct sock_extended_err and, after it, the offender's address.
_IP_RECVERR, _IPV6_RECVERR = 11, 25
_ERROR = struct.Struct("=IBBBxII")
_BY_ICMP, _BY_ICMP6 = 2, 3
# Codes of "destination unreachable": RFC 792, RFC 1812; RFC 4443.
_UNREACHABLE = {
    0: "no route to that network",
    1: "no such host there",
    2: "protocol unreachable",
    3: "port unreachable",
    9: "network prohibited",
    10: "host prohibited",
    13: "prohibited by an administrator",
}
_UNREACHABLE6 = {
    0: "no route there",
    1: "prohibited by an administrator",
    3: "no such host there",
    4: "port unreachable",
}


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long each part may take, in seconds.

    ``connect``: the kernel sends a SYN again after 1 and 3 s (RFC 6298), so 2.5 s stand one
    lost packet and 8 s stand two. ``answer``: for each small message. ``data``: for all of it, each
    way.
    """

    connect: float = 2.5
    answer: float = 3.0
    data: float = 4.0


FIRST = Patience()
SECOND = Patience(connect=8.0, answer=8.0, data=8.0)
# For one size of many, on a connection whose small messages pass: several times the kernel's
# least retransmission timeout, 0.2 s.
SIZE = Patience(connect=4.0, answer=4.0, data=2.0)


Late = Literal["", "here", "there"]


# Beyond ``answer``, for each round trip: no detour on Earth takes longer.
PING_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What became of one connection. ``how`` is None where all of it passed.

    ``uid`` is who answered, ``rtt_ms`` the smallest round trip (-1: none), ``source`` and
    ``source_port`` where we connected from (0: not known any more), ``says`` the kernel's words,
    with who told it. ``out_s`` and ``in_s``: how long the data took each way (-1: not arrived).
    ``sent``: packets of a connection that passed (0: not known), ``resent``: how many were lost,
    ``opening``: of these, to open it, or the answers to that.
    ``late``: whose process was too late for it, by what the kernel has; no packet was, then.
    """

    how: How | None = None
    uid: str = ""
    rtt_ms: float = -1.0
    source: str = ""
    source_port: int = 0
    says: str = ""
    out_s: float = -1.0
    in_s: float = -1.0
    sent: int = 0
    resent: int = 0
    opening: int = 0
    late: Late = ""


@dataclass
class _Progress:
    """How far a probe has come: what a timeout means."""

    stage: How = "timeout"
    uid: str = ""
    rtt_ms: float = -1.0
    source: str = ""
    out_s: float = -1.0
    in_s: float = -1.0
    opening: int = 0


async def probe(
    address: str,
    port: int,
    *,
    own_uid: str,
    place: Place,
    patience: Patience = FIRST,
    pings: int = 0,
    data_bytes: int = 0,
    segment: int = 0,
    source_port: int = 0,
) -> Probe:
    """Connect to ``address`` as NCCL does: from wherever the routes lead.

    ``segment``: the largest payload of a packet, both ways, in bytes; 0 leaves it to the kernel.
    ``source_port``: the local port; 0 leaves that to the kernel, too.
    Never raises for what the network does.
    """
    progress, packets = _Progress(), (0, 0)
    late: Late = ""
    try:
        sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    except OSError as error:
        return Probe(how=_how(error), says=error.strerror or str(error))
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if segment:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, segment)
        if source_port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("", source_port))
        await _exchange(
            sock,
            sockaddr(address, port, place),
            wire.request(own_uid, pings, data_bytes),
            (pings, data_bytes),
            patience,
            progress,
        )
        how, says = None, ""
        packets = _packets(sock)
    except TimeoutError:
        how, says, late = progress.stage, "", late_of(sock, progress.stage)
        if late == "there" and how == "large-out":
            how = "silent"  # the data has arrived
    except _Foreign:
        how, says = "foreign", ""
    except OSError as error:
        how, says = _how(error), os.strerror(error.errno) if error.errno else str(error)
        says += _told_by(sock)
        # After the connection stands, that it ends is all that is known.
        if progress.stage != "timeout" and how in ("timeout", "refused"):
            how = "silent" if how == "timeout" else "reset"
        if progress.stage in ("large-out", "large-in") and how != "own":
            how = progress.stage
    finally:
        source_port = _source_port(sock)
        sock.close()
    return Probe(
        how=how,
        uid=progress.uid,
        rtt_ms=progress.rtt_ms,
        source=progress.source,
        source_port=source_port,
        says=says,
        out_s=progress.out_s,
        in_s=progress.in_s,
        sent=packets[0],
        resent=packets[1],
        opening=min(progress.opening, packets[1]),
        late=late,
    )


class _Foreign(Exception):
    """What answers speaks another protocol."""


async def _exchange(
    sock: socket.socket,
    target: tuple[object, ...],
    request: bytes,
    amounts: tuple[int, int],
    patience: Patience,
    progress: _Progress,
) -> None:
    loop = asyncio.get_running_loop()
    pings, size = amounts
    _hear_icmp(sock, on=True)
    async with asyncio.timeout(patience.connect):
        await loop.sock_connect(sock, target)
    progress.opening = _packets(sock)[1]
    _hear_icmp(sock, on=False)  # what NCCL would not notice on a connection that stands
    with contextlib.suppress(OSError):
        progress.source = str(sock.getsockname()[0]).partition("%")[0]
    progress.stage = "silent"
    async with asyncio.timeout(patience.answer):
        await loop.sock_sendall(sock, request)
        uid = wire.read_reply(await _receive(sock, wire.REPLY_BYTES))
        if uid is None:
            raise _Foreign
        progress.uid = uid
    async with asyncio.timeout(patience.answer + pings * PING_S):
        for _ in range(pings):
            began = time.perf_counter()
            await loop.sock_sendall(sock, wire.PING)
            await _receive(sock, 1)
            took_ms = 1000 * (time.perf_counter() - began)
            progress.rtt_ms = took_ms if progress.rtt_ms < 0 else min(progress.rtt_ms, took_ms)
    if pings:
        progress.rtt_ms = min(progress.rtt_ms, _kernel_rtt_ms(sock))
    if not size:
        return
    progress.stage, began = "large-out", time.perf_counter()
    async with asyncio.timeout(patience.data):
        await loop.sock_sendall(sock, bytes(size))
        await _receive(sock, 1)
    progress.out_s = time.perf_counter() - began
    progress.stage, began = "large-in", time.perf_counter()
    async with asyncio.timeout(patience.data):
        await _receive(sock, size)
    progress.in_s = time.perf_counter() - began


async def _receive(sock: socket.socket, size: int) -> bytes:
    loop, parts, left = asyncio.get_running_loop(), list[bytes](), size
    while left:
        part = await loop.sock_recv(sock, min(left, 1 << 16))
        if not part:
            raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _info(sock: socket.socket) -> bytes:
    """What the kernel knows of a connection; empty where it does not say all of it."""
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    except OSError:
        return b""
    return info if len(info) == _TCP_INFO_BYTES else b""


def _packets(sock: socket.socket) -> tuple[int, int]:
    """How many packets a connection has sent, and how many of them were lost: data and SYN."""
    info = _info(sock)
    if not info:
        return 0, 0
    resent, sent, twice = (struct.unpack_from("=I", info, at)[0] for at in (_RESENT, _SENT, _TWICE))
    return sent + 1, max(0, resent - twice)


def _kernel_rtt_ms(sock: socket.socket) -> float:
    """The smallest round trip of a connection; without end where it is not known."""
    info = _info(sock)
    least_us = struct.unpack_from("=I", info, _LEAST_RTT)[0] if info else _NO_RTT
    return least_us / 1000 if 0 < least_us < _NO_RTT else math.inf


def late_of(sock: socket.socket, stage: How) -> Late:
    """Why a connection took too long, where it was no packet.

    Here: what was waited for has come, and this process did not run in time to see it. There: all
    that was sent has been acknowledged, and the other process has not answered.
    """
    info = _info(sock)
    if not info or info[0] != _ESTABLISHED:
        return ""
    if stage == "timeout":
        return "here"
    with contextlib.suppress(OSError):
        if sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
            return "here"
    if stage == "large-in":
        return ""  # whether the other end has sent it all is not known
    left = (struct.unpack_from("=I", info, at)[0] for at in (_UNACKED, _UNSENT))
    return "" if any(left) else "there"


def _source_port(sock: socket.socket) -> int:
    try:
        return int(sock.getsockname()[1])
    except OSError:
        return 0


def _hear_icmp(sock: socket.socket, *, on: bool) -> None:
    """Whether the kernel keeps who refused a connection, for ``_told_by`` (Linux 5.11, for TCP)."""
    six = sock.family == socket.AF_INET6
    with contextlib.suppress(OSError):
        sock.setsockopt(
            socket.IPPROTO_IPV6 if six else socket.IPPROTO_IP,
            _IPV6_RECVERR if six else _IP_RECVERR,
            int(on),
        )


def _told_by(sock: socket.socket) -> str:
    """Which machine refused a connection by ICMP, and its words; empty where none did."""
    try:
        *_, ancillary, _, _ = sock.recvmsg(1, 512, socket.MSG_ERRQUEUE)
    except OSError:
        return ""
    for _, _, data in ancillary:
        if len(data) < _ERROR.size + 8:
            continue
        _, origin, kind, code, _, _ = _ERROR.unpack(data[: _ERROR.size])
        offender = data[_ERROR.size :]
        if origin == _BY_ICMP:
            words = _UNREACHABLE.get(code, f"code {code}") if kind == 3 else f"type {kind}"
            return f" ({socket.inet_ntop(socket.AF_INET, offender[4:8])} says: {words})"
        if origin == _BY_ICMP6 and len(offender) >= 24:
            words = _UNREACHABLE6.get(code, f"code {code}") if kind == 1 else f"type {kind}"
            return f" ({socket.inet_ntop(socket.AF_INET6, offender[8:24])} says: {words})"
    return ""


def _how(error: OSError) -> How:
    return _HOWS.get(error.errno or 0, "unreachable")
