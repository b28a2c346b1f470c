"""Checks of GPUs, by what NVML, the driver and the kernel log say. Pure."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from ncclops.host.nvml import Recovery
from ncclops.preflight.catalogue import Check
from ncclops.preflight.checks.look import (
    HOST,
    Rule,
    in_container,
    is_virtual,
    sees_host,
    size,
    some,
)
from ncclops.preflight.checks.ports import ports
from ncclops.preflight.model import Finding
from ncclops.preflight.readings import Fabric, Gpu, Node

# How schedulers call their control groups, and what they set in a job: Slurm, PBS, LSF,
# HTCondor, Flux, Grid Engine.
_SCHEDULERS = ("slurm", "pbs", "/lsf", "condor", "flux", "/sge", "/uge")
_JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "_CONDOR_SLOT", "FLUX_JOB_ID", "SGE_TASK_ID")
_REASONS = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
# GPUs of a board. A machine with fewer may have a part of one, without the links to the rest.
_BOARD = 8
# Of cards in slots, so many more have to have more lanes before fewer are a fault, and this share.
_SLOTS, _SLOT_SHARE = 4, 0.75
# nvmlGpuFabricState_t
_FABRIC_NONE, _FABRIC_NOT_STARTED, _FABRIC_IN_PROGRESS, _FABRIC_COMPLETED = range(4)
# Fields of nvmlGpuFabricInfo's health mask: name, shift, width in bits, the values that are bad.
_HEALTH = (
    ("degraded bandwidth", 0, 2, {1}),
    ("route recovery in progress", 2, 2, {1}),
    ("route unhealthy", 4, 2, {1}),
    ("access timeout recovery", 6, 2, {1}),
    ("incorrect configuration", 8, 4, {2, 3, 4, 5, 6, 7}),
)
# With MIG the instance stands behind the address: (PCI:0000:19:00 GPU-I:05).
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)[^)]*\): (\d+)")
# NVLink errors say it with their own word: Xid 144 to 150.
_NONFATAL = re.compile(r"Xid \([^)]*\): 1\d\d, .*\bNonfatal\b")
_FATAL_SXID = re.compile(r"SXid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+), Fatal\b")
# What the driver wants from now on: the number of nvmlDeviceGpuRecoveryAction_t, and its name.
_ASKS = re.compile(r"\): 154, GPU recovery action changed from .* to (0x[0-9a-fA-F]+) \(([^)]*)\)")
# What the driver says of a GPU that it cannot use, without a number.
_WITHOUT_XID = re.compile(r"fallen off the bus|RmInitAdapter failed")
_PCI_PLACE = "PCI "  # before the address of a GPU that NVML does not show
_PCI = re.compile(r"[0-9a-fA-F]{4}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}")
_NARROW = re.compile(
    r"([0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.\d): .*available PCIe bandwidth, limited by .*?"
    r" x(\d+) link at .*\(capable of .* x(\d+) link\)"
)


def driver(check: Check, node: Node) -> Iterator[Finding]:
    """Whether NVML starts, where there is something for it to start."""
    loaded = _loaded_version(node)
    is_there = loaded is not None or bool(node.files.names("proc/driver/nvidia/gpus"))
    found = node.driver
    if found.problem is not None:
        # What is refused on a machine without the driver is usual; with it, nobody can use a GPU.
        if found.error in check.numbers("errors") and is_there:
            yield check.bad(HOST, found.problem)
        elif is_there or _bound(node):
            yield check.unknown(HOST, found.problem)
        elif _has_no_driver(node) and not in_container(node.files) and (on_bus := _on_bus(node)):
            yield check.warn(HOST, f"no driver is loaded; PCI shows {on_bus} of NVIDIA's GPUs")
        return
    if found.version is None:
        if node.gpus:
            yield check.unknown(HOST, "NVML does not say its version")
    elif loaded is not None and loaded != found.version:
        yield check.bad(HOST, f"the kernel has {loaded}, NVML {found.version}")
    else:
        yield check.ok(HOST, found.version)


def count(check: Check, node: Node) -> Iterator[Finding]:
    """NVML's number against the driver's list and the lane's."""
    found, wanted = node.driver.count, node.needs.gpus
    listed = len(node.files.names("proc/driver/nvidia/gpus"))
    lost = f", {listed} in the driver's list" if listed else ""
    if found is None:
        if wanted and node.driver.problem is not None and not listed:
            if node.driver.error in check.numbers("errors") and _has_no_driver(node):
                on_bus = _on_bus(node)
                shown = f"{on_bus or 'no'} NVIDIA GPU{'' if on_bus == 1 else 's'}"
                why = f"no NVIDIA driver is loaded, and the lane needs {wanted}; PCI shows {shown}"
                yield check.bad(HOST, why)
            else:
                yield check.unknown(HOST, f"no NVML, and the lane needs {wanted}")
        return
    if wanted is not None and found < wanted:
        yield check.bad(HOST, f"{found}{lost}, and the lane needs {wanted}")
    elif listed > found and _is_given_some(node):
        yield check.unknown(HOST, f"{found}{lost}; the job may have been given no more")
    elif listed > found and not in_container(node.files):
        yield check.bad(HOST, f"{found}{lost}")
    elif _switches(node) and not is_virtual(node.files) and (on_bus := _on_bus(node)) % _BOARD:
        said = f"PCI shows {on_bus}, and boards with NVSwitches have {_BOARD}"
        yield check.warn(HOST, said)
    elif wanted is None and not listed:
        yield check.unknown(HOST, f"{found}; nothing says how many there should be")
    else:
        yield check.ok(HOST, str(found))


def lost(check: Check, node: Node) -> Iterator[Finding]:
    """NVML cannot reach it, or refuses to before a reset."""
    for gpu in node.gpus:
        if gpu.lost is None:
            yield check.ok(_name(gpu), "answers")
        elif gpu.error in check.numbers("errors"):
            yield check.bad(_name(gpu), gpu.lost)
        else:
            yield check.unknown(_name(gpu), gpu.lost)


def recovery(check: Check, node: Node) -> Iterator[Finding]:
    """What the driver asks for."""
    for gpu in _answering(node):
        need = Recovery(gpu.recovery_action).need
        if gpu.recovery_action is None:
            yield check.unknown(_name(gpu), "the driver does not say")
        elif need is not None:
            yield check.bad(_name(gpu), need)
        else:
            yield check.ok(_name(gpu), "none")


def ecc(check: Check, node: Node) -> Iterator[Finding]:
    """Counts since the driver was loaded."""
    for gpu in _answering(node):
        counts = {
            "uncorrected": (gpu.ecc_uncorrected, 0.0),
            "uncorrected in SRAM": (gpu.sram_uncorrected, 0.0),
            "corrected in SRAM": (gpu.sram_corrected, check.limit("sram_corrected")),
            "corrected in DRAM": (gpu.dram_corrected, check.limit("dram_corrected")),
        }
        known = {name: value for name, (value, _) in counts.items() if value is not None}
        bad = [f"{n} {what}" for what, (n, most) in counts.items() if n is not None and n > most]
        if bad:
            yield check.bad(_name(gpu), ", ".join(bad))
        elif known:
            yield check.ok(_name(gpu), f"{sum(known.values())} errors")
        else:
            yield check.unknown(_name(gpu), "the driver does not say")


def ecc_mode(check: Check, node: Node) -> Iterator[Finding]:
    """Where the GPU has it."""
    for gpu in _answering(node):
        if gpu.ecc_enabled is None:
            yield check.unknown(_name(gpu), "the driver does not say")
        elif gpu.ecc_enabled:
            yield check.ok(_name(gpu), "on")
        elif any(re.search(name, gpu.name or "") for name in check.words("optional")):
            yield check.unknown(_name(gpu), "off, as such cards come")
        else:
            yield check.bad(_name(gpu), "off")


def rows(check: Check, node: Node) -> Iterator[Finding]:
    """Rows of memory that were, could not be, or are to be replaced."""
    for gpu in _answering(node):
        bad, what = [], "pending"
        if gpu.rows_pending:
            bad.append("a remapping is pending")
        if gpu.rows_failed:
            bad.append("a row could not be remapped")
            what = ""
        if gpu.rows_uncorrected is not None and gpu.rows_uncorrected > check.limit("rows"):
            bad.append(f"{gpu.rows_uncorrected} rows remapped after uncorrectable errors")
            what = ""
        if bad:
            yield check.bad(_name(gpu), ", ".join(bad), what)
        elif gpu.rows_failed is None and gpu.rows_pending is None:
            yield check.unknown(_name(gpu), "the driver does not say")
        else:
            yield check.ok(_name(gpu), f"{gpu.rows_uncorrected or 0} remapped")


def xid(check: Check, node: Node) -> Iterator[Finding]:
    """Those of the hardware; what an application has done to itself is not the node's."""
    has_gpus = bool(node.gpus) or node.driver.count is not None
    # Where NVML does not start, the log may say why; a container's job may have no GPU at all.
    if not has_gpus and (in_container(node.files) or _loaded_version(node) is None):
        return
    if node.log.source is None:
        if has_gpus:
            yield check.unknown(HOST, "the kernel log cannot be read")
        return
    codes, mild, reset = map(check.numbers, ("codes", "mild", "reset"))
    newest_s = check.limit("hours") * 3600
    seen, old = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
    asked: dict[str, tuple[str, float | None]] = {}
    # Where NVML says what the driver wants now, that counts.
    known = {_name(gpu) for gpu in node.gpus if gpu.recovery_action is not None}

    def note(place: str, what: str, age_s: float | None, *, grave: bool = True) -> None:
        if age_s is None:
            old[place].append(f"{what}, of unknown age")
        elif age_s <= newest_s:
            is_own = grave and not _may_be_of_others(node, place)
            (seen if is_own else old)[place].append(f"{what}, {age_s / 60:.0f} min ago")

    for line in node.log.lines:
        match, switch = _XID.search(line.text), _FATAL_SXID.search(line.text)
        if match and (asks := _ASKS.search(line.text)):
            wants = f"Xid 154, {asks[2]}" if int(asks[1], 16) else ""
            asked[_by_pci(node, match[1])] = wants, line.age_s
        elif match and (code := int(match[2])) in codes | mild:
            place, nonfatal = _by_pci(node, match[1]), bool(_NONFATAL.search(line.text))
            grave = not nonfatal and code in codes - (reset if place in known else frozenset())
            note(place, f"Xid {code}{', nonfatal' * nonfatal}", line.age_s, grave=grave)
        elif switch:
            note(f"NVSwitch {switch[1].lower()}", f"SXid {switch[2]}, fatal", line.age_s)
        elif match is None and (told := _WITHOUT_XID.search(line.text)):
            address = _PCI.search(line.text)
            note(_by_pci(node, address[0] if address else ""), told[0], line.age_s)
    for place, (wants, age_s) in asked.items():
        if wants and place not in known:
            note(place, wants, age_s)
    for place, said in seen.items():
        yield check.bad(place, some(list(dict.fromkeys(said))), _helps(check, said))
    for place, said in old.items():
        if place not in seen:
            yield check.warn(place, some(list(dict.fromkeys(said))), _helps(check, said))
    if has_gpus and not seen and not old:
        yield check.ok(HOST, f"none in {node.log.source}")


def _helps(check: Check, said: Sequence[str]) -> str:
    """Whose remedy is the gravest of what was ``said``."""
    for what in check.remedies:
        if any(re.match(rf"(?:{'|'.join(check.limits[what])})\b", each) for each in said):
            return what
    return ""


def throttle(check: Check, node: Node) -> Iterator[Finding]:
    """Reasons that stay are no moment."""
    bits = sum(check.numbers("bits"))
    for gpu in _answering(node):
        samples = [s.reasons & bits for s in gpu.throttle if s.reasons is not None]
        if not samples:
            yield check.unknown(_name(gpu), "the driver does not say")
            continue
        ever, always = 0, bits
        for each in samples:
            ever, always = ever | each, always & each
        if always:
            yield check.bad(_name(gpu), _reasons(always))
        elif ever:
            yield check.warn(_name(gpu), f"{_reasons(ever)}, for a moment")
        else:
            yield check.ok(_name(gpu), "none")


def temperature(check: Check, node: Node) -> Iterator[Finding]:
    """The chip's and the memory's, against the GPU's own limits."""
    margin = check.limit("margin_c")
    for gpu in _answering(node):
        sensors = [
            ("GPU", gpu.temperature_c, gpu.slowdown_c or check.limit("unknown_c")),
            ("memory", gpu.memory_temperature_c, gpu.memory_limit_c),
        ]
        # Some GPUs without a sensor for their memory report 0.
        known = [(what, at, most) for what, at, most in sensors if at and most]
        hot = [f"{what} {at} °C of {most:.0f}" for what, at, most in known if at >= most]
        warm = [f"{what} {at} °C of {most:.0f}" for what, at, most in known if at >= most - margin]
        if hot:
            yield check.bad(_name(gpu), ", ".join(hot))
        elif warm:
            yield check.warn(_name(gpu), ", ".join(warm))
        elif known:
            yield check.ok(_name(gpu), ", ".join(f"{what} {at} °C" for what, at, _ in known))
        else:
            yield check.unknown(_name(gpu), "no sensor")


def clocks(check: Check, node: Node) -> Iterator[Finding]:
    """Against the GPU's own default, and against others of its model."""
    share = check.limit("share")
    for gpu in _answering(node):
        kind = [other for other in _answering(node) if other.name == gpu.name]
        pairs = [
            ("application clock", gpu.application_clock_mhz, gpu.default_clock_mhz, "MHz", 1),
            (
                "largest SM clock",
                gpu.sm_clock_max_mhz,
                max((o.sm_clock_max_mhz or 0 for o in kind), default=0),
                "MHz",
                1,
            ),
            ("power limit", gpu.power_limit_mw, gpu.power_default_mw, "W", 1000),
        ]
        known = [each for each in pairs if each[1] and each[2]]
        low = [
            f"{what} {value // scale} {unit}, not {usual // scale}"
            for what, value, usual, unit, scale in known
            if value is not None and usual is not None and value < usual * share
        ]
        if low:
            yield check.bad(_name(gpu), ", ".join(low))
        elif known:
            yield check.ok(_name(gpu), "as by default")
        else:
            yield check.unknown(_name(gpu), "the driver does not say")


def nvlink(check: Check, node: Node) -> Iterator[Finding]:
    """Links that are down, and errors that grow while one looks."""
    answering = list(_answering(node))
    boards = check.rates("boards")
    for gpu in answering:
        if gpu.links is None:
            yield check.unknown(_name(gpu), "no links, or the driver does not say")
            continue
        up = sum(gpu.links)
        most = max(sum(o.links or ()) for o in answering if o.name == gpu.name)
        down = [str(number) for number, is_up in enumerate(gpu.links) if not is_up]
        has = max((n for name, n in boards.items() if re.search(name, gpu.name or "")), default=0)
        grown = gpu.link_errors[-1] - gpu.link_errors[0] if gpu.link_errors else 0
        # Of cards, whose bridges are optional, each may have as many as somebody has put there.
        is_board = has or (gpu.fabric is not None and gpu.fabric.state == _FABRIC_COMPLETED)
        if up < most and is_board:
            yield check.bad(_name(gpu), f"{up} links up, others of its model {most}")
        elif up < has and up and is_virtual(node.files) and len(answering) < _BOARD:
            yield check.warn(_name(gpu), f"{up} of {has:.0f} links up: perhaps a part of a board")
        elif up < has and (up or (len(answering) > 1 and not _may_lack(node))):
            yield check.bad(_name(gpu), f"{up} of {has:.0f} links up; down: {some(down)}")
        elif 0 < up < most:
            yield check.warn(_name(gpu), f"{up} links up, others of its model {most}")
        elif not up:
            yield check.unknown(_name(gpu), "no link is up; it may have no bridge")
        elif grown > 0:
            yield check.warn(_name(gpu), f"{up} links up, {grown} errors meanwhile")
        else:
            yield check.ok(_name(gpu), f"{up} links up")


def fabric(check: Check, node: Node) -> Iterator[Finding]:
    """Registration of each GPU, and whether all are in one clique."""
    known = [(gpu, gpu.fabric) for gpu in _answering(node) if gpu.fabric is not None]
    cliques = defaultdict(list)
    for gpu, info in known:
        if info.state == _FABRIC_NONE:
            yield check.ok(_name(gpu), "no fabric")
            continue
        bad = _fabric_problem(info)
        if bad:
            yield check.bad(_name(gpu), bad)
        else:
            cliques[info.cluster, info.clique].append(gpu)
            yield check.ok(_name(gpu), f"registered, clique {info.clique}")
    if len(cliques) > 1:
        said = [
            f"clique {clique} of {cluster[:8]}: GPU {','.join(str(g.index) for g in members)}"
            for (cluster, clique), members in cliques.items()
        ]
        yield check.bad(HOST, some(said))
    for gpu in _answering(node):
        if gpu.fabric is None:
            yield check.unknown(_name(gpu), "the driver does not say")


def fabric_manager(check: Check, node: Node) -> Iterator[Finding]:
    """Only where this host has the switches: in a virtual machine the hypervisor may have them."""
    files = node.files
    switches = _switches(node)
    # Those of Blackwell boards are managed over InfiniBand, by a subnet manager of their own.
    managed = [each.name for each in ports(node) if each.is_of_switch]
    if not (switches or managed) or not node.gpus:
        return
    said = [files.text("var/log/fabricmanager.log"), *(t for _, t in files.matching("dpkg/.*"))]
    versions = sorted({v for v in said if v and re.fullmatch(r"\d+\.\d+(\.\d+)*", v)})
    version = _loaded_version(node) or node.driver.version
    is_seen = sees_host(node)
    has = f"{len(switches or managed)} NVSwitch{' ports' if managed else 'es'}"
    # The kernel cuts names after 15 letters.
    if is_seen and not _runs(node, "nv-fabricmanage"):
        yield check.bad(HOST, f"{has}, and it does not run", "stopped")
    elif is_seen and managed and not _runs(node, "nvlsm"):
        # What is registered goes on; a GPU or a link that starts again does not come back.
        yield check.warn(HOST, f"{has}, and their subnet manager nvlsm does not run", "subnet")
    elif version and versions and version not in versions:
        yield check.bad(HOST, f"{', '.join(versions)}, the driver {version}")
    elif version and version in versions:
        yield check.ok(HOST, version)
    else:
        yield check.unknown(HOST, "its version is not to be seen")


def persistence(check: Check, node: Node) -> Iterator[Finding]:
    """Whether the driver keeps the GPU initialised."""
    for gpu in _answering(node):
        if gpu.persistence is None:
            yield check.unknown(_name(gpu), "the driver does not say")
        elif gpu.persistence:
            yield check.ok(_name(gpu), "on")
        else:
            yield check.bad(_name(gpu), "off")


def processes(check: Check, node: Node) -> Iterator[Finding]:
    """Who is there, and memory that nobody seems to hold."""
    for gpu in _answering(node):
        used, total = gpu.memory_used_bytes, gpu.memory_total_bytes
        is_full = bool(used and total and used > total * check.limit("share"))
        if gpu.processes:
            pids = some([str(pid) for pid in gpu.processes])
            yield check.bad(_name(gpu), f"{len(gpu.processes)} processes: {pids}")
        elif is_full and used and total:
            yield check.bad(_name(gpu), f"{size(used)} of {size(total)} in use")
        elif gpu.processes is None:
            yield check.unknown(_name(gpu), "processes are not to be seen")
        else:
            yield check.ok(_name(gpu), "nobody")


def pcie(check: Check, node: Node) -> Iterator[Finding]:
    """Lanes; the kernel says at boot where a slot gives fewer than the device has."""
    narrow = {}
    for line in node.log.lines:
        if (match := _NARROW.search(line.text)) and int(match[2]) < int(match[3]):
            narrow[match[1]] = f"x{match[2]} of x{match[3]} by the kernel log"
    boards, on_chip = check.words("boards"), "|".join(check.words("on_chip"))
    for gpu in _answering(node):
        width, most = gpu.pcie_width, gpu.pcie_width_max
        alike = [o.pcie_width or 0 for o in _answering(node) if o.name == gpu.name]
        if width and most and width < most:
            said = f"x{width} of x{most}"
            wider = sum(each > width for each in alike)
            is_odd = wider >= max(_SLOTS, _SLOT_SHARE * len(alike))
            if is_odd or any(re.search(name, gpu.name or "") for name in boards):
                yield check.bad(_name(gpu), said)
            elif not wider and (is_virtual(node.files) or re.search(on_chip, gpu.name or "")):
                yield check.unknown(_name(gpu), f"{said}, as all of its model here show")
            else:  # a slot, or two that share the lanes of one
                yield check.warn(_name(gpu), f"{said}; perhaps its slot has no more")
        elif gpu.pci in narrow and not is_virtual(node.files):
            yield check.warn(_name(gpu), narrow[gpu.pci])
        elif width and most:
            yield check.ok(_name(gpu), f"x{width}")
        else:
            yield check.unknown(_name(gpu), "no PCIe data")


RULES: Mapping[str, Rule] = {
    "gpu.driver": driver,
    "gpu.count": count,
    "gpu.lost": lost,
    "gpu.recovery": recovery,
    "gpu.ecc": ecc,
    "gpu.ecc-mode": ecc_mode,
    "gpu.rows": rows,
    "gpu.xid": xid,
    "gpu.throttle": throttle,
    "gpu.temperature": temperature,
    "gpu.clocks": clocks,
    "gpu.nvlink": nvlink,
    "gpu.fabric": fabric,
    "gpu.fabric-manager": fabric_manager,
    "gpu.persistence": persistence,
    "gpu.processes": processes,
    "gpu.pcie": pcie,
}


def _answering(node: Node) -> Iterator[Gpu]:
    return (gpu for gpu in node.gpus if gpu.lost is None)


def _switches(node: Node) -> list[str]:
    """The NVSwitches that the driver has."""
    return node.files.names("proc/driver/nvidia-nvswitch/devices") or [
        path for path, _ in node.files.matching(r"dev/nvidia-nvswitch\d+")
    ]


def _runs(node: Node, name: str) -> bool:
    return any(each.name.startswith(name) for each in node.host.processes or ())


def _name(gpu: Gpu) -> str:
    return f"GPU {gpu.index}"


def _by_pci(node: Node, address: str) -> str:
    """The GPU at a PCI address as the driver's log writes it, with or without the function."""
    wanted = address.lower().partition(".")[0]
    for gpu in node.gpus:
        if wanted and (gpu.pci or "").startswith(f"{wanted}."):
            return _name(gpu)
    return f"{_PCI_PLACE}{wanted}" if wanted else HOST


def _loaded_version(node: Node) -> str | None:
    """The version of the driver's kernel module."""
    text = node.files.text("proc/driver/nvidia/version") or ""
    match = re.search(r"NVRM version:.*?(\d+\.\d+(?:\.\d+)*)\s", f"{text} ")
    return match[1] if match else node.files.text("sys/module/nvidia/version") or None


def _bound(node: Node) -> bool:
    """Whether a PCI function is in the driver's hands."""
    found = node.files.matching(r"sys/bus/pci/devices/[^/]+/driver")
    return any((text or "").endswith("/nvidia") for _, text in found)


def _has_no_driver(node: Node) -> bool:
    """Whether nothing shows a driver where one would show: its module, devices, PCI functions.

    Without NVML alone a job may find its GPUs: a container can be given CUDA's library only.
    """
    shown = node.files.matching(r"dev/(?:nvidia.*|dxg)")  # dxg: Linux within Windows
    is_read = "proc/meminfo" in node.files
    return is_read and _loaded_version(node) is None and not _bound(node) and not any(shown)


def _on_bus(node: Node) -> int:
    """How many GPUs of NVIDIA PCI has."""
    vendors = node.files.matching(r"sys/bus/pci/devices/[^/]+/vendor")
    of_nvidia = [path.removesuffix("vendor") for path, text in vendors if text == "0x10de"]
    classes = [node.files.text(f"{path}class") or "" for path in of_nvidia]
    return sum(each.startswith(("0x0300", "0x0302")) for each in classes)


def _may_be_of_others(node: Node, place: str) -> bool:
    """Whether a GPU that this job has not been given may be the one at ``place``."""
    everything = max(_on_bus(node), len(node.files.names("proc/driver/nvidia/gpus")))
    has_some = 0 < (node.driver.count or 0) < everything and not any(g.lost for g in node.gpus)
    may_have = _is_given_some(node) or in_container(node.files)
    return place.startswith(_PCI_PLACE) and has_some and may_have


def _is_given_some(node: Node) -> bool:
    """Whether this runs in a scheduler's job, which may see some of the GPUs only.

    Such as by ConstrainDevices in Slurm's cgroup.conf; the driver's list has all of them
    nevertheless.
    """
    own = node.files.text("proc/self/cgroup") or ""
    return any(word in own for word in _SCHEDULERS) or any(name in node.environ for name in _JOBS)


def _may_lack(node: Node) -> bool:
    """Whether GPUs of a board may have been handed out without their switches."""
    return is_virtual(node.files) or in_container(node.files)


def _fabric_problem(info: Fabric) -> str | None:
    if info.state == _FABRIC_NOT_STARTED:
        return "registration has not begun"
    if info.state == _FABRIC_IN_PROGRESS:
        return "registration is under way"
    if info.state == _FABRIC_COMPLETED and info.status != 0:
        return f"registration has failed (NVML error {info.status})"
    health = info.health or 0
    bad = [
        what
        for what, shift, width, values in _HEALTH
        if health >> shift & (1 << width) - 1 in values
    ]
    return ", ".join(bad) or None


def _reasons(bits: int) -> str:
    return ", ".join(name for bit, name in _REASONS.items() if bits & bit)
