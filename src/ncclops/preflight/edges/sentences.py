"""The verdict, for people: each cause as what happened, what shows it, and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ncclops.preflight.edges.model import Cause, Facts, Verdict

_HOW = {
    "timeout": "nothing came back: packets are dropped",
    "refused": "connections are refused (a reset came back)",
    "unreachable": "the kernel says that there is no way there",
    "forbidden": "this host's own firewall or routes forbid it",
    "reset": "connections are cut before the other host answers",
    "silent": "connections are accepted, and then nothing is answered",
    "foreign": "something else answers there",
    "other": "another host answers there",
}
_NAMED = 6
LEGEND = (
    ". passes   x dead   p ports   m large packets   l losses   b bandwidth   s slow   ? unknown"
)


@dataclass(frozen=True)
class Told:
    """One cause: ``what`` in one line, ``evidence`` and ``remedy`` below it."""

    severity: str
    kind: str
    what: str
    evidence: str
    remedy: str


def tell(verdict: Verdict) -> list[Told]:
    """All causes of ``verdict``, the worst first."""
    return [_tell(verdict.hosts, each) for each in verdict.causes]


def summary(verdict: Verdict) -> str:
    """One line for the whole."""
    hosts = f"{len(verdict.hosts)} of {verdict.expected} hosts, {verdict.edges} edges"
    if verdict.rtt_ms >= 0:
        hosts += f", usual round trip {verdict.rtt_ms:.2f} ms"
    unknown = f", {verdict.unknown_edges} not looked at" if verdict.unknown_edges else ""
    if verdict.failed_edges:
        return f"{hosts}: {verdict.failed_edges} fail{unknown}"
    return f"{hosts}: all that was tried passes{unknown}" if unknown else f"{hosts}: all pass"


def reason(verdict: Verdict) -> str:
    """The first cause in one line, as a scheduler shows it; empty where nothing failed."""
    failed = [each for each in verdict.causes if each.severity == "FAIL"]
    return _tell(verdict.hosts, failed[0]).what if failed else ""


def _tell(hosts: Sequence[Facts], cause: Cause) -> Told:
    what, remedy = _KINDS[cause.kind](hosts, cause)
    return Told(cause.severity, cause.kind, what, _evidence(hosts, cause), remedy)


# --- what a cause is about ------------------------------------------------------------------------


def _names(hosts: Sequence[Facts], numbers: Iterable[int]) -> str:
    listed = [hosts[each].name for each in numbers]
    rest = f" and {len(listed) - _NAMED} more" if len(listed) > _NAMED else ""
    return ", ".join(listed[:_NAMED]) + rest


def _edges(hosts: Sequence[Facts], cause: Cause) -> str:
    """The edges of a cause, as what connects to what."""
    a, b = _names(hosts, cause.a), _names(hosts, cause.b)
    if cause.shape == "everything":
        return "from every host to every other"
    if cause.shape == "host":
        return f"to and from {a}"
    if cause.shape == "host-in":
        return f"to {a} from every other host"
    if cause.shape == "host-out":
        return f"from {a} to every other host"
    if cause.shape == "several":
        return f"on {cause.edges} edges without a common shape (from {a} to {b})"
    if cause.a == cause.b:
        return f"among {a}"
    if len(cause.b) > len(cause.a) and {*cause.a} < {*cause.b}:
        b = "every other host" if len(cause.b) == len(hosts) else b
    if len(cause.a) > len(cause.b) and {*cause.b} < {*cause.a}:
        a = "every other host" if len(cause.a) == len(hosts) else a
    return f"between {a} and {b}" if cause.both_ways else f"from {a} to {b}"


def _unreachable(hosts: Sequence[Facts], cause: Cause) -> tuple[str, str]:
    way = _HOW.get(cause.how, "they fail")
    if "forbidding" in cause.facts:
        way = f"a firewall or a route of {cause.facts['forbidding']} itself forbids it"
    if "routeless" in cause.facts:
        way = f"{cause.facts['routeless']} has no route there"
    if "family_lacks" in cause.facts:
        way += f"; {cause.facts['whose']} has no IPv{cause.facts['family_lacks']} address"
    text = f"no connection passes {_edges(hosts, cause)}: {way}"
    if "ended" in cause.facts:
        return (
            f"{text}; the first ones have passed",
            "look there for a full table (dmesg: nf_conntrack: table full), for a rule that counts"
            " connections, and for a link or a route that has just gone",
        )
    if "family_lacks" in cause.facts:
        told = cause.facts
        remedy = f"give {told['whose']} an IPv{told['family_lacks']} address, as the others have"
        if "family" in told:
            inet = "AF_INET6" if told["family"] == "6" else "AF_INET"
            remedy += f", or set NCCL_SOCKET_FAMILY={inet} on all hosts"
        return text, remedy
    if "routeless" in cause.facts:
        return text, "look at the routes and the netmask of that host (ip route get ADDRESS)"
    if "at_mac" in cause.facts:
        told = cause.facts
        text += f"; {told['at']} sends to {told['at_mac']}, which is not {told['whose']}"
        return text, f"look at the neighbour table there (ip neigh show {told['address']})"
    if cause.how == "silent":
        return text, "look at what accepts connections there: a proxy, or a host that hangs"
    if cause.shape in ("host", "host-in", "host-out"):
        return text, "leave the host out; look at its link, its routes and its firewall"
    if cause.how == "refused":
        return text, "look for a firewall rule that rejects, on both ends and between"
    if "forbidding" in cause.facts:
        return text, "look at the routes and the firewall there (ip route get, nft list ruleset)"
    one_way = cause.shape == "edge" or (cause.shape == "group" and not cause.both_ways)
    if one_way and cause.how in ("timeout", "silent"):
        text += "; the other direction opens connections without trouble"
    return text, "look at firewall rules, security groups, VLANs and routes between them"


def _ports(hosts: Sequence[Facts], cause: Cause) -> tuple[str, str]:
    low, high = cause.blocked[0], cause.blocked[-1]
    below = [each for each in cause.open if each < low]
    above = [each for each in cause.open if each > high]
    inside = [each for each in cause.open if low < each < high]
    holes = (
        [each for each in cause.blocked if cause.open[0] < each < cause.open[-1]] if inside else []
    )
    if inside and not holes:
        only = f"ports {inside[0]} to {inside[-1]}" if inside[1:] else f"port {inside[0]}"
        shape = f"all ports but {only.removeprefix('ports ')}, of those that were tried,"
    elif inside:
        shape = (
            f"{len(cause.blocked)} of {len(cause.blocked) + len(cause.open)} ports, such as {low},"
        )
    elif above and not below:
        shape = f"ports up to {high} (the next that passes: {above[0]})"
    elif below and not above:
        shape = f"ports from {low} on (the last that passes: {below[-1]})"
    else:
        shape = f"ports {low} to {high}" if low != high else f"port {low}"
    how = _HOW.get(cause.how, "they fail")
    ranges = {hosts[each].port_range for each in (cause.b or cause.a)}
    wanted = " or ".join(f"{first}-{last}" for first, last in sorted(ranges)[:2])
    if "answers" in cause.facts:
        how += "; it keeps no state, so answers to what is opened from such a port are lost as well"
    return (
        f"a firewall's rule for ports {_edges(hosts, cause)}: {shape} fail: {how}",
        f"open the ports that the kernel gives to NCCL ({wanted},"
        " net.ipv4.ip_local_port_range) between these hosts, or set that range to what is open",
    )


def _store_port(hosts: Sequence[Facts], cause: Cause) -> tuple[str, str]:
    port = cause.blocked[0] if cause.blocked else 0
    return (
        f"port {port}, of torch's store, fails {_edges(hosts, cause)}; the ports that NCCL draws"
        " pass",
        "open it, or give the job another one (--master-port, --rdzv-endpoint)",
    )


def _mtu(hosts: Sequence[Facts], cause: Cause) -> tuple[str, str]:
    facts = cause.facts
    passes, lost = facts.get("passes"), facts.get("lost")
    sizes = f"packets of {lost} bytes are lost, {passes} pass" if passes and lost else ""
    if lost and not passes:
        sizes = f"packets of {lost} bytes are lost already"
    told = f" ({sizes})" if sizes else ""
    mtu = facts.get("mtu", "?")
    return (
        f"large packets are lost without notice {_edges(hosts, cause)}{told}; the interfaces are"
        f" set to {mtu}",
        f"set the MTU of what is between them to {mtu} or more, or that of the hosts to"
        f' {passes or "what passes"}; and let ICMP "fragmentation needed" pass',
    )


def _loss(hosts: Sequence[Facts], cause: Cause) -> tuple[str, str]:
    facts, where = cause.facts, f"at random {_edges(hosts, cause)}"
    if facts.get("way") == "unknown":
        where += " (which way cannot be told)"
        if facts.get("resent", "0") != "0":
            where = where[:-1] + (
                ": only what opens connections, as where a host's own firewall drops what it sends)"
            )
    failed = f"{facts.get('lost')} of {facts.get('tried')}"
    what = f"connections fail {where}: {failed} failed, and passed when they were repeated"
    if facts.get("resent", "0") != "0":
        again = f"{facts['resent']} of {facts.get('sent')} had to be sent again"
        what = f"packets are lost {where}: {again}; {failed} connections failed"
    return (
        what,
        "look for loss on the way (ethtool -S, ip -s link), and for rules that count connections",
    )


def _bandwidth(hosts: Sequence[Facts], cause: Cause) -> tuple[str, str]:
    facts = cause.facts
    return (
        f"{facts.get('mbit')} Mbit/s over TCP {_edges(hosts, cause)}; usual here, for as little"
        f" data: {facts.get('usual_mbit')} Mbit/s",
        "look at the link's speed there (ethtool), for a shaper (tc qdisc) and for losses",
    )


def _slow(hosts: Sequence[Facts], cause: Cause) -> tuple[str, str]:
    facts = cause.facts
    return (
        f"round trips of {facts.get('ms')} ms {_edges(hosts, cause)}; usual here:"
        f" {facts.get('usual_ms')} ms",
        "look for a detour, a queue or a shaper on that way",
    )


def _duplicate_address(hosts: Sequence[Facts], cause: Cause) -> tuple[str, str]:
    facts, address = cause.facts, cause.facts.get("address", "")
    whose = facts.get("whose") or _names(hosts, cause.a)
    if "their_mac" in facts:
        what = (
            f"another machine has the address {address} of {whose}:"
            f" {facts['their_mac']} answers for it, the host has {facts.get('mac')}"
        )
    elif "other" in facts:
        what = f"{facts['other']} answers at {address}, the address of {whose}"
    else:
        what = f"{_names(hosts, cause.a)} have the same address, {address}"
    return what, "give each host an address of its own"


def _everywhere(hosts: Sequence[Facts], cause: Cause) -> tuple[str, str]:
    address = cause.facts.get("address")
    places = (place for each in hosts if (place := each.place) and place.address == address)
    interface = next((each.interface for each in places), "?")
    return (
        f"NCCL would listen on {interface} of {cause.facts.get('whose')}, whose address {address}"
        f" other hosts have as well ({cause.facts.get('everywhere')})",
        "set NCCL_SOCKET_IFNAME to the interface that leads to the other hosts, or to"
        f" ^{interface}",
    )


def _wrong_interface(hosts: Sequence[Facts], cause: Cause) -> tuple[str, str]:  # noqa: ARG001
    facts = cause.facts
    remedy = f"set NCCL_SOCKET_IFNAME={facts['better']} there"
    if "family" in facts:
        remedy = f"set NCCL_SOCKET_FAMILY=AF_INET{'6' if facts['family'] == '6' else ''} there"
    return (
        f"NCCL would listen on {facts['interface']} ({facts['address']}, {facts['rule']}) of"
        f" {facts['whose']}; the other hosts are in {facts['subnet']}, where it has"
        f" {facts['better']} ({facts['better_address']})",
        remedy,
    )


def _interface_missing(hosts: Sequence[Facts], cause: Cause) -> tuple[str, str]:
    facts, whose = cause.facts, _names(hosts, cause.a)
    remedy = f"bring {facts['theirs']} up on {whose}"
    if "common" in facts:
        remedy += f", or set NCCL_SOCKET_IFNAME={facts['common']} on all hosts"
    return (
        f"the other hosts listen on {facts['theirs']} in {facts['lacks']}, where {whose} has no"
        f" address: NCCL takes {facts['own']} there",
        remedy,
    )


def _files(hosts: Sequence[Facts], cause: Cause) -> tuple[str, str]:
    return (
        f"{_names(hosts, cause.a)} may open {cause.facts['files']} files, and preflight alone needs"
        f" {cause.facts['least']}",
        "raise the limit there (ulimit -n, LimitNOFILE): NCCL wants 131072",
    )


def _duplicate_mac(hosts: Sequence[Facts], cause: Cause) -> tuple[str, str]:
    return (
        f"{_names(hosts, cause.a)} have the same hardware address, {cause.facts['mac']}, in one"
        " network, and connections with them fail",
        "give each interface a hardware address of its own: it was cloned, or set by hand",
    )


def _duplicate_rdma(hosts: Sequence[Facts], cause: Cause) -> tuple[str, str]:
    return (
        f"RDMA ports of {_names(hosts, cause.a)} have the same address or GUID,"
        f" {cause.facts['values']}: what is sent to one may arrive at the other",
        "give each port of RoCE an address of its own (ip addr), and each of InfiniBand a GUID"
        " (mstflint -d DEVICE -guid GUID sg)",
    )


def _no_interface(hosts: Sequence[Facts], cause: Cause) -> tuple[str, str]:
    return (
        f"NCCL would find no interface to listen on, on {_names(hosts, cause.a)}"
        f" ({cause.facts.get('rule')})",
        "correct NCCL_SOCKET_IFNAME, NCCL_SOCKET_FAMILY or NCCL_COMM_ID, or bring the interface up",
    )


def _loopback(hosts: Sequence[Facts], cause: Cause) -> tuple[str, str]:
    return (
        f"NCCL would listen on the loopback of {_names(hosts, cause.a)}"
        f" ({cause.facts.get('address')}, {cause.facts.get('rule')}): no other host reaches it",
        "bring up an interface that leads to the other hosts, or name it in NCCL_SOCKET_IFNAME",
    )


def _silent(hosts: Sequence[Facts], cause: Cause) -> tuple[str, str]:
    return (
        f"{_names(hosts, cause.a)} came, and said nothing more",
        "look at that host: it hangs, was stopped, or lost its way to the meeting",
    )


def _late(hosts: Sequence[Facts], cause: Cause) -> tuple[str, str]:
    return (
        f"{_names(hosts, cause.a)} answers connections, and has not reported in time what it sees",
        "look whether that host is busy, and run it again; it is not left out for that",
    )


def _missing(hosts: Sequence[Facts], cause: Cause) -> tuple[str, str]:  # noqa: ARG001
    facts = cause.facts
    return (
        f"{facts['count']} of {facts['expected']} hosts came ({facts['came']}); missing:"
        f" {facts['names']}",
        "see what those hosts print: they were not started, or cannot reach the meeting",
    )


def _duplicate_name(hosts: Sequence[Facts], cause: Cause) -> tuple[str, str]:  # noqa: ARG001
    same = (
        "; they have one boot id as well, so NCCL takes them for one host"
        if "boot" in cause.facts
        else ""
    )
    return (
        f"{len(cause.a)} hosts have the name {cause.facts['name']}{same}",
        "give each host a name of its own",
    )


def _one_machine(hosts: Sequence[Facts], cause: Cause) -> tuple[str, str]:  # noqa: ARG001
    return (
        f"all {len(cause.a)} hosts have one name ({cause.facts['name']}) and one boot id: NCCL"
        " takes them for one host",
        "where they are containers of one machine, give each a host name, or NCCL_HOSTID",
    )


def _loopback_name(hosts: Sequence[Facts], cause: Cause) -> tuple[str, str]:
    return (
        f"the host name of {_names(hosts, cause.a)} stands for {cause.facts['address']} there, so"
        " Gloo would listen where no other host reaches it",
        "correct /etc/hosts, or set GLOO_SOCKET_IFNAME",
    )


def _name(hosts: Sequence[Facts], cause: Cause) -> tuple[str, str]:
    whose = cause.facts.get("whose")
    told = f", the address of {whose}" if whose else ", which is none of its addresses"
    return (
        f"the name {_names(hosts, cause.a)} stands for {cause.facts['address']} on"
        f" {_names(hosts, cause.b)}{told}",
        "correct /etc/hosts or DNS there",
    )


def _mtu_differs(hosts: Sequence[Facts], cause: Cause) -> tuple[str, str]:
    facts = cause.facts
    return (
        f"the MTU of {_names(hosts, cause.a)} is {facts['mtu']}; that of the others in"
        f" {facts['subnet']} is {facts['usual']}",
        "set one MTU on all: RDMA does not settle a difference, TCP does",
    )


_TRAITS = {
    "memory_mib": (
        "MiB of memory",
        "a memory module may have failed there (ipmitool sel list, dmidecode -t memory)",
    ),
    "gpus": ("GPUs on its PCI bus", "look for one that has fallen off the bus: dmesg, lspci"),
    "gpu_mib": ("MiB of memory on a GPU", "ncclops preflight there says which GPU it is"),
    "ports": ("active RDMA ports", "ncclops preflight there says which port it is"),
    "driver": ("as the driver's version", "install one version on all hosts"),
    "nccl": (
        "as NCCL's version",
        "install one version on all hosts: one container image, one venv",
    ),
}


def _differs(hosts: Sequence[Facts], cause: Cause) -> tuple[str, str]:
    facts = cause.facts
    what, remedy = _TRAITS[facts["what"]]
    who = _names(hosts, cause.a)
    return f"{who}: {facts['read']} {what}; nearly all others like it: {facts['usual']}", remedy


def _flaky(hosts: Sequence[Facts], cause: Cause) -> tuple[str, str]:
    way = "failed once and passed the second time"
    if "why" in cause.facts:
        way = "fail here and there, and there was no time to look why"
    return (
        f"connections from {_names(hosts, cause.a)} to {_names(hosts, cause.b)} {way}",
        "run preflight again; where it stays, look for loss on the way",
    )


def _collective(hosts: Sequence[Facts], cause: Cause) -> tuple[str, str]:
    facts, between = cause.facts, _pairs(hosts, cause)
    over = f"over {facts.get('backend', '').replace('gloo', 'Gloo').replace('nccl', 'NCCL')}"
    what = f"an all_reduce {between} {over} on {facts['ranks']} ranks"
    if cause.severity == "CANNOT-TELL":
        return f"{what} could not be tried", "see what those hosts print; run preflight again"
    remedy = "NCCL_DEBUG=INFO on both says where it stops, and which devices and protocol it takes"
    if facts.get("backend") == "gloo":
        remedy = "look at GLOO_SOCKET_IFNAME and the ports between them"
    if cause.shape == "host":
        remedy = f"leave the host out; {remedy}"
    return f"{what} fails", remedy


def _collective_bandwidth(hosts: Sequence[Facts], cause: Cause) -> tuple[str, str]:
    facts = cause.facts
    least = f"; {facts['least']} are usual for it" if facts.get("least", "0") != "0" else ""
    return (
        f"{facts['gbps']} GB/s in an all_reduce {_pairs(hosts, cause)}{least}, or twice as much"
        " between other hosts",
        "NCCL_DEBUG=INFO says which devices NCCL takes; look at the speed of their ports",
    )


def _pairs(hosts: Sequence[Facts], cause: Cause) -> str:
    a, b = _names(hosts, cause.a), _names(hosts, cause.b)
    if cause.shape == "host":
        return f"of {a} with each other host that it was tried with"
    return f"between {a} and {b}" if cause.shape == "pair" else f"of pairs among {a}"


_KINDS = {
    "collective": _collective,
    "collective-bandwidth": _collective_bandwidth,
    "unreachable": _unreachable,
    "ports": _ports,
    "store-port": _store_port,
    "mtu": _mtu,
    "loss": _loss,
    "bandwidth": _bandwidth,
    "slow": _slow,
    "duplicate-address": _duplicate_address,
    "address-everywhere": _everywhere,
    "wrong-interface": _wrong_interface,
    "interface-missing": _interface_missing,
    "duplicate-mac": _duplicate_mac,
    "duplicate-rdma": _duplicate_rdma,
    "files": _files,
    "no-interface": _no_interface,
    "loopback": _loopback,
    "silent": _silent,
    "late": _late,
    "missing": _missing,
    "duplicate-name": _duplicate_name,
    "one-machine": _one_machine,
    "loopback-name": _loopback_name,
    "name": _name,
    "mtu-differs": _mtu_differs,
    "differs": _differs,
    "flaky": _flaky,
}
KINDS = tuple(_KINDS)


def _evidence(hosts: Sequence[Facts], cause: Cause) -> str:
    parts = []
    if cause.edges:
        thing = "pair" if cause.symptom == "collective" else "edge"
        parts.append(f"{cause.edges} {thing}s" if cause.edges > 1 else f"1 {thing}")
    if cause.shape == "group" and cause.facts.get("by"):
        parts.append(f"they differ in {cause.facts['by']}")
    if cause.shape in ("host", "host-in", "host-out", "edge", "pair"):
        places = [place.address for each in (*cause.a, *cause.b) if (place := hosts[each].place)]
        parts.append((" to " if cause.shape == "edge" else ", ").join(places))
    parts += [cause.facts[each] for each in ("says", "leaves") if each in cause.facts]
    return "; ".join(filter(None, parts))
