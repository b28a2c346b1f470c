"""Addresses of hosts: a name is looked up at the start, under a deadline, and not needed later.

A name server that does not answer holds up each lookup for as long as the resolver's own limits
add up to, which may be minutes, and nothing can end the call from outside. So it is made in a
thread of its own. What ranks exchange, and what they connect to again, are addresses.

Standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import logging
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future

log = logging.getLogger("ncclops.restart")

# For a name that is not needed to reach the store: the job starts without an answer. Two tries of
# the usual resolver, with its 5 s, would take 10 s.
_OPTIONAL_NAME_WITHIN_S = 5.0

_lookups: dict[str, Future[list[str]]] = {}
_lock = threading.Lock()


def is_numeric(host: str) -> bool:
    """Whether ``host`` is an address of IPv4 or IPv6 and no name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def resolve(host: str, within_s: float) -> list[str]:
    """The addresses of ``host``, in the order of preference. Any thread.

    Raises ``TimeoutError`` when there is no answer within ``within_s`` seconds, and ``OSError``
    when the answer is that there is none. Calls for the same name share one lookup.
    """
    if is_numeric(host):
        return [host]
    with _lock:
        if (lookup := _lookups.get(host)) is None:
            lookup = _lookups[host] = Future()
            thread = threading.Thread(
                target=_look_up, args=(host, lookup), name="ncclops-resolve", daemon=True
            )
            thread.start()
    try:
        return lookup.result(within_s)
    except TimeoutError:
        raise TimeoutError(f"no answer to the lookup of {host!r} within {within_s:g} s") from None


def _look_up(host: str, lookup: Future[list[str]]) -> None:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        outcome, error = list(dict.fromkeys(str(each[4][0]) for each in found)), None
    except (OSError, UnicodeError) as failure:  # the latter: a label that is too long
        outcome, error = [], OSError(f"{host!r} was not found: {failure}")
    with _lock:
        del _lookups[host]
    if error is None:
        lookup.set_result(outcome)
    else:
        lookup.set_exception(error)


# --- torch's lookups ------------------------------------------------------------------------------


class _ResolverState(ctypes.Structure):
    """The first fields of glibc's ``struct __res_state``, which each thread has (resolv.h)."""

    _fields_ = (
        ("retrans", ctypes.c_int),  # seconds until a query is repeated
        ("retry", ctypes.c_int),  # how often each server is asked
        ("options", ctypes.c_ulong),
        ("nscount", ctypes.c_int),  # servers
    )


@contextlib.contextmanager
def one_short_query() -> Iterator[None]:
    """The calling thread asks one name server, once, for a second, while this lasts.

    torch looks up the name of the address that it connects to, for its messages alone: with a
    name server that hangs, a rank could miss its deadlines over that. From torch 2.9 on it gives
    that up for good after the first that fails (pytorch#159596). Only glibc has this.
    """
    libc = ctypes.CDLL(None)
    try:
        libc.__res_state.restype = ctypes.POINTER(_ResolverState)
        usable = libc.__res_init() == 0
        state = libc.__res_state().contents
    except (AttributeError, ValueError):
        usable = False
    if not usable:
        yield
        return
    before = state.retrans, state.retry, state.nscount
    state.retrans, state.retry, state.nscount = 1, 1, min(1, state.nscount)
    try:
        yield
    finally:
        state.retrans, state.retry, state.nscount = before


# --- this host ------------------------------------------------------------------------------------

# An address that no host has (RFC 5737): the route to it is the one to other networks.
_OTHER_NETWORK = "192.0.2.1"


def reachable_host() -> str:
    """The address under which the other nodes reach this one.

    That of ``NCCLOPS_RESTART_HOST`` if set; otherwise the local end of the route to
    ``MASTER_ADDR``, which every other rank uses too; otherwise, as nothing says that there are
    other nodes, the loopback address. A name that a name server does not answer for in time is
    passed over, with a warning. Raises ``ValueError`` when ``NCCLOPS_RESTART_HOST`` is a name that
    does not exist, or an address of another host.
    """
    if (chosen := chosen_address(os.environ)) is not None:
        return chosen
    master = os.environ.get("MASTER_ADDR")
    return _local_end_of_route_to_master(master) if master else "127.0.0.1"


def chosen_address(environ: Mapping[str, str]) -> str | None:
    """That of ``NCCLOPS_RESTART_HOST``, as ``reachable_host``; None where that is not known."""
    chosen = environ.get("NCCLOPS_RESTART_HOST")
    return own_address(chosen, "NCCLOPS_RESTART_HOST") if chosen else None


def own_address(given: str, setting: str) -> str | None:
    """The address ``given`` for this host by ``setting``, or that of the name; None, with a
    warning, for a name that no name server answers for in time.

    Raises ``ValueError`` for a name that does not exist, and an address of another host.
    """
    try:
        address = _seen_from_outside(resolve(given, _OPTIONAL_NAME_WITHIN_S)[0], given)
        _check_is_ours(address)
        return address
    except TimeoutError as error:
        log.warning("%s: %s: put the address there, or in /etc/hosts", setting, error)
        return None
    except OSError as error:
        raise ValueError(
            f"{setting}={given[:80]!r}: {error}; put this host's address there"
        ) from error


def _check_is_ours(address: str) -> None:
    """Raises ``OSError`` where nothing can listen at ``address``."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError as error:
            raise OSError(f"{address} is no address of this host") from error


def _local_end_of_route_to_master(master: str) -> str:
    try:
        address = resolve(master, _OPTIONAL_NAME_WITHIN_S)[0]
    except OSError as error:
        log.warning("MASTER_ADDR: %s: put the address there, or in /etc/hosts", error)
        return _local_end_of_route(_OTHER_NETWORK)
    return _seen_from_outside(_local_end_of_route(address), master)


def _seen_from_outside(address: str, name: str) -> str:
    """``address``, unless the other nodes cannot use it: then that of the route to them.

    A host's own name often stands for a loopback address there (Debian's 127.0.1.1).
    """
    if _is_loopback(address) and not (_is_loopback(name) or name == "localhost"):
        return _local_end_of_route(_OTHER_NETWORK)
    return address


def _local_end_of_route(address: str) -> str:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # a datagram socket: nothing is sent, a route is chosen
            local: str = probe.getsockname()[0]
            return local
    except OSError:
        return "127.0.0.1"


def _is_loopback(host: str) -> bool:
    return host.startswith("127.") or host == "::1"
