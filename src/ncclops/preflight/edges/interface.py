"""Where NCCL would listen on this host: its bootstrap takes the first interface that fits.

The rules are those of NCCL's bootstrap (compared with 2.32): the interface in the subnet of
``NCCL_COMM_ID`` where that is set, and nothing else then; ``NCCL_SOCKET_IFNAME`` if it is longer
than one character, and nothing else then; otherwise names that begin with ``ib``; any but docker,
lo and virbr; docker; lo; virbr.
Among those that fit, the kernel's order decides: IPv4 before IPv6, then by number of interface.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import psutil

from ncclops.preflight.edges.model import Address, Place

# In this order where no variable names an interface; "^" excludes. Source: see above.
_PREFERENCES = ("ib", "^docker,lo,virbr", "docker", "lo", "virbr")
_FAMILIES = {"AF_INET": 4, "AF_INET6": 6}
_EPHEMERAL = (32768, 60999)  # the kernel's default, Documentation/networking/ip-sysctl.rst


def choose(addresses: Sequence[Address], environ: Mapping[str, str]) -> Address | None:
    """The address that NCCL's bootstrap would listen on; None where it would find none.

    ``addresses`` are this host's, in the kernel's order (``read``).
    """
    if remote := comm_id_address(environ.get("NCCL_COMM_ID", "")):
        near = (each for each in addresses if each.running and remote in subnet(each))
        return next(near, None)  # whatever else is set; without one NCCL ends (seen with 2.32)
    family = _FAMILIES.get(environ.get("NCCL_SOCKET_FAMILY", ""))
    named = environ.get("NCCL_SOCKET_IFNAME", "")
    if len(named) > 1:
        return _first(addresses, named, family)
    if found := _first(addresses, _PREFERENCES[0], family):
        return found
    rest = (_first(addresses, each, family) for each in _PREFERENCES[1:])
    return next((each for each in rest if each is not None), None)


def rule(addresses: Sequence[Address], environ: Mapping[str, str]) -> str:
    """Which variable or rule leads to the choice, for people."""
    if comm_id_address(environ.get("NCCL_COMM_ID", "")) is not None:
        return f"NCCL_COMM_ID={environ['NCCL_COMM_ID']}"
    named = environ.get("NCCL_SOCKET_IFNAME", "")
    if len(named) > 1:
        return f"NCCL_SOCKET_IFNAME={named}"
    if choose(addresses, environ) is None:
        return "no interface is running"
    return "the first that NCCL accepts"


def comm_id_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address in ``NCCL_COMM_ID``, which is ``ADDRESS:PORT`` or ``[ADDRESS]:PORT``."""
    host = text[1:].partition("]")[0] if text.startswith("[") else text.partition(":")[0]
    try:
        return ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None


def subnet(address: Address | Place) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    """The network that ``address`` is in."""
    return ipaddress.ip_network(f"{address.address}/{address.prefix}", strict=False)


def read() -> list[Address]:
    """This host's addresses, in the order in which the kernel lists them."""
    running = {name: "running" in each.flags for name, each in psutil.net_if_stats().items()}
    found: list[tuple[int, int, Address]] = []
    for name, entries in psutil.net_if_addrs().items():
        device = name.partition(":")[0]  # "eth0:1" is a label of eth0
        for entry in entries:
            if entry.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            version = 4 if entry.family == socket.AF_INET else 6
            address = Address(
                interface=name,
                address=entry.address.partition("%")[0],
                prefix=_prefix_length(entry.netmask, version),
                family=version,
                running=running.get(device, True),
            )
            found.append((version, _index(device), address))
    return [address for *_, address in sorted(found, key=lambda each: each[:2])]


def describe(address: Address) -> Place:
    """``address`` with what else the others need to know of its interface."""
    device = address.interface.partition(":")[0]
    stats = psutil.net_if_stats().get(device)
    links = psutil.net_if_addrs().get(device, ())
    mac = next((each.address for each in links if each.family == psutil.AF_LINK), "")
    return Place(
        interface=address.interface,
        address=address.address,
        prefix=address.prefix,
        family=address.family,
        mtu=stats.mtu if stats else 0,
        mac=mac.lower(),
    )


def hardware_addresses() -> tuple[str, ...]:
    """Those of all interfaces of this host."""
    links = (each for entries in psutil.net_if_addrs().values() for each in entries)
    found = {each.address.lower() for each in links if each.family == psutil.AF_LINK}
    return tuple(sorted(found - {"", "00:00:00:00:00:00"}))


def port_range(root: Path = Path("/")) -> tuple[int, int]:
    """The ports that the kernel gives to who asks for any, as NCCL does: lowest and highest."""
    try:
        text = (root / "proc/sys/net/ipv4/ip_local_port_range").read_text()
        low, high = (int(each) for each in text.split())
    except (OSError, ValueError):
        return _EPHEMERAL
    return (low, high) if 0 < low <= high < 65536 else _EPHEMERAL


def spread(low: int, high: int, count: int) -> list[int]:
    """``count`` ports from ``low`` to ``high``, evenly, both ends included."""
    count = max(1, min(count, high - low + 1))
    if count == 1:
        return [low]
    return [low + (high - low) * each // (count - 1) for each in range(count)]


def _first(addresses: Iterable[Address], names: str, family: int | None) -> Address | None:
    """The first that fits ``names``, NCCL's list: prefixes, with ``^`` but these, ``=`` exactly."""
    inverted = names.startswith("^")
    names = names.removeprefix("^")
    exact = names.startswith("=")
    wanted = [each.partition(":")[0] for each in names.removeprefix("=").split(",") if each]
    for each in addresses:
        if not each.running or (family is not None and each.family != family):
            continue
        if each.family == 6 and ipaddress.ip_address(each.address).is_loopback:
            continue
        matches = not wanted or any(
            each.interface == name if exact else each.interface.startswith(name) for name in wanted
        )
        if matches != inverted:
            return each
    return None


def _prefix_length(netmask: str | None, version: int) -> int:
    if not netmask:
        return 32 if version == 4 else 128
    return int(ipaddress.ip_address(netmask)).bit_count()


def _index(device: str) -> int:
    try:
        return socket.if_nametoindex(device)
    except OSError:
        return 1 << 30


def scope_of(address: str, place: Place) -> int:
    """The scope for connecting to ``address``: a link-local one needs our interface."""
    if not ipaddress.ip_address(address).is_link_local:
        return 0
    return _index(place.interface.partition(":")[0])


def is_loopback(address: str) -> bool:
    """Whether ``address`` leads back to who uses it."""
    return ipaddress.ip_address(address).is_loopback
