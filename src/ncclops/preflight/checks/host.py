"""Checks of the host: limits, memory, kernel settings, clock and name. Pure."""

from __future__ import annotations

import ipaddress
import re
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping

from ncclops.preflight.catalogue import Check
from ncclops.preflight.checks.look import (
    HOST,
    UNLIMITED,
    Rule,
    cpu_list,
    has_capability,
    has_pci_gpu,
    is_mapped,
    is_root,
    is_virtual,
    memory_bytes,
    mounts,
    sees_host,
    size,
    soft_limit,
    some,
    status_of,
    uses_rdma,
)
from ncclops.preflight.model import Finding
from ncclops.preflight.readings import Files, Node
from ncclops.versions import release
from ncclops.whole_numbers import whole_number

_IPC_LOCK, _SYS_NICE, _SYS_RESOURCE = 14, 23, 24  # of linux/capability.h


def memlock(check: Check, node: Node) -> Iterator[Finding]:
    """A job with RDMA locks its buffers; one without does not."""
    limit = soft_limit(node.files, "Max locked memory")
    if limit is None:
        yield check.unknown(HOST, "/proc/self/limits does not say it")
    elif limit >= check.limit("bytes"):
        yield check.ok(HOST, size(limit))
    elif has_capability(node.files, _IPC_LOCK) and not is_mapped(node.files):
        yield check.ok(HOST, f"{size(limit)}, which CAP_IPC_LOCK overrides")
    elif uses_rdma(node):
        is_small = limit < check.limit("least_bytes")
        yield (check.bad if is_small else check.warn)(HOST, size(limit))
    else:
        yield check.ok(HOST, f"{size(limit)}; matters for RDMA only")


def shm(check: Check, node: Node) -> Iterator[Finding]:
    """Too small, or full."""
    whole, free = None, None
    if node.host.shm is not None and node.host.shm.problem is None:
        whole, free = node.host.shm.size_bytes, node.host.shm.free_bytes
    elif not node.real:
        whole = _mounted_size(node.files)
    least = check.limit("least_bytes")
    if not whole:
        yield check.unknown(HOST, "no mount of /dev/shm is to be seen")
    elif whole < least:
        # Half of a small machine's memory, as by default, is no mistake of whoever mounted it.
        memory = memory_bytes(node.files)
        is_small = memory is not None and whole >= memory * 0.45 and not node.gpus
        yield check.warn(HOST, size(whole)) if is_small else check.bad(HOST, size(whole))
    elif free is not None and free < least:
        yield check.bad(HOST, f"{size(free)} free of {size(whole)}")
    elif whole < check.limit("bytes"):
        yield check.warn(HOST, size(whole))
    else:
        yield check.ok(HOST, size(whole))


def nofile(check: Check, node: Node) -> Iterator[Finding]:
    """The soft limit: nothing raises it for the job."""
    limit = soft_limit(node.files, "Max open files")
    if limit is None:
        yield check.unknown(HOST, "/proc/self/limits does not say it")
    elif limit < check.limit("least_files"):
        yield check.bad(HOST, str(limit))
    elif limit < check.limit("files"):
        yield check.warn(HOST, str(limit))
    else:
        yield check.ok(HOST, "unlimited" if limit >= UNLIMITED else str(limit))


def file_max(check: Check, node: Node) -> Iterator[Finding]:
    """The limit for all processes, and how much of it is in use."""
    limit = node.files.number("proc/sys/fs/file-max")
    if limit is None:
        yield check.unknown(HOST, "/proc/sys/fs/file-max is not there")
        return
    used = node.files.number("proc/sys/fs/file-nr") or 0
    share = used / limit if 0 < used <= limit else 0.0
    said = f"{used} of {limit} in use"
    if share >= check.limit("fail_share"):
        yield check.bad(HOST, said)
    elif share >= check.limit("warn_share") or limit < check.limit("files"):
        yield check.warn(HOST, said)
    else:
        yield check.ok(HOST, said)


def pids(check: Check, node: Node) -> Iterator[Finding]:
    """The tightest of all limits on threads, by the room that it leaves."""
    files, rooms = node.files, list[tuple[int, str]]()
    for path, text in files.matching(r"sys/fs/cgroup/.*pids\.max|sys/fs/cgroup/pids\.max"):
        if text is not None and (most := whole_number(text)) is not None:
            used = files.number(path.removesuffix("max") + "current") or 0
            used = used if used <= most else 0
            rooms.append((most - used, f"/{path} {text}, {used} in use"))
    threads = re.match(r"\S+ \S+ \S+ \d+/(\d+)", files.text("proc/loadavg") or "")
    running = int(threads[1]) if threads else 0
    for name in ("pid_max", "threads-max"):
        value = files.number(f"proc/sys/kernel/{name}")
        if value is not None and value > 0:
            rooms.append((value - running, f"kernel.{name} {value}, {running} threads"))
    processes = soft_limit(files, "Max processes")
    exempt = is_root(files) or (has_capability(files, _SYS_RESOURCE) and not is_mapped(files))
    if processes is not None and processes < UNLIMITED and not exempt:
        rooms.append((processes, f"RLIMIT_NPROC {processes}"))
    if not rooms:
        yield check.unknown(HOST, "no limit can be read")
        return
    room, said = min(rooms)
    if room < check.limit("least_room"):
        yield check.bad(HOST, said)
    elif room < check.limit("room"):
        yield check.warn(HOST, said)
    else:
        yield check.ok(HOST, said)


def removeipc(check: Check, node: Node) -> Iterator[Finding]:
    """Only where systemd runs the host."""
    said = None
    places = r"(?:usr/lib|etc)/systemd/logind\.conf(?:\.d/.*)?"
    found = sorted(node.files.matching(places), key=lambda each: _precedence(each[0]))
    for _, text in found:
        for match in re.finditer(r"^\s*RemoveIPC\s*=\s*(\w+)", text or "", re.MULTILINE):
            said = match[1].lower()
    if said in ("no", "false", "0", "off"):
        yield check.ok(HOST, "RemoveIPC=no")
    elif said is not None:
        yield check.bad(HOST, f"RemoveIPC={said}")
    elif found:
        yield check.unknown(HOST, "no file says it: the default is the distribution's")


def stack(check: Check, node: Node) -> Iterator[Finding]:
    """Harmful with old versions of NCCL only."""
    limit = soft_limit(node.files, "Max stack size")
    if limit is None:
        yield check.unknown(HOST, "/proc/self/limits does not say it")
    elif limit < UNLIMITED:
        yield check.ok(HOST, size(limit))
    elif node.nccl is None:
        yield check.unknown(HOST, "unlimited; the version of NCCL is not known")
    elif release(node.nccl) < release("2.28"):
        yield check.bad(HOST, f"unlimited, with NCCL {node.nccl}")
    else:
        yield check.ok(HOST, f"unlimited, with NCCL {node.nccl}")


def numa(check: Check, node: Node) -> Iterator[Finding]:
    """For each GPU whose NUMA node is known."""
    allowed = cpu_list(status_of(node.files, "Cpus_allowed_list"))
    for gpu in node.gpus:
        subject, top = f"GPU {gpu.index}", f"sys/bus/pci/devices/{gpu.pci}"
        place = node.files.number(f"{top}/numa_node")
        near = cpu_list(node.files.text(f"{top}/local_cpulist"))
        if place is None or place < 0 or not near or not allowed:
            yield check.unknown(subject, "its NUMA node is not known here")
        elif near & allowed:
            yield check.ok(subject, f"NUMA node {place}, {len(near & allowed)} CPUs allowed there")
        else:
            listed = status_of(node.files, "Cpus_allowed_list")
            yield check.bad(subject, f"on NUMA node {place}; allowed are CPUs {listed} only")


def iommu(check: Check, node: Node) -> Iterator[Finding]:
    """The groups of GPUs and NVIDIA's NICs, on bare metal of x86-64."""
    files = node.files
    vendors = re.search(r"^vendor_id\s*:\s*(\S+)", files.text("proc/cpuinfo") or "", re.MULTILINE)
    if not has_pci_gpu(files) and not node.gpus:
        return
    if is_virtual(files) or vendors is None:
        yield check.unknown(HOST, "the machine is virtual or not x86-64")
        return
    if not files.names("sys/kernel/iommu_groups"):
        # An empty directory shows no names either: the IOMMU is off, or /sys is not complete.
        yield check.ok(HOST, "no groups: off")
        return
    kinds = dict[str, str]()
    for name in files.names("sys/bus/pci/devices"):
        kind = files.number(f"sys/bus/pci/devices/{name}/class")
        if kind is None or kind >> 8 not in (0x0300, 0x0302, 0x0207):
            continue
        if (files.text(f"sys/bus/pci/devices/{name}/driver") or "").endswith("/vfio-pci"):
            continue  # a virtual machine has it, which needs the translation
        group = (files.text(f"sys/bus/pci/devices/{name}/iommu_group") or "").rpartition("/")[2]
        if text := files.text(f"sys/kernel/iommu_groups/{group}/type"):
            kinds[name] = text
    if not kinds:
        yield check.unknown(HOST, "the groups of the GPUs are not to be seen")
        return
    bad = sorted(name for name, kind in kinds.items() if kind.startswith("DMA"))
    if bad:
        yield check.bad(HOST, f"translated for {some(bad)}")
    else:
        yield check.ok(HOST, f"{', '.join(sorted(set(kinds.values())))}")


def acs(check: Check, node: Node) -> Iterator[Finding]:
    """On bare metal with GPUs; in a virtual machine it has to be on."""
    if not has_pci_gpu(node.files) and not node.gpus:
        return
    bridges = node.host.acs_redirects
    if is_virtual(node.files):
        yield check.unknown(HOST, "a virtual machine")
    elif bridges is None:
        yield check.unknown(HOST, "the configuration space of bridges is for root alone")
    elif bridges:
        yield check.bad(HOST, f"SrcValid+ on {some(bridges)}")
    else:
        yield check.ok(HOST, "SrcValid- on all bridges")


def hugepages(check: Check, node: Node) -> Iterator[Finding]:
    """Pages that are set aside and free."""
    info = dict(re.findall(r"^(\w+):\s+(\d+)", node.files.text("proc/meminfo") or "", re.MULTILINE))
    try:
        total, free = int(info["MemTotal"]), int(info.get("HugePages_Free", 0))
        size_kib = int(info.get("Hugepagesize", 2048))
    except (KeyError, ValueError):
        yield check.unknown(HOST, "/proc/meminfo does not say it")
        return
    # /proc/meminfo counts the pages of the usual size only.
    pools = {size_kib: free}
    for path, _ in node.files.matching(
        r"sys/kernel/mm/hugepages/hugepages-\d{1,9}kB/free_hugepages"
    ):
        pools[int(path.split("-")[1].partition("kB")[0])] = node.files.number(path) or 0
    said = " and ".join(f"{count} free huge pages of {kib} KiB" for kib, count in pools.items())
    share = sum(kib * count for kib, count in pools.items()) / total if total else 0.0
    said += f", {share:.0%} of the memory"
    yield check.bad(HOST, said) if share > check.limit("share") else check.ok(HOST, said)


def stale_shm(check: Check, node: Node) -> Iterator[Finding]:
    """Segments that no process has mapped."""
    left = node.host.stale_shm
    if not left:
        yield check.ok(HOST, "none")
    elif node.host.unseen_processes:
        yield check.unknown(HOST, f"{len(left)} segments; processes of others may use them")
    else:
        yield check.bad(HOST, f"{len(left)}: {some(left)}")


def space(check: Check, node: Node) -> Iterator[Finding]:
    """Each path that was asked for; one that is late is judged by ``readable``."""
    for each in node.spaces:
        subject, said = each.path, f"{size(each.free_bytes)} free of {size(each.size_bytes)}"
        if each.above is not None:
            said = f"not there; in {each.above}: {said}"
        if each.problem is not None or each.size_bytes == 0:
            yield check.unknown(subject, each.problem or "it has no size")
        elif each.read_only:
            yield check.bad(subject, "read-only")
        elif each.free_bytes < check.limit("least_bytes") or (each.files and not each.files_free):
            yield check.bad(subject, f"{said}, {each.files_free} files")
        elif each.free_bytes < check.limit("bytes") or (
            each.files and each.files_free < check.limit("files")
        ):
            yield check.warn(subject, f"{said}, {each.files_free} files")
        elif each.above is not None:
            yield check.unknown(subject, said)
        else:
            yield check.ok(subject, said)


def clock(check: Check, node: Node) -> Iterator[Finding]:
    """The kernel's word, else the programs that set clocks."""
    running = [p.name for p in node.host.processes or () if p.name in check.words("daemons")]
    if node.host.clock_synchronised:
        yield check.ok(HOST, "the kernel says it is synchronised")
    elif running:
        yield check.ok(HOST, f"{running[0]} runs")
    elif "run/systemd/timesync/synchronized" in node.files:
        yield check.ok(HOST, "systemd-timesyncd has synchronised it")
    elif not sees_host(node) or is_virtual(node.files):
        # A hypervisor may keep the clock, and the host's programs are not to be seen inside.
        yield check.unknown(HOST, "nothing here says who keeps the clock")
    else:
        yield check.bad(HOST, "not synchronised, and no program runs that does it")


def kernel_log(check: Check, node: Node) -> Iterator[Finding]:
    """What the kernel says of hardware and drivers beside NVIDIA's."""
    if node.log.source is None:
        yield check.unknown(HOST, "the kernel log cannot be read")
        return
    newest_s, minutes = check.limit("hours") * 3600, check.limit("repeated_minutes")
    seen = dict[tuple[str, str], str]()
    times = defaultdict[tuple[str, str], deque[float]](deque)
    for line in node.log.lines:
        for what, who in _matches(check.texts("ends"), line.text):
            seen.pop((what, who), None)
        if line.age_s is None or line.age_s > newest_s:
            continue
        said = f"{line.text}, {line.age_s / 60:.0f} min ago"
        seen |= dict.fromkeys(_matches(check.texts("lines"), line.text), said)
        for each in _matches(check.texts("repeated"), line.text):
            recent = times[each]
            recent.append(line.age_s)
            while recent[0] - line.age_s > minutes * 60:
                recent.popleft()
            if len(recent) >= check.limit("repeated_lines"):
                seen[each] = f"{len(recent)} lines in {minutes:.0f} min such as: {said}"
    # One of a kind is enough: file systems with many servers lose them all at once.
    for what, text in {what: text for (what, _), text in seen.items()}.items():
        yield check.warn(HOST, text, what if what in check.remedies else "")
    if not seen:
        yield check.ok(HOST, f"nothing in {node.log.source}")


def clocksource(check: Check, node: Node) -> Iterator[Finding]:
    """What the kernel takes the time from."""
    name = node.files.text("sys/devices/system/clocksource/clocksource0/current_clocksource")
    if not name:
        yield check.unknown(HOST, "/sys does not show it")
    elif name in check.words("slow"):
        yield check.bad(HOST, name)
    else:
        yield check.ok(HOST, name)


def pcie_errors(check: Check, node: Node) -> Iterator[Finding]:
    """What devices have counted since boot, also where the kernel log is not to be seen."""
    uptime = re.match(r"\d+", node.files.text("proc/uptime") or "")
    # That of a container may be its own (lxcfs), and the counters are since the host's boot.
    minutes = int(uptime[0]) / 60 if uptime and sees_host(node) else 0.0
    counted = dict[str, list[str]]()
    for path, text in node.files.matching(r"sys/bus/pci/devices/[^/]+/aer_dev_\w+"):
        total = re.search(r"^TOTAL_ERR_(FATAL|COR)\s+(\d{1,18})$", text or "", re.MULTILINE)
        if total is None:
            continue
        said, count = counted.setdefault(path.split("/")[4], []), int(total[2])
        if total[1] == "FATAL" and count:
            said.append(f"{count} fatal since boot")
        elif (
            total[1] == "COR"
            and minutes >= check.limit("minutes")
            and count >= check.limit("corrected_per_minute") * minutes
        ):
            said.append(f"{count} corrected since boot, {count / minutes:.0f} a minute")
    for address, said in counted.items():
        if said:
            yield check.warn(f"PCI {address}", ", ".join(said))
    if not counted:
        yield check.unknown(HOST, "the kernel counts none")
    elif not any(counted.values()):
        yield check.ok(HOST, f"{len(counted)} devices")


def _matches(patterns: Mapping[str, str], text: str) -> Iterator[tuple[str, str]]:
    """The kinds that ``text`` is of, each with ``who`` its pattern says it is about."""
    for what, pattern in patterns.items():
        if match := re.search(pattern, text):
            yield what, match.groupdict().get("who") or ""


def name(check: Check, node: Node) -> Iterator[Finding]:
    """A name of its own; what it leads to matters between hosts."""
    host, addresses = node.name.host, node.name.addresses
    if not host:
        yield check.unknown(HOST, "the name was not read")
    elif host.partition(".")[0] in ("localhost", "(none)"):
        yield check.warn(HOST, host) if node.needs.nodes == "one" else check.bad(HOST, host)
    elif addresses is None:
        yield check.unknown(HOST, f"{host} was not looked up")
    elif not addresses:
        yield check.warn(HOST, f"{host} leads to no address")
    elif all(_is_loopback(each) for each in addresses) and node.needs.nodes == "many":
        yield check.warn(HOST, f"{host} leads to {some(addresses)} only")
    else:
        yield check.ok(HOST, f"{host}, {some(addresses)}")


def capabilities(check: Check, node: Node) -> Iterator[Finding]:
    """A filter on system calls lets memory be bound only with the capability."""
    filtered = status_of(node.files, "Seccomp")
    if filtered is None:
        yield check.unknown(HOST, "/proc/self/status does not say it")
    elif filtered == "2" and node.gpus and not has_capability(node.files, _SYS_NICE):
        yield check.bad(HOST, "a seccomp filter is on, CAP_SYS_NICE is missing")
    else:
        yield check.ok(HOST, "no filter" if filtered != "2" else "a filter, with CAP_SYS_NICE")


def imex(check: Check, node: Node) -> Iterator[Finding]:
    """Only where a GPU says that its fabric goes beyond the host."""
    if not any(gpu.fabric is not None and gpu.fabric.cluster.strip("0") for gpu in node.gpus):
        return
    channels = node.files.names("dev/nvidia-caps-imex-channels")
    running = [each.name for each in node.host.processes or ()]
    if any(node.host.imex_writable) and node.needs.nodes == "many" and sees_host(node):
        if any(name.startswith("nvidia-imex") for name in running):
            yield check.ok(HOST, f"{len(channels)} channels")
        else:
            # A job's prolog may start it.
            yield check.warn(HOST, f"{len(channels)} channels, and nvidia-imex does not run")
    elif any(node.host.imex_writable):
        yield check.ok(HOST, f"{len(channels)} channels")
    elif channels:
        yield check.bad(HOST, f"{len(channels)} channels, none of which may be written")
    elif node.needs.nodes == "many":
        yield check.warn(HOST, "no channel is here")
    else:
        yield check.unknown(HOST, "no channel is here; the job may need none")


def d_state(check: Check, node: Node) -> Iterator[Finding]:
    """Programs that stand still; a disk that is slow lets them run now and then."""
    if node.host.processes is None:
        yield check.unknown(HOST, "no process can be seen")
        return
    names, pauses = check.words("names"), "|".join(check.words("paused"))
    kinds: dict[str, list[str]] = {"gpu": [], "files": [], "": []}
    unclear = list[str]()
    for each in node.host.stuck:
        if each.moved or re.match(pauses, each.place):
            continue
        said = f"{each.name} ({each.pid})"
        said += f" in {each.place}" if each.place else ""
        if each.gpus or each.name.startswith(names):
            kinds["gpu"].append(" with ".join([said, *each.gpus[:1]]))
        elif each.moved is None:
            unclear.append(said)
        elif re.match("|".join(check.words("files")), each.place):
            kinds["files"].append(said)
        else:
            kinds[""].append(said)
    for what, found in kinds.items():
        if found:
            yield check.bad(HOST, some(found), what)
    if unclear:
        yield check.unknown(HOST, f"{some(unclear)}: whether they stand still is not to be seen")
    elif not any(kinds.values()):
        yield check.ok(HOST, "none")


def peer_memory(check: Check, node: Node) -> Iterator[Finding]:
    """Where there are GPUs and RDMA devices."""
    if not node.gpus or not uses_rdma(node) or not node.nics:
        return
    files = node.files
    loaded = any("nv_mem" in path for path, _ in files.matching(r"sys/kernel/mm/memory_peers/.*"))
    loaded |= "sys/module/nvidia_peermem" in files
    loaded |= bool(
        re.search(r"^(nvidia_peermem|nv_peer_mem) ", files.text("proc/modules") or "", re.M)
    )
    driver = files.text("proc/driver/nvidia/version")
    if loaded:
        yield check.ok(HOST, "nvidia_peermem is loaded")
    elif driver is not None and "Open Kernel Module" in driver:
        kernel = files.text("proc/sys/kernel/osrelease") or ""
        if kernel and release(kernel) < release(str(check.limits["kernel"])):
            # Distributions have taken DMA-BUF into older ones.
            yield check.unknown(HOST, f"the open kernel modules, and Linux {kernel}")
        else:
            yield check.ok(HOST, "the open kernel modules, with DMA-BUF")
    elif driver is None or files.text("proc/modules") is None:
        yield check.unknown(HOST, "the host's modules are not to be seen")
    else:
        yield check.bad(HOST, "neither nvidia_peermem nor the open kernel modules")


def readable(check: Check, node: Node) -> Iterator[Finding]:
    """What did not answer in time. NVML and disks convict; a name server or a log does not."""
    for part, seconds in node.late.items():
        said = f"no answer within {seconds:.0f} s"
        kind, _, argument = part.partition(" ")
        if kind in ("gpu", "driver"):
            yield check.bad(f"GPU {argument}" if argument else "NVML", said)
        elif kind == "space":
            yield check.bad(argument, said)
        elif kind in ("nic", "counters", "nics"):
            subject = argument or "RDMA devices"
            yield check.bad(subject, said) if uses_rdma(node) else check.warn(subject, said)
        elif kind == "name":
            yield check.warn("the host's name", said)
        else:
            yield check.unknown(part, said)
    for part, why in node.broken.items():
        yield check.unknown(part, why)
    if not node.late and not node.broken:
        yield check.ok(HOST, "all")


RULES: Mapping[str, Rule] = {
    "host.memlock": memlock,
    "host.shm": shm,
    "host.nofile": nofile,
    "host.file-max": file_max,
    "host.pids": pids,
    "host.removeipc": removeipc,
    "host.stack": stack,
    "host.numa": numa,
    "host.iommu": iommu,
    "host.acs": acs,
    "host.hugepages": hugepages,
    "host.stale-shm": stale_shm,
    "host.space": space,
    "host.clock": clock,
    "host.clocksource": clocksource,
    "host.kernel-log": kernel_log,
    "host.pcie-errors": pcie_errors,
    "host.name": name,
    "host.capabilities": capabilities,
    "host.imex": imex,
    "host.d-state": d_state,
    "host.peer-memory": peer_memory,
    "host.readable": readable,
}


def _mounted_size(files: Files) -> int | None:
    """What the list of mounts says of ``/dev/shm``; half of the memory where it says nothing."""
    options = [options for place, options in mounts(files) if place == "/dev/shm"]
    if not options:
        return None
    match = re.search(r"(?:^|,)size=(\d+)([kmgKMG%]?)", options[-1])
    total = memory_bytes(files)
    if match is None:
        return None if total is None else total // 2
    if match[2] == "%":
        return None if total is None else total * int(match[1]) // 100
    return int(match[1]) << {"": 0, "k": 10, "m": 20, "g": 30}[match[2].lower()]


def _precedence(path: str) -> tuple[bool, bool, str]:
    # A drop-in comes after the main file, and one in /etc after one in /usr/lib.
    return (".d/" in path, path.startswith("etc/"), path)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False
