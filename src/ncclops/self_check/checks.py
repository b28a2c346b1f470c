"""Single things that a job needs of a machine, each tried or read."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from ncclops.host.gpus import Gpus
from ncclops.host.software import installed_torch, nccl_of
from ncclops.preflight.catalogue import Check
from ncclops.preflight.model import Finding
from ncclops.versions import release

_HOST = "host"
_CONNECT_S = 5.0
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def python(check: Check) -> Iterator[Finding]:
    """The interpreter that ncclops runs with, and its workers."""
    version = ".".join(map(str, sys.version_info[:3]))
    least = tuple(check.limits["least"])
    judged = check.ok if sys.version_info[: len(least)] >= least else check.bad
    yield judged(_HOST, f"{version}, {sys.executable}")


def torch(check: Check) -> Iterator[Finding]:
    """By its metadata; that it can be imported shows in the job."""
    version = installed_torch()
    if version is None:
        yield check.bad(_HOST, "not installed")
        return
    judged = check.ok if release(version) >= tuple(check.limits["least"]) else check.bad
    yield judged(_HOST, version)


def nccl(check: Check, gpus: Gpus, environ: Mapping[str, str]) -> Iterator[Finding]:
    """The one that workers with ``environ`` load."""
    version, origin = nccl_of(environ)
    if version is not None:
        yield check.ok(_HOST, f"{version} ({origin})")
    elif gpus.count and installed_torch() is not None:
        yield check.bad(_HOST, "none that could be found")
    else:
        yield check.unknown(_HOST, "none, and no GPUs: ranks use Gloo")


def gpus(check: Check, found: Gpus) -> Iterator[Finding]:
    """How many workers `ncclops launch` would start, and by what it knows."""
    if found.remark:
        yield check.bad(_HOST, found.remark)
    elif found.count:
        names = ", ".join(sorted(set(found.names)))
        yield check.ok(_HOST, f"{found.count}: {names}, driver {found.driver or '?'}")
    else:
        yield check.unknown(_HOST, "none: ranks use Gloo on the CPU")


def run_dir(check: Check, log_dir: Path) -> Iterator[Finding]:
    """Whether a run could be recorded in ``log_dir``, or where that is not there yet, above it."""
    place = log_dir.absolute()
    while not place.exists():
        place = place.parent
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".ncclops-self-check-") as file:
            file.write(bytes(int(check.limit("write_bytes"))))
            file.flush()
            os.fsync(file.fileno())
        free = os.statvfs(place)
    except OSError as error:
        yield check.bad(str(place), error.strerror or str(error))
        return
    free_bytes = free.f_bavail * free.f_frsize
    judged = check.ok if free_bytes >= check.limit("free_bytes") else check.warn
    yield judged(str(place), f"{free_bytes / 2**30:.1f} GiB free")


def interfaces(check: Check) -> Iterator[Finding]:
    """The addresses that this host has, by interface."""
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    have = {
        name: entry.address
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if name in up and entry.family == socket.AF_INET
    }
    said = ", ".join(f"{name} {address}" for name, address in have.items()) or "none"
    if not any(address.startswith("127.") for address in have.values()):
        yield check.bad(_HOST, said)
    else:
        alone = len(have) == 1
        yield check.ok(_HOST, f"{said} alone: no other host can be reached" if alone else said)


def ports(check: Check) -> Iterator[Finding]:
    """A connection over the loopback, and how many ports the kernel may choose from."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(_CONNECT_S)
            with socket.create_connection(server.getsockname(), _CONNECT_S):
                server.accept()[0].close()
    except OSError as error:
        yield check.bad(_HOST, f"no connection over the loopback: {error.strerror or error}")
        return
    try:
        first, last = map(int, _RANGE.read_text().split())
    except (OSError, ValueError):
        yield check.unknown(_HOST, f"a connection was made; {_RANGE} cannot be read")
        return
    judged = check.ok if last - first + 1 >= check.limit("ports") else check.warn
    yield judged(_HOST, f"a connection was made; the kernel chooses from {first} to {last}")
