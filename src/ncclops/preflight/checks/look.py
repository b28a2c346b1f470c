"""What checks of several kinds ask of readings, and how they word what was read. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from ncclops.preflight.catalogue import Check
from ncclops.preflight.model import Finding
from ncclops.preflight.readings import Files, Node
from ncclops.whole_numbers import whole_number

# A check's rule: what it finds on a node.
Rule = Callable[[Check, Node], Iterator[Finding]]

HOST = "host"
UNLIMITED = 1 << 62
_INITS = ("systemd", "init", "openrc-init", "runit", "s6-svscan", "dinit")
# KVM and Hyper-V call it so; Google's machines are what the second says.
_VIRTUAL_PRODUCT = re.compile(r"Virtual Machine|Google Compute Engine")
_MOST_CPUS = 1 << 20  # the kernel has 8,192 at most


def uses_rdma(node: Node) -> bool:
    """Whether the job will: the lane says it, or else there being a device that it may open.

    A container sees the host's devices in /sys, whether or not it has been given their files.
    """
    if node.needs.rdma is not None:
        return node.needs.rdma
    has_files = any(nic.files.names("dev/infiniband") for nic in node.nics)
    return bool(node.nics) and (has_files or not in_container(node.files))


def soft_limit(files: Files, label: str) -> int | None:
    """The soft limit of a line of ``/proc/self/limits``; ``UNLIMITED`` where there is none."""
    match = re.search(rf"^{label}\s+(\S+)", files.text("proc/self/limits") or "", re.MULTILINE)
    if match is None:
        return None
    if match[1] == "unlimited":
        return UNLIMITED
    return whole_number(match[1])


def is_virtual(files: Files) -> bool:
    """Whether the processor says that a hypervisor is below; of ARM, whether the firmware does."""
    flags = re.search(r"^flags\s*:(.*)", files.text("proc/cpuinfo") or "", re.MULTILINE)
    if flags is not None:
        return "hypervisor" in flags[1].split()
    top = "sys/class/dmi/id"
    vendor, product = (files.text(f"{top}/{each}") or "" for each in ("sys_vendor", "product_name"))
    is_instance = vendor == "Amazon EC2" and ".metal" not in product
    return is_instance or vendor == "QEMU" or bool(_VIRTUAL_PRODUCT.search(product))


def in_container(files: Files) -> bool:
    """By the marks that container runtimes leave, or by the first process being no init.

    containerd leaves no mark below control groups of version 2.
    """
    first, init = files.text("proc/1/cgroup") or "", files.text("proc/1/comm")
    return (
        ".dockerenv" in files
        or "run/.containerenv" in files
        or "run/systemd/container" in files
        or (bool(init) and init not in _INITS)
        or any(word in first for word in ("docker", "kubepods", "containerd", "libpod", "lxc"))
    )


def sees_host(node: Node) -> bool:
    """Whether the programs of the host are to be seen: that one is not among them says something.

    Not in a container, and not where /proc is mounted with ``hidepid``, which shows to each user
    the processes of that user alone.
    """
    first = [each.name for each in node.host.processes or () if each.pid == 1]
    return bool(first) and first[0] in _INITS and not in_container(node.files)


def cpu_list(text: str | None) -> frozenset[int]:
    """The numbers of ``"0-3,8"``; empty for what is none."""
    found: set[int] = set()
    for part in filter(None, (text or "").strip().split(",")):
        first, _, last = part.partition("-")
        begin, end = whole_number(first, _MOST_CPUS), whole_number(last or first, _MOST_CPUS)
        if begin is None or end is None:
            return frozenset()
        found.update(range(begin, end + 1))
    return frozenset(found)


def status_of(files: Files, label: str) -> str | None:
    """A line of this process's ``/proc/self/status``."""
    match = re.search(rf"^{label}:\s*(\S+)", files.text("proc/self/status") or "", re.MULTILINE)
    return None if match is None else match[1]


def has_capability(files: Files, number: int) -> bool:
    """Whether this process has the capability, by its number."""
    effective = status_of(files, "CapEff")
    try:
        return bool(int(effective or "0", 16) >> number & 1)
    except ValueError:
        return False


def is_mapped(files: Files) -> bool:
    """Whether this process is in a user namespace of its own, as under enroot or rootless podman.

    What its capabilities allow ends there: limits of the kernel's own are not overridden by them.
    """
    rows = (files.text("proc/self/uid_map") or "").splitlines()
    return bool(rows) and rows[0].split() != ["0", "0", "4294967295"]


def is_root(files: Files) -> bool:
    """Whether this process is the machine's root, not one that a user namespace has made so."""
    return status_of(files, "Uid") == "0" and not is_mapped(files)


def has_pci_gpu(files: Files) -> bool:
    """Whether an NVIDIA GPU is on the PCI bus."""
    return any(
        files.number(f"sys/bus/pci/devices/{name}/vendor") == 0x10DE
        and (files.number(f"sys/bus/pci/devices/{name}/class") or 0) >> 16 == 0x03
        for name in files.names("sys/bus/pci/devices")
    )


def memory_bytes(files: Files, name: str = "MemTotal") -> int | None:
    """A figure of ``/proc/meminfo``, in bytes; by default the machine's memory."""
    found = re.search(rf"^{name}:\s+(\d+) kB", files.text("proc/meminfo") or "", re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def mounts(files: Files) -> Iterator[tuple[str, str]]:
    """Where something is mounted, and its options; what covers another comes after it."""
    text = files.text("proc/self/mounts") or files.text("proc/mounts") or ""
    for line in text.splitlines():
        if len(words := line.split()) > 3:
            yield words[1], words[3]


def size(count: int) -> str:
    """Bytes as people write them."""
    if count >= UNLIMITED:
        return "unlimited"
    for unit, bytes_each in (
        ("TiB", 1 << 40),
        ("GiB", 1 << 30),
        ("MiB", 1 << 20),
        ("KiB", 1 << 10),
    ):
        if count >= bytes_each:
            return f"{count / bytes_each:.4g} {unit}"
    return f"{count} bytes"


def some(names: Iterable[str]) -> str:
    """The first few, and how many more."""
    listed = list(names)
    more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
    return ", ".join(listed[:3]) + more
