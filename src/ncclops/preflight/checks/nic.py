"""Checks of RDMA ports, by what the kernel shows of them (``ports``). Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from ncclops.preflight.catalogue import Check
from ncclops.preflight.checks.counted import over
from ncclops.preflight.checks.look import HOST, Rule, in_container, some, uses_rdma
from ncclops.preflight.checks.ports import (
    EMPTY_GID,
    Port,
    by_kind,
    function_of,
    is_aside,
    is_meant_to_work,
    ports,
    selects,
    used,
)
from ncclops.preflight.model import Finding
from ncclops.preflight.readings import Node
from ncclops.whole_numbers import whole_number

_MODEL = ("vendor", "device")  # of a PCI function
_NUMBERS = ("class", *_MODEL)


def selector(check: Check, node: Node) -> Iterator[Finding]:
    """What ``NCCL_IB_HCA`` leaves of the ports."""
    chosen, setting = node.environ.get("NCCL_IB_HCA", ""), "no NCCL_IB_HCA"
    if chosen:
        setting = f"NCCL_IB_HCA={chosen}"
    everything, left = ports(node), used(node)
    unknown = [
        entry
        for entry in chosen.removeprefix("=").split(",")
        if entry and not chosen.startswith("^")
        if not any(
            selects("=" * chosen.startswith("=") + entry, p.nic.device, p.number)
            for p in everything
        )
    ]
    if everything and not left:
        yield _graver(check, node, HOST, f"{setting} leaves none of {len(everything)} ports")
    elif left and not any(each.is_active for each in left):
        said = f"none of {len(left)} ports is active, {setting}"
        yield check.bad(HOST, said) if node.needs.rdma else check.warn(HOST, said)
    elif left and unknown:
        yield check.warn(HOST, f"{setting} names {some(unknown)}, which is not here")
    elif left:
        yield check.ok(HOST, f"{len(left)} of {len(everything)} ports, {setting}")
    elif node.needs.rdma and "nics" not in node.late:
        yield check.bad(HOST, "no RDMA device")


def port(check: Check, node: Node) -> Iterator[Finding]:
    """Each port that the job may use."""
    kinds = by_kind(used(node))
    for address in _without_device(node, check.words("functions")):
        yield check.warn(f"PCI {address}", "an RDMA function that is no RDMA device", "no-device")
    for address, driver in _kept(node, check.words("keepers")).items():
        yield check.warn(f"PCI {address}", f"{driver} has it, of the model of RDMA devices", "kept")
    for each in used(node):
        state, alike = each.state, kinds[each.kind]
        phys = each.text("phys_state") or "?"
        what = "unmanaged" if each.is_unmanaged else "off" if "Disabled" in phys else ""
        what = "cloud" if each.is_efa else what
        if state is None:
            yield check.unknown(each.name, "its state cannot be read")
        elif each.is_active and each.is_efa and each.of_interface("operstate") == "down":
            yield _judged(check, node, each, f"{state}, but its interface is down", what="cloud")
        elif each.is_active and each.is_efa:
            yield check.unknown(each.name, "EFA says ACTIVE whatever the link does")
        elif each.is_active and each.is_ethernet and each.of_interface("operstate") == "down":
            # IP over InfiniBand may be off: RDMA does not need it.
            yield _judged(check, node, each, f"{state}, but its interface is down", what="off")
        elif each.is_active:
            yield check.ok(each.name, f"{state}, {phys}")
        elif is_meant_to_work(each, alike, node, check.limit("share")):
            yield _judged(check, node, each, f"{state}, {phys}", what=what)
        elif each.is_virtual:
            yield check.unknown(each.name, f"{state}, {phys}: a virtual function, perhaps spare")
        elif each.is_ethernet and _is_odd_layer(each, node, check.limit("share")):
            said = f"{state}, set to Ethernet; others of its board are InfiniBand"
            yield check.warn(each.name, said, "layer")
        elif "Disabled" in phys:
            yield check.unknown(each.name, f"{state}, {phys}: switched off, so perhaps not used")
        else:
            yield check.warn(each.name, f"{state}, {phys}; perhaps not meant to be used", what)


def rate(check: Check, node: Node) -> Iterator[Finding]:
    """Against its kind, and what the lane needs."""
    active = [each for each in used(node) if each.is_active]
    kinds = by_kind(active)
    wanted, fast = node.needs.rdma_gbps, 0
    if wanted is not None:
        fast = sum((each.rate_gbps or 0) >= wanted for each in active)
    for each in active:
        speed, text = each.rate_gbps, each.text("rate") or ""
        speeds = [o.rate_gbps for o in kinds[each.kind] if o.rate_gbps is not None]
        usual = _usual(speeds)
        if speed is None:
            yield check.unknown(each.name, "the driver does not say")
        elif wanted is not None and speed < wanted:
            said = f"{text}, and the lane needs {wanted} Gb/s"
            if is_aside(each, node) and speed == usual and fast >= (node.needs.rdma_ports or 1):
                yield check.ok(each.name, f"{text}, of another network than the lane's")
            else:
                yield _judged(check, node, each, said)
        elif usual is not None and speed < usual:
            said = f"{text}, others of its kind {usual:g} Gb/s"
            # Of two that differ each may be as it is meant to be: two networks on one card.
            is_odd = speeds.count(usual) > max(1, len(speeds) // 2)
            yield _judged(check, node, each, said) if is_odd else check.warn(each.name, said)
        else:
            yield check.ok(each.name, text)


def number(check: Check, node: Node) -> Iterator[Finding]:
    """Only where the lane says how many."""
    wanted = node.needs.rdma_ports
    if wanted is None:
        return
    least = node.needs.rdma_gbps or 0
    active = sum(each.is_active and (each.rate_gbps or least) >= least for each in used(node))
    fast = f" with {least} Gb/s" if least else ""
    said = f"{active} active{fast}, and the lane needs {wanted}"
    yield check.ok(HOST, said) if active >= wanted else check.bad(HOST, said)


def gid(check: Check, node: Node) -> Iterator[Finding]:
    """Active RoCE ports; InfiniBand needs none of a type."""
    index = node.environ.get("NCCL_IB_GID_INDEX", "")
    active = [each for each in used(node) if each.is_ethernet and each.is_active]
    kinds = by_kind(active)
    for each in active:
        top = f"{each.top}/gid_attrs/types"
        types = {name: each.nic.files.text(f"{top}/{name}") for name in each.nic.files.names(top)}
        if not any(types.values()):
            if f"{top}" in each.nic.files or types:
                if is_aside(each, node):
                    yield check.unknown(each.name, "no address; perhaps not meant for the job")
                else:
                    yield _judged(check, node, each, "no address")
            else:
                yield check.unknown(each.name, "the driver shows no types")
            continue
        strange = [text for text in types.values() if text and "RoCE v" not in text]
        if strange or any(not types.get(n) for n in each.taken_gids):
            yield check.unknown(each.name, "the types of some addresses cannot be read")
            continue
        v2 = sorted(int(n) for n, t in types.items() if t and "v2" in t and n.isdecimal())
        if not v2:
            yield _judged(check, node, each, "no address of type RoCE v2")
        elif (number := whole_number(index)) is not None and number not in v2:
            said = types.get(index) or "nothing"
            yield _judged(check, node, each, f"NCCL_IB_GID_INDEX={index} is {said}")
        elif number is not None and each.text(f"gids/{index}") == EMPTY_GID:
            yield _judged(check, node, each, f"NCCL_IB_GID_INDEX={index} is empty")
        elif number is None and not each.has_address:
            alike = kinds[each.kind]
            have = sum(other.has_address for other in alike)
            said = "RoCE v2 of the link alone, no IP address; others of its kind have one"
            if have > max(1, len(alike) // 2):
                yield _judged(check, node, each, said)
            else:
                yield check.ok(each.name, "RoCE v2 of the link alone")
        else:
            yield check.ok(each.name, f"RoCE v2 at {', '.join(map(str, v2[:3]))}")


def counters(check: Check, node: Node) -> Iterator[Finding]:
    """What has grown between two looks, and what has come together since boot."""
    fatal, rare, uptime_s = check.words("none"), check.rates("fail_per_s"), _uptime_s(node)
    for each in used(node):
        now = each.counts(each.nic.samples[-1]) if each.nic.samples else {}
        if not now:
            yield check.unknown(each.name, "no counter can be read")
            continue
        before = each.counts(each.nic.samples[0])
        seconds = each.nic.window_s
        grown = {name: n - before[name] for name, n in now.items() if n > before.get(name, n)}
        bad = [f"{name} +{n}" for name, n in grown.items() if name in fatal]
        bad += over(grown, rare, seconds)
        odd = over(grown, check.rates("warn_per_s"), seconds)
        odd += [f"{name} +{n}" for name, n in grown.items() if name in rare]
        if (flaps := now.get("link_downed", 0)) >= check.limit("flaps"):
            odd.append(f"link_downed {flaps} since the driver was loaded")
        if uptime_s:
            odd += [f"{what} since boot" for what in over(now, rare, uptime_s)]
        odd += [
            f"{name} {now[name]} since the driver was loaded"
            for name, least in check.rates("since_load").items()
            if now.get(name, 0) >= least and not any(name in said for said in odd)
        ]
        peers = check.words("of_peers")
        what = "cloud" if each.is_efa else ""
        if all(said.startswith(peers) for said in bad or odd):
            what = "peer"
        if bad:
            said = f"{', '.join(bad)} in {seconds:.1f} s"
            yield _judged(check, node, each, said, what=what)
        elif odd:
            yield check.warn(each.name, ", ".join(odd), what)
        else:
            yield check.ok(each.name, f"{len(now)} counters, {seconds:.1f} s")


def carrier(check: Check, node: Node) -> Iterator[Finding]:
    """Changes while one looks."""
    for each in used(node):
        if len(each.nic.samples) < 2 or len(each.interfaces()) != 1:
            continue
        place = f"{each.interfaces()[0]}/carrier_changes"
        before, now = (sample.number(place) for sample in each.nic.samples)
        if before is None or now is None:
            continue
        if now > before:
            said = f"{now - before} changes in {each.nic.window_s:.1f} s"
            yield _judged(check, node, each, said)
        elif over({"lost": now // 2}, check.rates("per_s"), _uptime_s(node) or 0.0):
            yield check.warn(each.name, f"{now} changes since boot, none now")
        else:
            yield check.ok(each.name, f"{now} changes since boot, none now")


def bond(check: Check, node: Node) -> Iterator[Finding]:
    """The interfaces below a port's bond, where it has one."""
    found = [(each, members) for each in used(node) if (members := each.bond_members())]
    for each, members in found:
        down = sorted(name for name, state in members.items() if state not in ("up", "?"))
        alike = [m for other, m in found if other.kind == each.kind]
        whole = sum(all(state in ("up", "?") for state in m.values()) for m in alike)
        said = f"{some(down)} of {len(members)} members down"
        if (taken := max(map(len, alike)) - len(members)) and not down:
            # One that was taken out is not there at all; most of the others have theirs.
            whole = sum(len(m) > len(members) for m in alike)
            said = (
                f"{len(members)} of {len(members) + taken} members, which others of its kind have"
            )
        mode = each.nic.files.text(f"{each.interfaces()[0]}/master/bonding/mode") or ""
        if not down and not taken:
            yield check.ok(each.name, f"{len(members)} members up")
        elif whole > len(alike) // 2 and not mode.startswith(check.words("spare")):
            yield _judged(check, node, each, said)
        else:
            # One cable may be all that is meant, or the other is there to take over.
            yield check.warn(each.name, said)


def mtu(check: Check, node: Node) -> Iterator[Finding]:
    """Active RoCE ports of one kind."""
    found = [
        (each, size)
        for each in used(node)
        if each.is_active and (size := whole_number(each.of_interface("mtu") or ""))
    ]
    kinds = Counter(each.kind for each, _ in found)
    for each, size in found:
        usual = _usual([n for other, n in found if other.kind == each.kind])
        if kinds[each.kind] > 1 and usual is not None and size != usual:
            yield check.bad(each.name, f"{size}, others of its kind {usual:g}")
        else:
            yield check.ok(each.name, str(size))


def verbs(check: Check, node: Node) -> Iterator[Finding]:
    """The file that a process opens to use the device."""
    for nic in {each.nic.device: each.nic for each in used(node)}.values():
        top = "sys/class/infiniband_verbs"
        mine = [n for n in nic.files.names(top) if nic.files.text(f"{top}/{n}/ibdev") == nic.device]
        files = nic.files.names("dev/infiniband")
        if not nic.files.names(top):
            if node.real and not files:
                yield _graver(check, node, nic.device, "no uverbs device at all")
            else:
                yield check.unknown(nic.device, "/sys/class/infiniband_verbs is not to be seen")
        elif not mine and not all(nic.files.text(f"{top}/{n}/ibdev") for n in nic.files.names(top)):
            yield check.unknown(nic.device, "/sys/class/infiniband_verbs cannot be read")
        elif not mine:
            yield _graver(check, node, nic.device, "no uverbs device")
        elif mine[0] in files:
            yield check.ok(nic.device, mine[0])
        elif files and in_container(node.files):
            yield check.warn(nic.device, f"/dev/infiniband/{mine[0]} is not in this container")
        elif files or node.real:
            yield _graver(check, node, nic.device, f"/dev/infiniband/{mine[0]} is not there")
        else:
            yield check.unknown(nic.device, "/dev/infiniband is not to be seen")


def umad(check: Check, node: Node) -> Iterator[Finding]:
    """InfiniBand only."""
    for each in used(node):
        if each.layer != "InfiniBand":
            continue
        top, files = "sys/class/infiniband_mad", each.nic.files
        found = [
            name
            for name in files.names(top)
            if files.text(f"{top}/{name}/ibdev") == each.nic.device
            and files.text(f"{top}/{name}/port") == each.number
        ]
        if found:
            yield check.ok(each.name, found[0])
        elif files.names(top):
            yield check.bad(each.name, "none")
        else:
            yield check.unknown(each.name, "/sys/class/infiniband_mad is not to be seen")


def pcie(check: Check, node: Node) -> Iterator[Finding]:
    """Against what card and slot can do; where the slot is not to be seen, against its kind."""
    known = []
    for each in {p.nic.device: p for p in used(node)}.values():
        width, most = (each.width(name) for name in ("current_link_width", "max_link_width"))
        if width is None or most is None:
            yield check.unknown(each.nic.device, "no PCIe data")
        else:
            known.append((each, width, most))
    for each, width, most in known:
        device, alike = each.nic.device, [o for o, *_ in known if o.kind == each.kind]
        widths = [w for other, w, _ in known if other.kind == each.kind]
        speeds = [speed for other in alike if (speed := other.lane_gtps())]
        usual, fastest = max(widths), max(speeds, default=0.0)
        speed, slot_width = each.lane_gtps(), each.width("../max_link_width")
        slot_speed = each.lane_gtps("../max_link_speed")
        is_slow = 0 < speed < fastest
        here, there = f"x{width}", f"x{usual}"
        if is_slow:
            here += f" at {speed:g} GT/s"
            there += f" at {fastest:g} GT/s"
        if slot_width and (width < min(most, slot_width) or (is_slow and speed < slot_speed)):
            able = f"x{min(most, slot_width)}"
            able += f" at {min(fastest, slot_speed):g} GT/s" if is_slow and slot_speed else ""
            yield _judged(check, node, each, f"{here}, card and slot can do {able}", device)
        elif width < usual or is_slow:
            # Of few that differ each may be in the slot that is meant for it.
            many = speeds.count(fastest) if is_slow else widths.count(usual)
            is_odd = many > 1 and many >= check.limit("share") * len(alike) and not slot_width
            said = f"{here}, others of its kind {there}"
            if is_odd:
                yield _judged(check, node, each, said, device)
            else:
                yield check.warn(device, f"{said}; perhaps its slot has no more", "slot")
        elif width < most:
            said, carried = f"x{width} of x{most}", _carried_gbps(width, speed)
            wanted = sum(
                other.rate_gbps or 0
                for other in used(node)
                if other.is_active and _card_of(other) == _card_of(each)
            )
            if slot_width and carried >= wanted:
                yield check.ok(device, f"{said}, as its slot: enough for {wanted:g} Gb/s")
            else:
                less = f": {carried:.0f} Gb/s, its ports {wanted:g}" if carried else ""
                yield check.warn(device, f"{said}, like others of its kind{less}", "slot")
        else:
            yield check.ok(device, f"x{width}")


RULES: Mapping[str, Rule] = {
    "nic.selector": selector,
    "nic.port": port,
    "nic.rate": rate,
    "nic.ports": number,
    "nic.gid": gid,
    "nic.counters": counters,
    "nic.carrier": carrier,
    "nic.bond": bond,
    "nic.mtu": mtu,
    "nic.verbs": verbs,
    "nic.umad": umad,
    "nic.pcie": pcie,
}


def _carried_gbps(width: int, lane_gtps: float) -> float:
    """What a PCIe link carries: of 10 bits 8 up to the second generation, then of 130 bits 128."""
    return width * lane_gtps * (0.8 if lane_gtps < 8 else 128 / 130)


def _card_of(port: Port) -> str:
    """The PCI functions of one card have one address but for the last digit."""
    return port.function.partition(".")[0] or port.nic.device


def _without_device(node: Node, kinds: Sequence[str]) -> list[str]:
    """PCI functions for RDMA alone that have no device, as after a start of theirs that failed.

    ``kinds``: how their class, vendor, device and driver begin; one without a driver is of any.
    """
    known = _functions(node)
    top = "sys/bus/pci/devices"
    # Without any device, the job of one host has no use for them, and that of many hosts may.
    is_asked = bool(known) or (node.needs.nodes == "many" and node.needs.rdma is not False)
    if not is_asked or "nics" in node.late or "" in known or in_container(node.files):
        return []  # a container has its own

    def numbers_of(name: str) -> list[str]:
        return [node.files.text(f"{top}/{name}/{each}") or "" for each in _NUMBERS[1:]]

    models = [numbers_of(name) for name in known]

    def is_like_others(name: str) -> bool:
        """Of the model of several devices, and no driver has started it."""
        has_driver = bool(node.files.text(f"{top}/{name}/driver"))
        return not has_driver and models.count(numbers_of(name)) > 1

    def is_of(kind: str, name: str) -> bool:
        *numbers, driver = kind.split()
        shown = (node.files.text(f"{top}/{name}/{each}") or "" for each in _NUMBERS)
        found = (node.files.text(f"{top}/{name}/driver") or driver).rpartition("/")[2]
        is_kind = all(n in ("*", text[: len(n)]) for n, text in zip(numbers, shown, strict=True))
        return is_kind and found == driver

    return [
        name
        for name in node.files.names(top)
        if name not in known and f"{top}/{name}/physfn" not in node.files
        if is_like_others(name) or any(is_of(kind, name) for kind in kinds)
    ]


def _kept(node: Node, keepers: Collection[str]) -> dict[str, str]:
    """Functions of the model of several RDMA devices that a driver keeps for something else."""
    top, files = "sys/bus/pci/devices", node.files
    if in_container(files):
        return {}

    def model(name: str) -> tuple[str | None, ...]:
        return tuple(files.text(f"{top}/{name}/{each}") for each in _MODEL)

    models = [model(name) for name in _functions(node)]
    held = {
        name: (files.text(f"{top}/{name}/driver") or "").rpartition("/")[2]
        for name in files.names(top)
        if f"{top}/{name}/physfn" not in files and None not in model(name)
    }
    return {n: by for n, by in held.items() if by in keepers and models.count(model(n)) > 1}


def _functions(node: Node) -> list[str]:
    """The PCI functions of the RDMA devices, each once."""
    return list(dict.fromkeys(map(function_of, node.nics)))


def _is_odd_layer(port: Port, node: Node, share: float) -> bool:
    """Whether nearly all ports of its board are InfiniBand: its adapter was replaced, or reset."""
    board = port.device("board_id")
    alike = [each.layer for each in used(node) if each.device("board_id") == board]
    return bool(board) and alike.count("InfiniBand") >= share * len(alike)


def _graver(check: Check, node: Node, subject: str, read: str, what: str = "") -> Finding:
    """As grave as the catalogue has it; a warning where the lane makes no use of the ports."""
    return (check.bad if uses_rdma(node) else check.warn)(subject, read, what)


def _judged(
    check: Check, node: Node, port: Port, read: str, subject: str = "", *, what: str = ""
) -> Finding:
    """Likewise of one port; a warning also for one that the job may have no use for."""
    if is_aside(port, node):
        return check.warn(subject or port.name, f"{read}; perhaps not meant for the job", what)
    return _graver(check, node, subject or port.name, read, what)


def _usual(values: Sequence[float]) -> float | None:
    """The largest of the most frequent values."""
    counts = Counter(values)
    return max(counts, key=lambda value: (counts[value], value), default=None)


def _uptime_s(node: Node) -> float | None:
    try:
        return float((node.files.text("proc/uptime") or "").split()[0])
    except (IndexError, ValueError):
        return None
