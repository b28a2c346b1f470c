"""Checks of GPUs, by what NVML, the driver and the kernel log say. Pure."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

from ncclops.host.nvml import Recovery
from ncclops.preflight.catalogue import Check
from ncclops.preflight.checks.gpu_facts import (
    answering_gpus,
    count_on_bus,
    has_no_driver,
    is_bound,
    is_given_some,
    loaded_version,
    may_lack_switches,
    name_of,
    nvswitches,
    runs,
    without_file,
)
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
from ncclops.preflight.readings import Fabric, Node

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
_NARROW = re.compile(
    r"([0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.\d): .*available PCIe bandwidth, limited by .*?"
    r" x(\d+) link at .*\(capable of .* x(\d+) link\)"
)


def driver(check: Check, node: Node) -> Iterator[Finding]:
    """Whether NVML starts, where there is something for it to start."""
    loaded = loaded_version(node)
    is_there = loaded is not None or bool(node.files.names("proc/driver/nvidia/gpus"))
    found = node.driver
    if found.problem is not None:
        # What is refused on a machine without the driver is usual; with it, nobody can use a GPU.
        if found.error in check.numbers("errors") and is_there:
            yield check.bad(HOST, found.problem)
        elif is_there or is_bound(node):
            yield check.unknown(HOST, found.problem)
        elif (
            has_no_driver(node) and not in_container(node.files) and (on_bus := count_on_bus(node))
        ):
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
    openable = listed - sum(place.startswith("PCI") for place in without_file(node))
    lost = f", {listed} in the driver's list" if listed else ""
    if found is None:
        if wanted and node.driver.problem is not None and not listed:
            if node.driver.error in check.numbers("errors") and has_no_driver(node):
                on_bus = count_on_bus(node)
                shown = f"{on_bus or 'no'} NVIDIA GPU{'' if on_bus == 1 else 's'}"
                why = f"no NVIDIA driver is loaded, and the lane needs {wanted}; PCI shows {shown}"
                yield check.bad(HOST, why)
            else:
                yield check.unknown(HOST, f"no NVML, and the lane needs {wanted}")
        return
    if wanted is not None and found < wanted:
        yield check.bad(HOST, f"{found}{lost}, and the lane needs {wanted}")
    elif listed > found and is_given_some(node):
        yield check.unknown(HOST, f"{found}{lost}; the job may have been given no more")
    elif openable > found and not in_container(node.files):
        yield check.bad(HOST, f"{found}{lost}")
    elif (
        nvswitches(node) and not is_virtual(node.files) and (on_bus := count_on_bus(node)) % _BOARD
    ):
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
            yield check.ok(name_of(gpu), "answers")
        elif gpu.error in check.numbers("errors"):
            yield check.bad(name_of(gpu), gpu.lost)
        else:
            yield check.unknown(name_of(gpu), gpu.lost)


def recovery(check: Check, node: Node) -> Iterator[Finding]:
    """What the driver asks for."""
    for gpu in answering_gpus(node):
        need = Recovery(gpu.recovery_action).need
        if gpu.recovery_action is None:
            yield check.unknown(name_of(gpu), "the driver does not say")
        elif need is not None:
            yield check.bad(name_of(gpu), need)
        else:
            yield check.ok(name_of(gpu), "none")


def ecc(check: Check, node: Node) -> Iterator[Finding]:
    """Counts since the driver was loaded."""
    for gpu in answering_gpus(node):
        counts = {
            "uncorrected": (gpu.ecc_uncorrected, 0.0),
            "uncorrected in SRAM": (gpu.sram_uncorrected, 0.0),
            "corrected in SRAM": (gpu.sram_corrected, check.limit("sram_corrected")),
            "corrected in DRAM": (gpu.dram_corrected, check.limit("dram_corrected")),
        }
        known = {name: value for name, (value, _) in counts.items() if value is not None}
        bad = [f"{n} {what}" for what, (n, most) in counts.items() if n is not None and n > most]
        if gpu.sram_exceeded:
            bad.append("the threshold of SRAM is exceeded")
        if bad:
            yield check.bad(name_of(gpu), ", ".join(bad), "sram" if gpu.sram_exceeded else "")
        elif known:
            yield check.ok(name_of(gpu), f"{sum(known.values())} errors")
        else:
            yield check.unknown(name_of(gpu), "the driver does not say")


def ecc_mode(check: Check, node: Node) -> Iterator[Finding]:
    """Where the GPU has it."""
    for gpu in answering_gpus(node):
        if gpu.ecc_enabled is None:
            yield check.unknown(name_of(gpu), "the driver does not say")
        elif gpu.ecc_enabled:
            yield check.ok(name_of(gpu), "on")
        elif any(re.search(name, gpu.name or "") for name in check.words("optional")):
            yield check.unknown(name_of(gpu), "off, as such cards come")
        else:
            yield check.bad(name_of(gpu), "off")


def rows(check: Check, node: Node) -> Iterator[Finding]:
    """Rows of memory that were, could not be, or are to be replaced."""
    for gpu in answering_gpus(node):
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
            yield check.bad(name_of(gpu), ", ".join(bad), what)
        elif gpu.rows_failed is None and gpu.rows_pending is None:
            yield check.unknown(name_of(gpu), "the driver does not say")
        else:
            yield check.ok(name_of(gpu), f"{gpu.rows_uncorrected or 0} remapped")


def throttle(check: Check, node: Node) -> Iterator[Finding]:
    """Reasons that stay are no moment."""
    bits = sum(check.numbers("bits"))
    for gpu in answering_gpus(node):
        samples = [s.reasons & bits for s in gpu.throttle if s.reasons is not None]
        if not samples:
            yield check.unknown(name_of(gpu), "the driver does not say")
            continue
        ever, always = 0, bits
        for each in samples:
            ever, always = ever | each, always & each
        if always:
            yield check.bad(name_of(gpu), _reasons(always))
        elif ever:
            yield check.warn(name_of(gpu), f"{_reasons(ever)}, for a moment")
        else:
            yield check.ok(name_of(gpu), "none")


def temperature(check: Check, node: Node) -> Iterator[Finding]:
    """The chip's and the memory's, against the GPU's own limits."""
    margin = check.limit("margin_c")
    for gpu in answering_gpus(node):
        sensors = [
            ("GPU", gpu.temperature_c, gpu.slowdown_c or check.limit("unknown_c")),
            ("memory", gpu.memory_temperature_c, gpu.memory_limit_c),
        ]
        # Some GPUs without a sensor for their memory report 0.
        known = [(what, at, most) for what, at, most in sensors if at and most]
        hot = [f"{what} {at} °C of {most:.0f}" for what, at, most in known if at >= most]
        warm = [f"{what} {at} °C of {most:.0f}" for what, at, most in known if at >= most - margin]
        if hot:
            yield check.bad(name_of(gpu), ", ".join(hot))
        elif warm:
            yield check.warn(name_of(gpu), ", ".join(warm))
        elif known:
            yield check.ok(name_of(gpu), ", ".join(f"{what} {at} °C" for what, at, _ in known))
        else:
            yield check.unknown(name_of(gpu), "no sensor")


def clocks(check: Check, node: Node) -> Iterator[Finding]:
    """Against the GPU's own default, and against others of its model."""
    share = check.limit("share")
    for gpu in answering_gpus(node):
        kind = [other for other in answering_gpus(node) if other.name == gpu.name]
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
            yield check.bad(name_of(gpu), ", ".join(low))
        elif known:
            yield check.ok(name_of(gpu), "as by default")
        else:
            yield check.unknown(name_of(gpu), "the driver does not say")


def nvlink(check: Check, node: Node) -> Iterator[Finding]:
    """Links that are down, and errors that grow while one looks."""
    answering = list(answering_gpus(node))
    boards = check.rates("boards")
    for gpu in answering:
        if gpu.links is None:
            yield check.unknown(name_of(gpu), "no links, or the driver does not say")
            continue
        up = sum(gpu.links)
        most = max(sum(o.links or ()) for o in answering if o.name == gpu.name)
        down = [str(number) for number, is_up in enumerate(gpu.links) if not is_up]
        has = max((n for name, n in boards.items() if re.search(name, gpu.name or "")), default=0)
        grown = gpu.link_errors[-1] - gpu.link_errors[0] if gpu.link_errors else 0
        # Of cards, whose bridges are optional, each may have as many as somebody has put there.
        is_board = has or (gpu.fabric is not None and gpu.fabric.state == _FABRIC_COMPLETED)
        if up < most and is_board:
            yield check.bad(name_of(gpu), f"{up} links up, others of its model {most}")
        elif up < has and up and is_virtual(node.files) and len(answering) < _BOARD:
            yield check.warn(name_of(gpu), f"{up} of {has:.0f} links up: perhaps a part of a board")
        elif up < has and (up or (len(answering) > 1 and not may_lack_switches(node))):
            yield check.bad(name_of(gpu), f"{up} of {has:.0f} links up; down: {some(down)}")
        elif 0 < up < most:
            yield check.warn(name_of(gpu), f"{up} links up, others of its model {most}")
        elif not up:
            yield check.unknown(name_of(gpu), "no link is up; it may have no bridge")
        elif grown > 0:
            yield check.warn(name_of(gpu), f"{up} links up, {grown} errors meanwhile")
        else:
            yield check.ok(name_of(gpu), f"{up} links up")


def fabric(check: Check, node: Node) -> Iterator[Finding]:
    """Registration of each GPU, and whether all are in one clique."""
    known = [(gpu, gpu.fabric) for gpu in answering_gpus(node) if gpu.fabric is not None]
    cliques = defaultdict(list)
    # GPUs of several hosts have a cluster, and their switches are in none of these.
    is_of_rack = any(info.cluster.strip("0") for _, info in known) and not _managed(node)
    where = "rack" if is_of_rack and not nvswitches(node) else ""
    # No registration begins or ends without it: one cause, of which the other check tells.
    waits = "stopped" if _lacks_manager(node) else where
    for gpu, info in known:
        if info.state == _FABRIC_NONE:
            yield check.ok(name_of(gpu), "no fabric")
            continue
        bad = _fabric_problem(info)
        if bad:
            is_waiting = info.state in (_FABRIC_NOT_STARTED, _FABRIC_IN_PROGRESS)
            yield check.bad(name_of(gpu), bad, waits if is_waiting else where)
        else:
            cliques[info.cluster, info.clique].append(gpu)
            yield check.ok(name_of(gpu), f"registered, clique {info.clique}")
    if len(cliques) > 1:
        said = [
            f"clique {clique} of {cluster[:8]}: GPU {','.join(str(g.index) for g in members)}"
            for (cluster, clique), members in cliques.items()
        ]
        yield check.bad(HOST, some(said), where)
    for gpu in answering_gpus(node):
        if gpu.fabric is None:
            yield check.unknown(name_of(gpu), "the driver does not say")


def fabric_manager(check: Check, node: Node) -> Iterator[Finding]:
    """Only where this host has the switches: in a virtual machine the hypervisor may have them."""
    files = node.files
    switches = nvswitches(node)
    managed = _managed(node)
    if not (switches or managed) or not node.gpus:
        return
    said = [files.text("var/log/fabricmanager.log"), *(t for _, t in files.matching("dpkg/.*"))]
    versions = sorted({v for v in said if v and re.fullmatch(r"\d+\.\d+(\.\d+)*", v)})
    version = loaded_version(node) or node.driver.version
    is_seen = sees_host(node)
    has = f"{len(switches or managed)} NVSwitch{' ports' if managed else 'es'}"
    if _lacks_manager(node):
        yield check.bad(HOST, f"{has}, and it does not run", "stopped")
    elif is_seen and managed and not runs(node, "nvlsm"):
        # What is registered goes on; a GPU or a link that starts again does not come back.
        yield check.warn(HOST, f"{has}, and their subnet manager nvlsm does not run", "subnet")
    elif version not in versions and node.driver.version in versions:
        # As NVML: the kernel has another module, which gpu.driver says.
        yield check.unknown(HOST, f"{node.driver.version} as NVML's, the kernel has {version}")
    elif version and versions and version not in versions:
        yield check.bad(HOST, f"{', '.join(versions)}, the driver {version}")
    elif version and version in versions:
        yield check.ok(HOST, version)
    else:
        yield check.unknown(HOST, "its version is not to be seen")


def persistence(check: Check, node: Node) -> Iterator[Finding]:
    """Whether the driver keeps the GPU initialised."""
    for gpu in answering_gpus(node):
        if gpu.persistence is None:
            yield check.unknown(name_of(gpu), "the driver does not say")
        elif gpu.persistence:
            yield check.ok(name_of(gpu), "on")
        else:
            yield check.bad(name_of(gpu), "off")


def processes(check: Check, node: Node) -> Iterator[Finding]:
    """Who is there, and memory that nobody seems to hold."""
    for gpu in answering_gpus(node):
        used, total = gpu.memory_used_bytes, gpu.memory_total_bytes
        is_full = bool(used and total and used > total * check.limit("share"))
        if gpu.processes:
            pids = some([str(pid) for pid in gpu.processes])
            count_of = len(gpu.processes)
            yield check.bad(name_of(gpu), f"{count_of} process{'es' * (count_of > 1)}: {pids}")
        elif is_full and used and total:
            yield check.bad(name_of(gpu), f"{size(used)} of {size(total)} in use")
        elif gpu.processes is None:
            yield check.unknown(name_of(gpu), "processes are not to be seen")
        else:
            yield check.ok(name_of(gpu), "nobody")


def pcie(check: Check, node: Node) -> Iterator[Finding]:
    """Lanes; the kernel says at boot where a slot gives fewer than the device has."""
    narrow = {}
    for line in node.log.lines:
        if (match := _NARROW.search(line.text)) and int(match[2]) < int(match[3]):
            narrow[match[1]] = f"x{match[2]} of x{match[3]} by the kernel log"
    boards, on_chip = check.words("boards"), "|".join(check.words("on_chip"))
    for gpu in answering_gpus(node):
        width, most = gpu.pcie_width, gpu.pcie_width_max
        alike = [o.pcie_width or 0 for o in answering_gpus(node) if o.name == gpu.name]
        if width and most and width < most:
            said = f"x{width} of x{most}"
            wider = sum(each > width for each in alike)
            is_odd = wider >= max(_SLOTS, _SLOT_SHARE * len(alike))
            if is_odd or any(re.search(name, gpu.name or "") for name in boards):
                yield check.bad(name_of(gpu), said)
            elif re.search(on_chip, gpu.name or ""):
                yield check.unknown(name_of(gpu), f"{said}; NVLink-C2C leads to its processor")
            elif not wider and is_virtual(node.files):
                yield check.unknown(name_of(gpu), f"{said}, as all of its model here show")
            else:  # a slot, or two that share the lanes of one
                yield check.warn(name_of(gpu), f"{said}; perhaps its slot has no more")
        elif gpu.pci in narrow and not is_virtual(node.files):
            yield check.warn(name_of(gpu), narrow[gpu.pci])
        elif width and most:
            yield check.ok(name_of(gpu), f"x{width}")
        else:
            yield check.unknown(name_of(gpu), "no PCIe data")


RULES: Mapping[str, Rule] = {
    "gpu.driver": driver,
    "gpu.count": count,
    "gpu.lost": lost,
    "gpu.recovery": recovery,
    "gpu.ecc": ecc,
    "gpu.ecc-mode": ecc_mode,
    "gpu.rows": rows,
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


def _lacks_manager(node: Node) -> bool:
    """Whether this host has switches, and no fabric manager runs."""
    has = bool(nvswitches(node) or _managed(node))
    # The kernel cuts names after 15 letters.
    return has and sees_host(node) and not runs(node, "nv-fabricmanage")


def _managed(node: Node) -> list[str]:
    """Ports to the switches of Blackwell boards, which a subnet manager of their own manages."""
    return [each.name for each in ports(node) if each.is_of_switch]


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
