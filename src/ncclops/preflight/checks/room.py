"""Checks of what the host leaves to a job: memory, processors, ports, connections. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from ncclops.preflight.catalogue import Check
from ncclops.preflight.checks.look import (
    HOST,
    Rule,
    cpu_list,
    is_virtual,
    memory_bytes,
    mounts,
    size,
    some,
    status_of,
)
from ncclops.preflight.model import Finding
from ncclops.preflight.readings import Files, Node
from ncclops.whole_numbers import whole_number

# This process has more: a smaller limit would have ended it, so it is none.
_OWN_BYTES = 64 << 20
_CPUS = "sys/devices/system/cpu"
_MEMORY = r"sys/fs/cgroup/(?:.*/)?memory\.(?:max|high|limit_in_bytes)"


def memory(check: Check, node: Node) -> Iterator[Finding]:
    """The tightest control group's, for each GPU; without one, whether the host has some left."""
    total, free = memory_bytes(node.files), memory_bytes(node.files, "MemAvailable")
    if not total:
        yield check.unknown(HOST, "/proc/meminfo does not say it")
        return
    limits = [
        (most, path)
        for path, text in node.files.matching(_MEMORY)
        if (most := whole_number(text or "")) is not None and _OWN_BYTES < most < total
    ]
    ranks = max(1, len(node.gpus))
    whose = f" for {ranks} GPU{'' if ranks == 1 else 's'}" if node.gpus else ""
    if limits:
        most, path = min(limits)
        said = f"{size(most)} of {size(total)}{whose}: /{path}"
        is_small = most < check.limit("bytes") * ranks and node.gpus
        yield check.bad(HOST, said) if is_small else check.ok(HOST, said)
    elif free and free < min(check.limit("share") * total, check.limit("bytes") * ranks):
        yield check.bad(HOST, f"{size(free)} of {size(total)} left{whose}", "left")
    else:
        yield check.ok(HOST, f"{size(total)}, no limit")


def modules(check: Check, node: Node) -> Iterator[Finding]:
    """What the kernel has of the memory that the firmware lists, and whether one is not listed."""
    total, sizes = memory_bytes(node.files), node.host.modules
    if is_virtual(node.files):
        yield check.unknown(HOST, "a virtual machine")
        return
    if not total or sizes is None:
        yield check.unknown(HOST, "the firmware's list is for root alone, or not to be seen")
        return
    present = [each << 20 for each in sizes if each]
    installed, smallest = sum(present), min(present, default=0)
    said = f"{len(present)} modules of {len(sizes)}, {size(installed)}, of which {size(total)} used"
    kept = check.limit("kernel_share") * installed
    if present and installed - total > kept + check.limit("module_share") * smallest:
        yield check.bad(HOST, said, "unused")
    elif len(present) % 2 and len(present) >= check.limit("pairs_from"):
        yield check.bad(HOST, f"{said}: an odd number")
    else:
        yield check.ok(HOST, said)


def cpus(check: Check, node: Node) -> Iterator[Finding]:
    """Those that this process may use, and the quota of its control groups."""
    if not node.gpus:
        return
    offline = cpu_list(node.files.text(f"{_CPUS}/offline"))
    # With it off, each core's second thread is meant to be.
    if offline and node.files.text(f"{_CPUS}/smt/control") == "on":
        yield check.bad(HOST, f"{len(offline)} CPUs are offline", "offline")
        return
    known = list[tuple[float, str]]()
    if allowed := cpu_list(status_of(node.files, "Cpus_allowed_list")):
        known.append((len(allowed), f"{len(allowed)} CPUs allowed"))
    known += [(share, f"{share:g} CPUs by /{path}") for share, path in _quotas(node.files)]
    if not known:
        yield check.unknown(HOST, "no limit can be read")
        return
    count, said = min(known)
    said += f", for {len(node.gpus)} GPU{'' if len(node.gpus) == 1 else 's'}"
    is_few = count < check.limit("cpus") * len(node.gpus)
    yield check.bad(HOST, said) if is_few else check.ok(HOST, said)


def ports(check: Check, node: Node) -> Iterator[Finding]:
    """What the kernel gives to those who ask for any port."""
    ends = (node.files.text("proc/sys/net/ipv4/ip_local_port_range") or "").split()
    first, last = (whole_number(each, 65_535) for each in ends) if len(ends) == 2 else (None, None)
    if first is None or last is None or last < first:
        yield check.unknown(HOST, "the range cannot be read")
        return
    count = last - first + 1
    said = f"{count}: {first} to {last}"
    yield check.bad(HOST, said) if count < check.limit("ports") else check.ok(HOST, said)


def conntrack(check: Check, node: Node) -> Iterator[Finding]:
    """Only where the kernel tracks connections."""
    top = "proc/sys/net/netfilter/nf_conntrack"
    used, most = (node.files.number(f"{top}_{each}") for each in ("count", "max"))
    if used is None or not most or used < 0:
        return
    said = f"{used} of {most} connections"
    yield (check.bad if used >= check.limit("share") * most else check.ok)(HOST, said)


def programs(check: Check, node: Node) -> Iterator[Finding]:
    """Where torch.compile and Triton put what they have built."""
    place = node.environ.get("TMPDIR") or "/tmp"
    found = [
        (len(mount), number, mount, options)
        for number, (mount, options) in enumerate(mounts(node.files))
        if f"{place.rstrip('/')}/".startswith(f"{mount.rstrip('/')}/")
    ]
    if not found:
        yield check.unknown(HOST, f"what holds {place} is not to be seen")
        return
    *_, mount, options = max(found)
    said = f"{place} is on {mount}, {options}"
    yield (check.bad if "noexec" in options.split(",") else check.ok)(HOST, said)


def balancing(check: Check, node: Node) -> Iterator[Finding]:
    """Where GPUs share their memory with the processor."""
    shared = [
        str(gpu.index)
        for gpu in node.gpus
        if any(re.search(name, gpu.name or "") for name in check.words("models"))
    ]
    if not shared:
        return
    value = node.files.number("proc/sys/kernel/numa_balancing")
    if value is None:
        yield check.unknown(HOST, "kernel.numa_balancing cannot be read")
    elif value:
        yield check.bad(HOST, f"kernel.numa_balancing {value}, with GPU {some(shared)} on Grace")
    else:
        yield check.ok(HOST, "off")


def _quotas(files: Files) -> Iterator[tuple[float, str]]:
    """Processors' worth of time that control groups give, of version 2 and 1."""
    for path, text in files.matching(r"sys/fs/cgroup/(?:.*/)?cpu\.(?:max|cfs_quota_us)"):
        words = (text or "").split()
        if path.endswith("quota_us"):
            words.append(files.text(path.replace("quota", "period")) or "")
        quota, period = (whole_number(each) for each in words) if len(words) == 2 else (None, None)
        if quota and period:
            yield quota / period, path


RULES: Mapping[str, Rule] = {
    "host.memory": memory,
    "host.modules": modules,
    "host.cpus": cpus,
    "host.ports": ports,
    "host.conntrack": conntrack,
    "host.programs": programs,
    "host.numa-balancing": balancing,
}
