"""The addresses of this host, and the one under which other hosts reach it."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Iterable, Mapping

import psutil

Resolve = Callable[[str], Iterable[str]]
# Only the route to it is asked for; nothing is sent (TEST-NET-1, RFC 5737).
_SOMEWHERE_ELSE = "192.0.2.1"
_DISCARD = 9  # a port to name in a question about routes


def own_addresses() -> dict[str, str]:
    """This host's IP addresses, each with the interface that has it."""
    return {
        _bare(entry.address): name
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    }


def resolve(host: str) -> list[str]:
    """The addresses that ``host`` stands for here, none where it is not known."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):
        return []
    return [_bare(str(entry[4][0])) for entry in found]


def is_here(host: str, own: Mapping[str, str] | None = None, resolved: Resolve = resolve) -> bool:
    """Whether ``host`` is this machine: any of its addresses is on one of our interfaces.

    A name that leads to the loopback counts as ours: it can mean no other host (Debian's
    ``127.0.1.1`` for a host's own name).
    """
    mine = own_addresses() if own is None else own
    return any(address in mine or _is_loopback(address) for address in resolved(host))


def address_towards(host: str) -> str:
    """The address under which ``host``, and others as near as it, reach this machine.

    The local end of the route to ``host``. Where that is the loopback, because ``host`` is this
    machine, the local end of the way out; and the loopback only when there is nothing else.
    """
    towards = _local_end_of_route(host)
    if towards is not None and not _is_loopback(towards):
        return towards
    others = [_local_end_of_route(_SOMEWHERE_ELSE), *own_addresses()]
    usable = (a for a in others if a and not _is_loopback(a) and not _is_link_local(a))
    return next(usable, None) or towards or "127.0.0.1"


def interface_of(address: str) -> str | None:
    """The interface that has ``address``."""
    return own_addresses().get(address)


def _local_end_of_route(host: str) -> str | None:
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as sock:
                sock.connect((host, _DISCARD))
                return _bare(str(sock.getsockname()[0]))
        except OSError:
            continue
    return None


def _bare(address: str) -> str:
    return address.partition("%")[0]  # without the scope of a link-local address


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _is_link_local(address: str) -> bool:
    return ipaddress.ip_address(address).is_link_local
