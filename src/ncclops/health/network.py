"""Which network NCCL has chosen, and whether that is the one meant. Pure.

NCCL says it at level INFO, once for each communicator: the devices that its transports find
(``NET/IB : Using [0]mlx5_0:1/IB …``, ``NET/Socket : Using …``), why one finds none, and then
``Using network IB`` (``Assigned NET plugin IB to comm`` beside it in later releases). Texts as in
nccl src/transport/net_ib, net_socket.cc, src/plugin/net.cc and src/bootstrap.cc, releases 2.18 to
2.32. Where it does not log, what a rank has open may show it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ncclops.nearest import meant

# What a network may be asked for by, besides the name that NCCL prints.
KINDS = ("ib", "roce", "socket", "plugin")

# What people call them elsewhere: NCCL prints no such name, so no network would ever meet it.
_CALLED = {
    "infiniband": "ib",
    "rdma": "ib or roce",
    "rocev2": "roce",
    "ethernet": "socket",
    "tcp": "socket",
    "efa": "plugin",
}
# Names that NCCL prints and that are like another word here.
_PRINTED = ("gib",)

# One of these is in every line that is looked at.
MARKS = (b"Using network ", b"NET", b"Bootstrap", b"NCCL_IB_DISABLE", b"libibverbs")

_INFO = re.compile(r"NCCL (?:INFO|WARN) (.*)")
_CHOSEN = re.compile(r"Using network (.*\S)\s*$|Assigned NET plugin (.+?) to comm")
_DEVICES = re.compile(r"NET/(\w+) ?: Using (.*)")
_DEVICE = re.compile(r"\[\d+\]([^\s;]+)")
_BOOTSTRAP = re.compile(r"Bootstrap ?: Using (\S+?):")
# Why InfiniBand, RoCE or a plugin is not used; the first that a rank prints is quoted.
_REASONS = tuple(
    re.compile(pattern)
    for pattern in (
        r"NCCL_(?:IB_DISABLE set by environment to [1-9]|NET set by environment to (?i:socket))",
        r"NET/IB ?: No device found",
        r"NET/IB ?: Unable to open device",
        r"[Ff]ailed to open libibverbs",
        r"NET/Plugin ?: dlerror=",
        r"NET/Plugin: (?:Could not find|Failed to initialize|Plugin load)",
        r"NCCL_NET_PLUGIN set by environment to none",
    )
)
# NCCL prints some of each; a script may print lines like them without end.
_MOST_REASONS, _MOST_NETWORKS, _MOST_CHANGES = 20, 20, 20


@dataclass(frozen=True)
class NetworkSeen:
    """The network of a rank. ``name`` is NCCL's; ``kinds`` are those of ``KINDS`` that it is.

    ``devices`` are NCCL's names of them (``mlx5_0:1/IB``, ``eth0``), ``interface`` that of the
    bootstrap, None where it did not say; ``reasons`` what it said against another network.
    """

    name: str
    kinds: tuple[str, ...]
    devices: tuple[str, ...] = ()
    interface: str | None = None
    reasons: tuple[str, ...] = ()


def shown_by(rdma_devices: Sequence[str], plugins: Sequence[str]) -> NetworkSeen | None:
    """The network by what a rank has open and loaded once NCCL is in use: NCCL's sockets where
    there is nothing else. None where there is: what is open need not be what NCCL has chosen."""
    if rdma_devices or plugins:
        return None
    why = "no RDMA device is open and no network plugin is loaded in its process"
    return NetworkSeen("Socket", ("socket",), reasons=(why,))


def meets(seen: NetworkSeen, wanted: Sequence[str]) -> bool:
    """Whether it is one of ``wanted``: kinds, or names as NCCL prints them, in any case."""
    names = {seen.name.lower(), *seen.kinds}
    return any(each.lower() in names for each in wanted)


def mistaken(wanted: str) -> str:
    """What is meant by ``wanted`` where that is the name of no network; else empty.

    Plugins name their networks as they like, so a word that is like none of the known ones is taken
    for such a name.
    """
    name = wanted.lower()
    if name in (*KINDS, *_PRINTED):
        return ""
    return next((_CALLED.get(close, close) for close in meant(name, (*KINDS, *_CALLED))), "")


class NetworkReading:
    """The lines of one rank, one after the other."""

    def __init__(self) -> None:
        self._devices: dict[str, tuple[str, ...]] = {}
        self._reasons: list[str] = []
        self._interface: str | None = None
        self._last: NetworkSeen | None = None
        self._changes = 0

    def feed(self, line: str) -> NetworkSeen | None:
        """What ``line`` completes: the network, when NCCL has chosen it, and when it differs."""
        match = _INFO.search(line)
        if match is None:
            return None
        text = match[1].strip()
        if found := _DEVICES.match(text):
            if len(self._devices) >= _MOST_NETWORKS:
                self._devices.clear()
            self._devices[found[1].lower()] = tuple(_DEVICE.findall(found[2]))
        elif found := _BOOTSTRAP.match(text):
            self._interface = found[1]
        elif any(reason.search(text) for reason in _REASONS):
            if text not in self._reasons and len(self._reasons) < _MOST_REASONS:
                self._reasons.append(text)
        elif found := _CHOSEN.match(text):
            return self._chosen(found[1] or found[2])
        return None

    def _chosen(self, name: str) -> NetworkSeen | None:
        is_ib = name == "IB" or name.startswith("IBext")
        devices = self._devices.get("ib" if is_ib else name.lower(), ())
        kinds = ["socket"] if name == "Socket" else []
        if is_ib:
            layers = {device.rpartition("/")[2].lower() for device in devices}
            kinds = ["roce"] if "roce" in layers and "ib" not in layers else ["ib"]
        if name not in ("IB", "Socket"):
            kinds.append("plugin")
        reasons = self._reasons if name == "Socket" else ()
        seen = NetworkSeen(name, tuple(kinds), devices, self._interface, tuple(reasons))
        if self._last is not None and seen.name == self._last.name:
            return None
        # A job has one network, or a few: what prints these lines in turn is not NCCL.
        if self._changes >= _MOST_CHANGES:
            return None
        self._changes += 1
        self._last = seen
        return seen
