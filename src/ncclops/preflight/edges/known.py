"""Causes that need no probe: what hosts have told of themselves is enough; pure."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from ncclops.preflight.edges.interface import is_loopback, subnet
from ncclops.preflight.edges.model import FILES, Cause, Facts, Outcome, Severity, Shape
from ncclops.preflight.edges.states import LOST
from ncclops.preflight.model import Traits

_WITNESSES = 2
_NAMED = 4
# Of hosts that are compared there are so many at least, and this share of them is as usual: in a
# cluster of two kinds nobody is odd.
_FEWEST_ALIKE, _ALIKE = 4, 0.75
# What differs by less is no difference: kernels keep some MiB more or less of the memory.
_SAME = 0.99
# A host that lacks more of its memory than this was bought so.
_LOST_MEMORY = 0.26
_COMPARED = ("memory_mib", "gpus", "gpu_mib", "ports", "driver")
_COMPARED_EVERYWHERE = ("nccl",)


def who_is_out(
    hosts: Sequence[Facts],
    first: Mapping[int, Outcome],
    second: Mapping[int, Outcome],
    answering: Collection[int],
) -> tuple[set[int], list[Cause]]:
    """The hosts whose edges are explained by what they are, and the causes.

    Those that fell silent (and are not ``answering``), that listen nowhere or where only they can
    reach it, that may open too few files, and those that share an address.
    """
    causes, out = list[Cause](), set[int]()
    shared = _shared(hosts, _address)
    # Each takes the other's packets: that is why the meeting has lost them.
    taken = sharing_an_address(hosts)
    silent = [n for n in unheard(hosts, first, second) if not _answers(n, first, second)]
    silent = [n for n in silent if n not in taken and n not in answering]
    # That another machine has its address is why it falls silent.
    claimed = [n for n in silent if hosts[n].conflict]
    silent = [n for n in silent if not hosts[n].conflict]
    files = [n for n, each in enumerate(hosts) if each.too_few_files]
    nowhere = [n for n, each in enumerate(hosts) if each.place is None or not each.ports]
    loopback = [n for n, each in enumerate(hosts) if each.place and is_loopback(each.place.address)]
    kinds = {"silent": silent, "files": files, "loopback": loopback, "no-interface": nowhere}
    for kind, found in kinds.items():
        causes += [_of_host(kind, each, hosts[each]) for each in found if each not in out]
        out |= set(found)
    for number in claimed:
        if number not in out:
            causes.append(_claimed("FAIL", number, hosts[number], hosts=(number,)))
    out |= {*claimed}
    for address, sharing in shared:
        numbers = tuple(each for each in sharing if each not in out)
        if len(numbers) < 2:
            continue
        if _each_its_own(hosts, numbers):
            causes.append(_everywhere(hosts, numbers, address))
        else:
            causes.append(
                _cause("duplicate-address", "FAIL", numbers, hosts=numbers[1:], address=address)
            )
        out |= set(numbers)
    for mac, sharing in _shared(hosts, _link):
        numbers = tuple(each for each in sharing if each not in out)
        if len(numbers) > 1 and _fail(numbers, first):
            causes.append(_cause("duplicate-mac", "FAIL", numbers, hosts=numbers[1:], mac=mac[:17]))
            out |= set(numbers)
    return out, causes


def sharing_an_address(hosts: Sequence[Facts]) -> set[int]:
    """The hosts that claim one address from each other."""
    shared = _shared(hosts, _address)
    return {n for _, sharing in shared if not _each_its_own(hosts, sharing) for n in sharing}


def _address(host: Facts) -> str:
    return host.place.address if host.place else ""


def unheard(
    hosts: Sequence[Facts], first: Mapping[int, Outcome], second: Mapping[int, Outcome]
) -> list[int]:
    """The hosts that came, and have said nothing more."""
    return [n for n in range(len(hosts)) if n not in first or (second and n not in second)]


def _answers(host: int, first: Mapping[int, Outcome], second: Mapping[int, Outcome]) -> bool:
    """Whether two others still reach ``host`` now and then: it lives, and what it says is lost."""
    last = {
        (src, each.dst): each
        for one in (first, second)
        for src, of in one.items()
        for each in of.seen
    }
    found = {
        src
        for (src, dst), seen in last.items()
        if dst == host and seen.passed and (seen.lost or {*seen.failed.values()} & {*LOST})
    }
    return len(found) >= _WITNESSES


def without_report(
    hosts: Sequence[Facts], numbers: Iterable[int], answering: Collection[int]
) -> list[Cause]:
    """One for each host that has fallen silent, or that has not reported though it answers."""
    silent, late = list[int](), list[int]()
    for each in numbers:
        (late if each in answering else silent).append(each)
    return [
        *(_of_host("silent", each, hosts[each]) for each in silent),
        *(_cause("late", "CANNOT-TELL", (each,)) for each in late),
    ]


def _each_its_own(hosts: Sequence[Facts], sharing: tuple[int, ...]) -> bool:
    """Whether ``sharing`` have one address on interfaces within each of them, as of bridges: nobody
    claims it from another, and they have other addresses in one network, each its own."""
    if any(hosts[each].conflict for each in sharing):
        return False
    nets: dict[str, list[str]] = defaultdict(list)
    for number in sharing:
        own = hosts[number].place
        for each in hosts[number].addresses:
            if own and each.interface != own.interface and not is_loopback(each.address):
                nets[str(subnet(each))].append(each.address)
    return any(len(found) == len({*found}) == len(sharing) for found in nets.values())


def _everywhere(hosts: Sequence[Facts], sharing: tuple[int, ...], address: str) -> Cause:
    rest = f" and {len(sharing) - _NAMED} more" if len(sharing) > _NAMED else ""
    names = ", ".join(hosts[each].name for each in sharing[:_NAMED]) + rest
    return _cause(
        "address-everywhere", "FAIL", sharing, address=address, whose=names, everywhere=names
    )


def _link(host: Facts) -> str:
    """The hardware address by which others of one network find the host."""
    place = host.place
    return f"{place.mac} in {subnet(place)}" if place and place.mac.strip("0:") else ""


def _fail(numbers: Collection[int], first: Mapping[int, Outcome]) -> bool:
    """Whether something is wrong with an edge of ``numbers``: some share an address by design."""
    edges = ((src, each) for src, outcome in first.items() for each in outcome.seen)
    return any(each.failed and {src, each.dst} & {*numbers} for src, each in edges)


def remarks(hosts: Sequence[Facts], first: Mapping[int, Outcome]) -> list[Cause]:
    """What is to be said of names and sizes, whatever the edges say."""
    return [
        *_host_names(hosts),
        *_own_names(hosts),
        *_names_elsewhere(hosts, first),
        *_sizes(hosts),
        *_unlike(hosts),
        *_rdma(hosts),
    ]


def claimed_elsewhere(
    hosts: Sequence[Facts], told: Collection[str | None], *, trouble: bool
) -> list[Cause]:
    """Addresses for which another machine answered an ARP probe. It convicts only with ``trouble``.

    ``told`` are the addresses of which that is said already.
    """
    macs = {each.place.mac for each in hosts if each.place}
    made = []
    for number, each in enumerate(hosts):
        place = each.place
        if place is None or not each.conflict or place.address in told:
            continue
        severity: Severity = "FAIL" if trouble or each.conflict in macs else "WARN"
        made.append(_claimed(severity, number, each))
    return made


def _claimed(severity: Severity, number: int, host: Facts, *, hosts: tuple[int, ...] = ()) -> Cause:
    """Another machine answers for the address of ``host``."""
    place = host.place
    return _cause(
        "duplicate-address",
        severity,
        (number,),
        hosts=hosts,
        address=place.address if place else "",
        their_mac=host.conflict,
        mac=place.mac if place else "",
    )


_OF_AN_ADDRESS = ("duplicate-address", "wrong-interface")


def one_an_address(causes: list[Cause]) -> list[Cause]:
    """Edges that fail for the same reason at the same address are one cause: another machine has
    it, or it is of an interface that the others do not reach."""
    made, places = list[Cause](), dict[tuple[str, str], int]()
    for cause in causes:
        address = cause.facts.get("address", "") if cause.kind in _OF_AN_ADDRESS else ""
        key = (cause.kind, address)
        if not address or key not in places:
            places |= {key: len(made)} if address else {}
            made.append(cause)
            continue
        place = places[key]
        before, after = made[place], cause
        if after.hosts and not before.hosts:
            before, after = after, before
        if before.kind == "duplicate-address":
            before = msgspec.structs.replace(
                before,
                shape="several",
                a=tuple(sorted({*before.a, *after.a})),
                b=tuple(sorted({*before.b, *after.b})),
                hosts=tuple(sorted({*before.hosts, *after.hosts})),
            )
        made[place] = msgspec.structs.replace(before, edges=before.edges + after.edges)
    return made


def _host_names(hosts: Sequence[Facts]) -> Iterable[Cause]:
    for name, sharing in _shared(hosts, lambda each: each.name):
        machines = {hosts[each].boot_id for each in sharing}
        if len(sharing) == len(hosts) and len(machines) == 1:
            # Containers of one machine, which share its name: odd, and not a broken host.
            yield _cause("one-machine", "WARN", sharing, name=name)
            continue
        same = "yes" if len(machines) < len(sharing) else ""
        yield _cause("duplicate-name", "FAIL", sharing, hosts=sharing[1:], name=name, boot=same)


def _own_names(hosts: Sequence[Facts]) -> Iterable[Cause]:
    leading = tuple(
        number
        for number, each in enumerate(hosts)
        if each.own_name and all(map(is_loopback, each.own_name)) and not each.gloo
    )
    if leading:
        address = hosts[leading[0]].own_name[0]
        yield _cause("loopback-name", "WARN", leading, address=address)


def _names_elsewhere(hosts: Sequence[Facts], first: Mapping[int, Outcome]) -> Iterable[Cause]:
    """Names that stand for other addresses on some host than those of the host with that name."""
    by_answer: dict[tuple[int, str], list[int]] = defaultdict(list)
    for src, outcome in sorted(first.items()):
        for dst, addresses in sorted(outcome.names.items()):
            by_answer[dst, ", ".join(addresses)].append(src)
    owners = {each.place.address: number for number, each in enumerate(hosts) if each.place}
    for (dst, answer), asking in by_answer.items():
        owner = owners.get(answer)
        severity: Severity = "WARN" if owner is None else "FAIL"
        whose = "" if owner is None else hosts[owner].name
        yield _cause("name", severity, (dst,), b=tuple(asking), address=answer, whose=whose)


def _sizes(hosts: Sequence[Facts]) -> Iterable[Cause]:
    """Interfaces of one subnet that are set to different sizes."""
    by_net: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for number, each in enumerate(hosts):
        if each.place and each.place.mtu and not is_loopback(each.place.address):
            by_net[str(subnet(each.place))][each.place.mtu].append(number)
    for net, sizes in by_net.items():
        if len(sizes) < 2:
            continue
        usual = max(sizes, key=lambda size: (len(sizes[size]), size))
        rest = tuple(number for size, those in sizes.items() if size != usual for number in those)
        odd = ", ".join(str(size) for size in sorted(sizes) if size != usual)
        yield _cause("mtu-differs", "WARN", rest, subnet=net, usual=str(usual), mtu=odd)


def _unlike(hosts: Sequence[Facts]) -> Iterable[Cause]:
    """Hosts that differ from nearly all others of their make; in NCCL, from nearly all."""
    known = [(n, each.traits) for n, each in enumerate(hosts) if each.traits is not None]
    makes: dict[str, list[tuple[int, Traits]]] = defaultdict(list)
    for number, traits in known:
        makes[traits.make].append((number, traits))
    makes.pop("", None)
    compared = [(what, alike) for alike in makes.values() for what in _COMPARED]
    compared += [(what, known) for what in _COMPARED_EVERYWHERE]
    for what, alike in compared:
        values = {number: value for number, each in alike if (value := getattr(each, what))}
        if len(values) < _FEWEST_ALIKE:
            continue
        ordered = sorted(values.values())
        is_text = isinstance(ordered[0], str)
        usual = statistics.mode(ordered) if is_text else statistics.median_high(ordered)
        odd = {number: value for number, value in values.items() if _is_odd(what, value, usual)}
        if odd and len(values) - len(odd) >= _ALIKE * len(values):
            read = ", ".join(sorted({str(value) for value in odd.values()}))
            yield _cause("differs", "WARN", tuple(odd), what=what, read=read, usual=str(usual))


def _rdma(hosts: Sequence[Facts]) -> Iterable[Cause]:
    """RDMA addresses and GUIDs of several machines; one that many have is of a network within
    each. Nothing has tried them, so nobody is convicted."""
    owners: dict[str, dict[str, int]] = defaultdict(dict)
    for number, each in enumerate(hosts):
        for value in each.traits.rdma if each.traits else ():
            owners[value].setdefault(each.boot_id or each.uid, number)
    by_hosts: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for value, found in owners.items():
        if 1 < len(found) <= max(2, (1 - _ALIKE) * len(hosts)):
            by_hosts[tuple(sorted(found.values()))].append(value)
    for sharing, values in by_hosts.items():
        rest = f" and {len(values) - _NAMED} more" if len(values) > _NAMED else ""
        yield _cause("duplicate-rdma", "WARN", sharing, values=", ".join(values[:_NAMED]) + rest)


def _is_odd(what: str, value: int | str, usual: int | str) -> bool:
    """Whether it is less than usual, or another version."""
    if isinstance(value, str) or isinstance(usual, str):
        return value != usual
    if what == "memory_mib" and value < (1 - _LOST_MEMORY) * usual:
        return False  # so much was never there: it was bought so
    return value < _SAME * usual


def _shared(hosts: Sequence[Facts], key: object) -> list[tuple[str, tuple[int, ...]]]:
    by_value: dict[str, list[int]] = defaultdict(list)
    for number, each in enumerate(hosts):
        value = key(each)  # type: ignore[operator]
        if value and not (value[0].isdigit() and is_loopback_or_name(value)):
            by_value[value].append(number)
    return [(value, tuple(each)) for value, each in by_value.items() if len(each) > 1]


def is_loopback_or_name(value: str) -> bool:
    """Whether ``value`` is a loopback address; a name is none."""
    try:
        return is_loopback(value)
    except ValueError:
        return False


def _of_host(kind: str, number: int, host: Facts) -> Cause:
    place = host.place
    return _cause(
        kind,
        "FAIL",
        (number,),
        hosts=(number,),
        interface=place.interface if place else "",
        address=place.address if place else "",
        rule=host.rule,
        files=str(host.files),
        least=str(FILES),
    )


def _cause(
    kind: str,
    severity: Severity,
    a: tuple[int, ...],
    *,
    b: tuple[int, ...] = (),
    hosts: tuple[int, ...] = (),
    **facts: str,
) -> Cause:
    shape: Shape = "host" if len(a) == 1 else "several"
    given = {name: value for name, value in facts.items() if value}
    return Cause(
        kind=kind,
        severity=severity,
        shape=shape,
        symptom="dead",
        a=a,
        b=b,
        hosts=hosts,
        facts=given,
    )
