"""What is read of the host: limits, mounts, kernel settings, PCI bridges, processes."""

from __future__ import annotations

import ctypes
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

from ncclops.host_name import clean, host_name
from ncclops.preflight.machine import files
from ncclops.preflight.machine.stuck_reader import read_stuck
from ncclops.preflight.readings import Files, Host, Name, Process, Space
from ncclops.record.regular_file import open_regular

_PATTERNS = (
    "proc/self/limits", "proc/self/status", "proc/self/uid_map", "proc/self/cgroup",
    "proc/mounts", "proc/self/mounts",
    "proc/meminfo", "proc/uptime", "proc/cpuinfo", "proc/version", "proc/modules", "proc/cmdline",
    "proc/loadavg", "proc/1/comm", "proc/1/cgroup",
    "proc/sys/fs/file-max", "proc/sys/fs/file-nr",
    "proc/sys/kernel/pid_max", "proc/sys/kernel/threads-max", "proc/sys/kernel/hostname",
    "proc/sys/kernel/random/boot_id", "proc/sys/kernel/osrelease",
    "proc/sys/kernel/numa_balancing", "proc/sys/net/ipv4/ip_local_port_range", "proc/net/route",
    "proc/sys/net/ipv4/conf/*/arp_ignore", "proc/sys/net/netfilter/nf_conntrack_count",
    "proc/sys/net/netfilter/nf_conntrack_max",
    "proc/driver/nvidia/version", "proc/driver/nvidia/gpus/*/information",
    "proc/driver/nvidia-nvswitch/devices/*",
    "etc/hostname", "etc/hosts", "etc/os-release",
    "etc/systemd/logind.conf", "etc/systemd/logind.conf.d/*.conf", "usr/lib/systemd/logind.conf",
    "usr/lib/systemd/logind.conf.d/*.conf",
    "sys/kernel/iommu_groups/*/type",
    "sys/bus/pci/devices/*/class", "sys/bus/pci/devices/*/vendor", "sys/bus/pci/devices/*/device",
    "sys/bus/pci/devices/*/numa_node", "sys/bus/pci/devices/*/local_cpulist",
    "@sys/bus/pci/devices/*/driver", "sys/bus/pci/devices/*/physfn",
    "sys/bus/pci/devices/*/aer_dev_fatal", "sys/bus/pci/devices/*/aer_dev_correctable",
    "@sys/bus/pci/devices/*/iommu_group",
    "sys/class/dmi/id/sys_vendor", "sys/class/dmi/id/product_name",
    "sys/devices/system/clocksource/clocksource0/current_clocksource",
    "sys/devices/system/cpu/offline", "sys/devices/system/cpu/smt/control",
    "sys/module/nvidia/version", "sys/module/nvidia_peermem/version", "sys/module/nvidia_peermem",
    "sys/kernel/mm/memory_peers/*/version",
    "sys/class/infiniband/*",
    "sys/kernel/mm/hugepages/*/nr_hugepages", "sys/kernel/mm/hugepages/*/free_hugepages",
    "run/systemd/timesync/synchronized", "run/systemd/system", "run/systemd/container",
    "dev/nvidia*", "dev/dxg", "dev/nvidia-caps-imex-channels/channel*", "dev/shm", "dev/shm/nccl-*",
    ".dockerenv", "run/.containerenv", "usr/local/cuda*/compat/libcuda.so*",
)  # fmt: skip
# Of the machine's processors one is enough; nodes have hundreds.
_CPUINFO_BYTES = 4096
_MODPROBE = "usr/bin/nvidia-modprobe"
# Limits of control groups that jobs run into, by controller: of version 1, and those of version 2.
_GROUPS = {
    "pids": ("pids.max", "pids.current"),
    "memory": ("memory.limit_in_bytes",),
    "cpu": ("cpu.cfs_quota_us", "cpu.cfs_period_us"),
    "": ("pids.max", "pids.current", "memory.max", "memory.high", "cpu.max"),
}
_SELECTED = re.compile(r"nvidia-fabricmanager.*|nvlsm.*|nvidia-imex.*")
_NAME_FILES = ("proc/sys/kernel/hostname", "etc/hostname")
_STA_UNSYNC = 0x40  # of adjtimex(2)
_ACS_CAPABILITY = 0x000D  # of the PCI Express base specification, 7.7.11
_ACS_SOURCE_VALIDATION = 0x1
_BRIDGE = 0x0604
# Memory Device of the SMBIOS specification (DSP0134, 7.18).
_MODULES = "sys/firmware/dmi/entries"
_MODULE = "17-"
_UNKNOWN_MODULE, _LARGE_MODULE, _IN_KIB = 0xFFFF, 0x7FFF, 0x8000
_PERSISTENT_TYPE, _PERSISTENT = 0x1F, (4, 5, 6, 7)  # its type, its technology


def read_host(root: Path) -> Host:
    """The host below ``root``."""
    found = files.read(root, _PATTERNS)
    found["proc/cpuinfo"] = files.read_text(root, "proc/cpuinfo", _CPUINFO_BYTES)
    found |= files.read(root, _group_files(found.get("proc/self/cgroup") or ""))
    if os.path.lexists(root / _MODPROBE):  # a program, whose text says nothing
        found[_MODPROBE] = None
    found |= _package_versions(root)
    real = root == Path("/")
    segments = [name for name in found if name.startswith("dev/shm/nccl-")]
    stale, unseen = _unmapped(root, segments)
    processes = tuple(_processes(root))
    channels = sorted(name for name in found if name.startswith("dev/nvidia-caps-imex-channels/"))
    return Host(
        files=Files(found),
        processes=processes or None,
        clock_synchronised=_clock_synchronised() if real else None,
        shm=read_space("/dev/shm") if real and "dev/shm" in found else None,
        stale_shm=stale,
        unseen_processes=unseen,
        imex_writable=tuple(_is_writable(root, name) for name in channels),
        acs_redirects=_acs(root, Files(found)),
        stuck=read_stuck(root, processes),
        modules=_modules(root),
    )


def read_space(path: str) -> Space:
    """The file system that holds ``path``, or the nearest directory above that is there."""
    place = Path(path)
    try:
        while not place.exists() and place != place.parent:
            place = place.parent
        found = os.statvfs(place)
    except OSError as error:
        return Space(path=path, size_bytes=0, free_bytes=0, problem=error.strerror or str(error))
    return Space(
        path=path,
        above=None if place == Path(path) else str(place.absolute()),
        size_bytes=found.f_blocks * found.f_frsize,
        free_bytes=found.f_bavail * found.f_frsize,
        files=found.f_files,
        files_free=found.f_favail,
        read_only=bool(found.f_flag & os.ST_RDONLY),
    )


def read_name(root: Path) -> Name:
    """The host's name; on this machine also what it leads to, which may take as long as DNS does.

    Below another root only its ``etc/hosts`` is asked.
    """
    if root == Path("/"):
        own = host_name()
        try:
            found = socket.getaddrinfo(own, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            return Name(host=own, addresses=())
        return Name(host=own, addresses=tuple(dict.fromkeys(str(e[4][0]) for e in found)))
    known_as = [files.read_text(root, each) for each in _NAME_FILES]
    host = next((clean(name) for name in known_as if name), None)
    lines = (files.read_text(root, "etc/hosts") or "").splitlines()
    known = [words[0] for line in lines if host in (words := line.partition("#")[0].split())[1:]]
    return Name(host=host, addresses=tuple(known) or None)


def _group_files(cgroup: str) -> list[str]:
    """Where limits on a job may stand, of version 1 and 2, from our own group upwards."""
    wanted = []
    for line in cgroup.splitlines():
        number, controllers, own = [*line.split(":", 2), "", ""][:3]
        for controller in controllers.split(","):
            if controller not in _GROUPS or bool(controller) == (number == "0"):
                continue
            path = own.strip("/")
            while True:
                place = "/".join(filter(None, ("sys/fs/cgroup", controller, path)))
                wanted += [f"{place}/{name}" for name in _GROUPS[controller]]
                if not path:
                    break
                path = path.rpartition("/")[0]
    return [name for name in wanted if not set(name) & set("*?[")]


def _package_versions(root: Path) -> dict[str, str | None]:
    """Versions of the fabric manager as the package manager and its own log have them."""
    found: dict[str, str | None] = {}
    log = files.tail_text(root, "var/log/fabricmanager.log", files.MOST_BYTES)
    said = re.findall(r"(?i)Fabric Manager version\s*(?:is)?\s*:?\s*(\d[\d.]+)", log or "")
    if said:
        found["var/log/fabricmanager.log"] = said[-1]
    text = files.read_text(root, "var/lib/dpkg/status", 16 << 20) or ""
    for block in text.split("\n\n"):
        name = re.match(r"Package: (\S+)", block)
        if name and _SELECTED.fullmatch(name[1]) and "Status: install ok installed" in block:
            version = re.search(r"^Version: (?:\d+:)?(\d[\d.]*)", block, re.MULTILINE)
            found[f"dpkg/{name[1]}"] = version[1] if version else None
    return found


def _processes(root: Path) -> Iterator[Process]:
    for pid in sorted(int(name) for name in files.names(root, "proc") if name.isdecimal()):
        text = files.read_text(root, f"proc/{pid}/stat", 4096)
        if text is None:
            if name := files.read_text(root, f"proc/{pid}/comm", 256):
                yield Process(pid, name, "?")
            continue
        head, _, rest = text.rpartition(")")
        yield Process(pid, head.partition("(")[2], (rest.split() or ["?"])[0])


def _unmapped(root: Path, segments: list[str]) -> tuple[tuple[str, ...], bool]:
    """Those of NCCL's ``segments`` that no process has mapped, and whether some are not visible."""
    if not segments:
        return (), False
    left, unseen = {f"/{name}" for name in segments}, False
    for pid in filter(str.isdecimal, files.names(root, "proc")):
        name = f"proc/{pid}/maps"
        if not os.path.lexists(root / name):
            continue
        text = files.read_text(root, name, 16 << 20)
        unseen |= text is None
        left -= {name for name in left if name in (text or "")}
    return tuple(sorted(name.lstrip("/") for name in left)), unseen


def _is_writable(root: Path, name: str) -> bool:
    try:
        return os.access(files.below(root, name), os.R_OK | os.W_OK)
    except OSError:
        return False


def _clock_synchronised() -> bool | None:
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        timex = ctypes.create_string_buffer(256)  # struct timex has 208 bytes; all zero only asks
        if libc.adjtimex(timex) < 0:
            return None
    except (OSError, AttributeError):
        return None
    # modes (int, padded), offset, freq, maxerror, esterror (long), status (int)
    status = ctypes.c_int.from_buffer(timex, 5 * ctypes.sizeof(ctypes.c_long)).value
    return not status & _STA_UNSYNC


def _acs(root: Path, found: Files) -> tuple[str, ...] | None:
    """Bridges whose ACS validates sources; None where their settings cannot be read."""
    bad, seen = [], False
    for name in found.names("sys/bus/pci/devices"):
        kind = found.number(f"sys/bus/pci/devices/{name}/class")
        if kind is None or kind >> 8 != _BRIDGE:
            continue
        config = _bytes(root, f"sys/bus/pci/devices/{name}/config")
        if len(config) <= 0x100:  # the rest is for root alone
            continue
        seen = True
        control = _acs_control(config)
        if control is not None and control & _ACS_SOURCE_VALIDATION:
            bad.append(name)
    return tuple(bad) if seen else None


def _acs_control(config: bytes) -> int | None:
    """The ACS control register in the extended configuration space; None without one."""
    at, steps = 0x100, 0
    while 0x100 <= at <= len(config) - 8 and steps < 64:
        head = int.from_bytes(config[at : at + 4], "little")
        if head & 0xFFFF == _ACS_CAPABILITY:
            return int.from_bytes(config[at + 6 : at + 8], "little")
        at, steps = head >> 20, steps + 1
    return None


def _modules(root: Path) -> tuple[int, ...] | None:
    """The memory modules of the firmware's list; None where it is not ours to read, or vague."""
    found = []
    for name in files.names(root, _MODULES):
        if not name.startswith(_MODULE):
            continue
        entry = _bytes(root, f"{_MODULES}/{name}/raw")
        size = int.from_bytes(entry[0x0C:0x0E], "little")
        if len(entry) < 0x15 or size == _UNKNOWN_MODULE:
            return None
        if entry[0x12] == _PERSISTENT_TYPE or (entry[1] > 0x28 and entry[0x28] in _PERSISTENT):
            continue
        if size == _LARGE_MODULE:
            size = int.from_bytes(entry[0x1C:0x20], "little")
        elif size & _IN_KIB:
            size = (size & ~_IN_KIB) // 1024
        found.append(size)
    return tuple(found) or None


def _bytes(root: Path, name: str) -> bytes:
    try:
        with open_regular(files.below(root, name)) as file:
            return file.read(4096) or b""
    except OSError:
        return b""
