"""Checks of what the ports of one node have to have in common, or must not have: firmware,
partitions, subnets. Pure."""

from __future__ import annotations

import ipaddress
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

from ncclops.preflight.catalogue import Check
from ncclops.preflight.checks.look import HOST, Rule, some, uses_rdma
from ncclops.preflight.checks.ports import Port, is_aside, used
from ncclops.preflight.model import Finding
from ncclops.preflight.readings import Node

_PREFIX = len("fe80:0000:0000:0000:")  # of a GID: the subnet; the port's GUID follows
_MEMBER, _PARTITION = 0x8000, 0x7FFF  # of a P_Key: InfiniBand Architecture, 10.9


def firmware(check: Check, node: Node) -> Iterator[Finding]:
    """Against others of the same board."""
    known = {each.nic.device: each for each in used(node)}
    for device, each in known.items():
        version = each.device("fw_ver")
        alike = Counter(o.device("fw_ver") for o in known.values() if o.kind == each.kind)
        usual = max(alike, key=lambda text: (alike[text], text or ""))
        if not version:
            yield check.unknown(device, "the driver does not say")
        elif version == usual:
            yield check.ok(device, version)
        else:
            yield check.bad(device, f"{version}, others of its kind {usual}")


def pkey(check: Check, node: Node) -> Iterator[Finding]:
    """The entry that NCCL takes, of InfiniBand ports."""
    index = node.environ.get("NCCL_IB_PKEY") or "0"
    active = [each for each in used(node) if each.is_active and each.layer == "InfiniBand"]
    keys = {each.name: _key(each, index) for each in active}
    for each in active:
        key, place = keys[each.name], f"entry {index}"
        alike = Counter(
            k & _PARTITION for o in active if o.kind == each.kind and (k := keys[o.name])
        )
        usual = max(alike, key=lambda number: (alike[number], number), default=0)
        if key is None:
            yield check.unknown(each.name, f"{place} of the table cannot be read")
        elif not key & _PARTITION:
            is_own = uses_rdma(node) and not is_aside(each, node)
            yield (check.bad if is_own else check.warn)(each.name, f"{place} is empty: 0x{key:04x}")
        elif not key & _MEMBER:
            yield check.warn(each.name, f"{place} is a limited member: 0x{key:04x}", "limited")
        elif key & _PARTITION != usual and alike[usual] > 1:
            said = f"{place} is partition 0x{key:04x}, of others 0x{usual | _MEMBER:04x}"
            yield check.warn(each.name, said)
        else:
            yield check.ok(each.name, f"0x{key:04x}")


def arp(check: Check, node: Node) -> Iterator[Finding]:
    """RoCE ports whose interfaces are in one subnet, and answer for each other's addresses."""
    names = {
        each.interfaces()[0].rpartition("/")[2]
        for each in used(node)
        if each.is_active and each.is_ethernet and len(each.interfaces()) == 1
    }
    routes = node.files.text("proc/net/route")
    if len(names) < 2:
        return
    if routes is None:
        yield check.unknown(HOST, "/proc/net/route is not to be seen")
        return
    subnets = defaultdict[tuple[str, str], set[str]](set)
    for words in map(str.split, routes.splitlines()):
        # Interface, destination, gateway, flags, references, use, metric, mask.
        if len(words) > 7 and words[0] in names and set(words[2]) == {"0"} != set(words[7]):
            subnets[words[1], words[7]].add(words[0])
    shared = {key: found for key, found in subnets.items() if len(found) > 1}
    for (destination, mask), found in shared.items():
        answers = sorted(each for each in found if not _ignores(node, each))
        said = f"{some(sorted(found))} in {_dotted(destination)}/{_bits(mask)}"
        if answers:
            yield check.bad(HOST, f"{said}; {some(answers)} answer for all (arp_ignore 0)")
        else:
            yield check.ok(HOST, f"{said}; each answers for itself")
    if not shared:
        yield check.ok(HOST, "no two in one subnet")


def identities(port: Port) -> list[tuple[str, str]]:
    """What others find ``port`` by: addresses of RoCE, as people write them, or InfiniBand's GUID,
    each with which of them it is."""
    if port.is_ethernet and port.is_active:
        return [("address", _written(gid)) for gid in sorted(port.addresses())]
    guid = (port.text("gids/0") or "")[_PREFIX:]
    return [("guid", guid)] if port.layer == "InfiniBand" and guid.strip("0:") else []


def unique(check: Check, node: Node) -> Iterator[Finding]:
    """Addresses of RoCE ports, and GUIDs of InfiniBand ports; each of them is of one port."""
    owners = defaultdict[tuple[str, str], list[Port]](list)
    for each in used(node):
        if not (each.is_ethernet and each.has_master):
            for key in identities(each):
                owners[key].append(each)
    twice = {
        key: those
        for key, those in owners.items()
        # Parts of one function, as the planes of a port, may be devices of their own.
        if len({each.function or each.nic.device for each in those}) > 1
    }
    for (what, value), those in twice.items():
        is_own = uses_rdma(node) and not all(is_aside(each, node) for each in those)
        said = f"{value} is that of each"
        yield (check.bad if is_own else check.warn)(some(e.name for e in those), said, what)
    if owners and not twice:
        yield check.ok(HOST, f"{len(owners)} addresses and GUIDs")


RULES: Mapping[str, Rule] = {
    "nic.firmware": firmware,
    "nic.pkey": pkey,
    "nic.arp": arp,
    "nic.unique": unique,
}


def _written(gid: str) -> str:
    """The address of an interface as people write it."""
    try:
        address = ipaddress.IPv6Address(gid)
    except ValueError:
        return gid
    return str(address.ipv4_mapped or address)


def _key(port: Port, index: str) -> int | None:
    text = port.text(f"pkeys/{index}") or ""
    try:
        return int(text, 16) & (_MEMBER | _PARTITION) if text.startswith("0x") else None
    except ValueError:
        return None


def _ignores(node: Node, interface: str) -> bool:
    """Whether it answers for its own addresses only: the larger of both settings counts."""
    top = "proc/sys/net/ipv4/conf"
    values = [node.files.number(f"{top}/{name}/arp_ignore") for name in ("all", interface)]
    return None in values or max(each or 0 for each in values) > 0


def _dotted(text: str) -> str:
    """An address of ``/proc/net/route``: hex digits, the last byte first."""
    return ".".join(str(each) for each in reversed(bytes.fromhex(text.zfill(8))))


def _bits(mask: str) -> int:
    return int(mask, 16).bit_count()
