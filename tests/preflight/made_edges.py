"""Clusters made up by seed, with one to three faults between their hosts, and what is to be found.

The rounds, the choice of edges for the second one and the judge are the real ones. Made up is what
a probe comes to: ``Cluster.probe`` looks up the faults on its way, in time that nobody waits for.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import selectors
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from ncclops.preflight.edges import schedule
from ncclops.preflight.edges.explain import Edge
from ncclops.preflight.edges.judge import judge
from ncclops.preflight.edges.model import (
    Address,
    Cause,
    Facts,
    How,
    Outcome,
    Place,
    Plan,
    Verdict,
)
from ncclops.preflight.edges.probe import PING_S, Patience, Probe
from ncclops.preflight.edges.rounds import Network, Rounds
from ncclops.preflight.edges.run import Limits

T = TypeVar("T")
RANGE = (32768, 60999)
MTU = 1500
_SYN_AT_S = (0.0, 1.0, 3.0, 7.0)  # RFC 6298
_RTO_S = 0.2  # Linux's least, and twice as long after each
_PACKETS = 46  # of 64 KiB
_HEADERS = 52


@dataclass(kw_only=True)
class Fault:
    """What is planted. ``edges`` are those that it may speak through, ``hosts`` those that may be
    convicted for it; ``kinds`` are the causes that name it. ``mild``: nobody is to be convicted."""

    name: str
    kinds: tuple[str, ...]
    edges: set[Edge] = field(default_factory=set)
    hosts: set[int] = field(default_factory=set)
    mild: bool = False
    faint: bool = False  # so that it may pass unseen


@dataclass
class Cluster:
    """``n`` hosts and what is wrong between them. Directions of packets, unless said otherwise."""

    rng: random.Random
    n: int
    hosts: list[Facts] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    dead: dict[Edge, How] = field(default_factory=dict)  # of connections: from who opens them
    ports: list[tuple[set[Edge], int, int, bool]] = field(default_factory=list)  # stateless?
    sizes: dict[Edge, int] = field(default_factory=dict)
    losses: dict[Edge, float] = field(default_factory=dict)
    delays_s: dict[Edge, float] = field(default_factory=dict)
    data_s: dict[Edge, float] = field(default_factory=dict)
    names: dict[int, dict[int, tuple[str, ...]]] = field(default_factory=dict)
    neighbours: dict[int, dict[str, str]] = field(default_factory=dict)
    mute: set[int] = field(default_factory=set)
    missing: tuple[str, ...] = ()
    halves: tuple[list[int], list[int]] = ((), ())  # type: ignore[assignment]

    def everyone(self) -> range:
        return range(self.n)

    # --- what a probe comes to ------------------------------------------------------------------

    def network(self, me: int) -> Network:
        """Of host ``me``."""
        given = {each.place.address: each.macs[0] for each in self.hosts if each.place}
        owner = {each.place.address: n for n, each in enumerate(self.hosts) if each.place}
        given |= self.neighbours.get(me, {})

        async def probe(address: str, port: int, **options: Any) -> Probe:
            return await self._probe(me, owner[address], port, **options)

        return Network(probe=probe, neighbours=lambda: given, source_towards=lambda _: "")

    async def _probe(
        self,
        src: int,
        dst: int,
        port: int,
        *,
        patience: Patience,
        pings: int = 0,
        data_bytes: int = 0,
        segment: int = 0,
        source_port: int = 0,
        **_: object,
    ) -> Probe:
        local = source_port or self.rng.randint(*RANGE)
        made = _Way(self, src, dst, patience)
        how, says = await made.connect(port, local)
        if how is None:
            how = await made.exchange(pings, data_bytes, segment)
        return Probe(
            how=how,
            uid=self.hosts[dst].uid if made.answered else "",
            rtt_ms=made.rtt_ms,
            source_port=local,
            says=says,
            out_s=made.out_s,
            in_s=made.in_s,
        )

    def touched(self, src: int, dst: int) -> bool:
        """Whether anything is wrong between the two: what is not need not be simulated."""
        ways = ((src, dst), (dst, src))
        wrong = (self.dead, self.sizes, self.losses, self.delays_s, self.data_s)
        return (
            any(way in each for way in ways for each in wrong)
            or any(way in edges for way in ways for edges, *_ in self.ports)
            or dst in self.mute
        )

    # --- the whole ------------------------------------------------------------------------------

    def verdict(self) -> Verdict:
        """What all hosts would say."""
        return in_made_time(self._verdict())

    async def _verdict(self) -> Verdict:
        plan, limits = Plan(hosts=tuple(self.hosts)), Limits()
        rounds = {n: _Rounds(plan, n, self) for n in self.everyone() if n not in self.mute}
        first = {n: await each.first(limits.first) for n, each in rounds.items()}
        first = {
            n: msgspec.structs.replace(each, names=self.names.get(n, {}))
            for n, each in first.items()
        }
        again = schedule.again(self.n, first)
        second: dict[int, Outcome] = {}
        if again:
            second = {
                n: await each.second(again.get(n, ()), limits.second) for n, each in rounds.items()
            }
        expected = self.n + len(self.missing)
        return judge(
            plan.hosts, first, second, missing=self.missing, expected=expected, least=expected
        )


class _Rounds(Rounds):
    """Edges that nothing is wrong with pass without a simulation of each connection."""

    def __init__(self, plan: Plan, me: int, cluster: Cluster) -> None:
        super().__init__(plan, me, cluster.network(me))
        self._cluster = cluster

    async def _first_edge(self, edge: Any) -> None:
        if self._cluster.touched(self._me, edge.dst):
            await super()._first_edge(edge)
            return
        edge.passed.append(1)
        edge.rtt_ms, edge.out_s, edge.in_s = 0.2, 0.001, 0.001


class _Way:
    """One connection: how far it comes, in made time."""

    def __init__(self, cluster: Cluster, src: int, dst: int, patience: Patience) -> None:
        self._made, self._rng = cluster, cluster.rng
        self._out, self._in = (src, dst), (dst, src)
        self._patience = patience
        self.answered, self.rtt_ms, self.out_s, self.in_s = False, -1.0, -1.0, -1.0

    async def connect(self, port: int, local: int) -> tuple[How | None, str]:
        how = self._made.dead.get(self._out)
        if how in ("refused", "unreachable", "forbidden"):
            await asyncio.sleep(0.001)
            return how, "Network is unreachable" if how == "unreachable" else ""
        if how == "silent" or self._out[1] in self._made.mute:
            await asyncio.sleep(self._patience.answer)
            return "silent", ""
        if how is None and not self._blocked(port, local):
            lost = 1 - self._passes(self._out) * self._passes(self._in)
            for at_s in _SYN_AT_S:
                if at_s > self._patience.connect:
                    break
                if self._rng.random() >= lost:
                    await asyncio.sleep(at_s + self._delay_s())
                    return None, ""
        await asyncio.sleep(self._patience.connect)
        return "timeout", ""

    def _blocked(self, port: int, local: int) -> bool:
        for edges, low, high, stateless in self._made.ports:
            if self._out in edges and low <= port <= high:
                return True
            if stateless and self._in in edges and low <= local <= high:
                return True
        return False

    async def exchange(self, pings: int, data_bytes: int, segment: int) -> How | None:
        took_s = self._message_s()
        await asyncio.sleep(min(took_s, self._patience.answer))
        if took_s > self._patience.answer:
            return "silent"
        self.answered = True
        trips = [self._message_s() for _ in range(pings)]
        if trips:
            within_s = self._patience.answer + pings * PING_S
            await asyncio.sleep(min(sum(trips), within_s))
            self.rtt_ms = 1000 * min(*trips, self._delay_s())  # the kernel's: of what is not lost
            if sum(trips) > within_s:
                return "silent"
        if not data_bytes:
            return None
        packet = min(data_bytes + _HEADERS, (segment + 40) if segment else MTU)
        for way, how in ((self._out, "large-out"), (self._in, "large-in")):
            small = packet <= self._made.sizes.get(way, MTU)
            took_s = self._data_s(way, data_bytes) if small else self._patience.data + 1
            await asyncio.sleep(min(took_s, self._patience.data))
            if took_s > self._patience.data:
                return how  # type: ignore[return-value]
            if how == "large-out":
                self.out_s = took_s
            else:
                self.in_s = took_s
        return None

    def _passes(self, way: Edge) -> float:
        return 1 - self._made.losses.get(way, 0.0)

    def _delay_s(self) -> float:
        return sum(self._made.delays_s.get(way, 0.0001) for way in (self._out, self._in))

    def _message_s(self) -> float:
        """A small message there, and its answer."""
        return self._delay_s() + self._late_s(self._out) + self._late_s(self._in)

    def _late_s(self, way: Edge) -> float:
        """By how much a packet comes later for being lost and sent again."""
        late, again = 0.0, _RTO_S
        while self._rng.random() >= self._passes(way) and late < 60:
            late, again = late + again, 2 * again
        return late

    def _data_s(self, way: Edge, size: int) -> float:
        part = size / 65536
        took_s = self._delay_s() + self._made.data_s.get(way, 0.001) * part
        if way in self._made.losses:
            # Linux sends again at once what is lost; not if that is lost as well, nor the last one.
            rate = self._made.losses[way]
            lost = sum(self._rng.random() < rate * rate for _ in range(int(_PACKETS * part)))
            took_s += sum(_RTO_S + self._late_s(way) for _ in range(lost)) + self._late_s(way)
        return took_s


class _NoWaiting(selectors.SelectSelector):
    """Time passes when nothing else is to be done, and then at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        self.now_s += max(0.0, timeout or 0.0)
        return []


def in_made_time(work: Coroutine[Any, Any, T]) -> T:
    """What ``work`` comes to, on a clock of its own."""
    selector = _NoWaiting()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now_s  # type: ignore[method-assign]
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()


# --- clusters, and what is planted ----------------------------------------------------------------


def make(seed: int) -> Cluster:
    """The cluster of ``seed``, with one to three faults."""
    rng = random.Random(seed)
    n = round(2 ** rng.uniform(2, 6))
    made = Cluster(rng, n, missing=())
    cut = rng.randint(2, n - 2) if rng.random() < 0.5 else n
    made.halves = (list(range(cut)), list(range(cut, n)))
    made.hosts = [_host(number, net=int(number >= cut)) for number in range(n)]
    free = list(range(n))
    rng.shuffle(free)
    plants = rng.sample(PLANTS, rng.randint(1, 3))
    for plant in plants:
        # Two faults of one host are a story of their own, so each has hosts for itself.
        found = plant(made, free)
        if found is not None:
            made.faults.append(found)
    for fault in made.faults:
        if fault.name == "name":  # who is silent does not say it
            fault.faint = made.names.keys() <= made.mute
    return made


def with_many_ranges(seed: int, ranges: int) -> Cluster:
    """Six hosts: what comes to host 1 at so many ranges of ports is dropped, without state, and
    what host 2 opens to host 3."""
    made = Cluster(random.Random(seed), 6)
    made.halves = (list(made.everyone()), [])
    made.hosts = [_host(number, net=0) for number in made.everyone()]
    into = {(src, 1) for src in made.everyone() if src != 1}
    for low in (made.rng.randint(33000, 60000) for _ in range(ranges)):
        made.ports.append((into, low, low + 900, True))
    made.dead[2, 3] = "timeout"
    return made


def with_losses(seed: int, rate: float, low: int, high: int) -> Cluster:
    """Six hosts: host 1 loses so much of what it sends, and does not accept at these ports."""
    made = Cluster(random.Random(seed), 6)
    made.halves = (list(made.everyone()), [])
    made.hosts = [_host(number, net=0) for number in made.everyone()]
    made.losses |= dict.fromkeys(_around(made, 1, "out"), rate)
    made.ports.append((_around(made, 1, "in"), low, high, False))
    return made


def _host(number: int, net: int) -> Facts:
    address, mac = f"10.{net}.0.{number + 1}", f"02:00:00:00:00:{number:02x}"
    place = Place(interface="eth0", address=address, prefix=24, family=4, mtu=MTU, mac=mac)
    ports = tuple(RANGE[0] + (RANGE[1] - RANGE[0]) * each // 31 for each in range(32))
    return Facts(
        name=f"n{number}",
        uid=f"{number:032x}",
        rank=number,
        boot_id=str(number),
        place=place,
        addresses=(Address(interface="eth0", address=address, prefix=24, family=4),),
        macs=(mac,),
        ports=(29500, *ports),
        port_range=RANGE,
    )


def _one(free: list[int]) -> int | None:
    return free.pop() if free else None


def _around(made: Cluster, host: int, ways: str) -> set[Edge]:
    edges = set[Edge]()
    if "in" in ways:
        edges |= schedule.edges_between(made.everyone(), (host,))
    if "out" in ways:
        edges |= schedule.edges_between((host,), made.everyone())
    return edges


def _some_edges(made: Cluster, free: list[int]) -> tuple[str, set[Edge], set[int]] | None:
    """A shape: its name, its edges, and the hosts that may be convicted for it."""
    rng = made.rng
    shape = rng.choice(["host", "host-in", "host-out", "edge", "pair", "group"])
    if shape == "group" and made.halves[1]:
        ends = made.halves[:: rng.choice([1, -1])]
        edges = schedule.edges_between(*ends)
        return "group", edges | ({e[::-1] for e in edges} if rng.random() < 0.5 else set()), set()
    if shape in ("edge", "pair", "group"):
        if len(free) < 2:
            return None
        a, b = free.pop(), free.pop()
        return shape, {(a, b)} | ({(b, a)} if shape == "pair" else set()), set()
    host = _one(free)
    if host is None:
        return None
    ways = {"host": "in and out", "host-in": "in", "host-out": "out"}[shape]
    return shape, _around(made, host, ways), {host}


def _dead(made: Cluster, free: list[int]) -> Fault | None:
    """A host that is down, a direction, an edge, a subnet."""
    found = _some_edges(made, free)
    if found is None:
        return None
    shape, edges, hosts = found
    how: How = made.rng.choice(["timeout", "timeout", "refused", "unreachable", "forbidden"])
    made.dead |= dict.fromkeys(edges, how)
    return Fault(name=f"dead {shape} {how}", kinds=("unreachable",), edges=edges, hosts=hosts)


def _ports(made: Cluster, free: list[int]) -> Fault | None:
    """A firewall: low ports, high ports, some between; with state or without."""
    found = _some_edges(made, free)
    if found is None:
        return None
    shape, edges, hosts = found
    low, high = made.rng.choice([(1, 45000), (50000, 65535), (40000, 50000), (36000, 39000)])
    stateless = made.rng.random() < 0.3
    made.ports.append((edges, low, high, stateless))
    told = edges | ({e[::-1] for e in edges} if stateless else set())
    name = f"ports {low}-{high} {shape}{' stateless' * stateless}"
    return Fault(name=name, kinds=("ports", "loss"), edges=told, hosts=hosts)


def _mtu(made: Cluster, free: list[int]) -> Fault | None:
    found = _some_edges(made, free)
    if found is None:
        return None
    shape, edges, hosts = found
    made.sizes |= dict.fromkeys(edges, made.rng.choice([1400, 1420, 1280]))
    return Fault(name=f"mtu {shape}", kinds=("mtu",), edges=edges, hosts=hosts)


def _loss(made: Cluster, free: list[int]) -> Fault | None:
    found = _some_edges(made, free)
    if found is None:
        return None
    shape, edges, hosts = found
    rate = made.rng.choice([0.05, 0.2, 0.3, 0.5])
    made.losses |= dict.fromkeys(edges, rate)
    told = edges | {edge[::-1] for edge in edges}
    kinds = ("loss", "flaky", "slow", "bandwidth", "unreachable")
    name, faint = f"loss {rate} {shape}", rate < 0.1
    return Fault(name=name, kinds=kinds, edges=told, hosts=hosts, faint=faint)


def _delay(made: Cluster, free: list[int]) -> Fault | None:
    found = _some_edges(made, free)
    if found is None:
        return None
    shape, edges, _ = found
    made.delays_s |= dict.fromkeys(edges, made.rng.choice([0.06, 0.2, 0.4]))
    told = edges | {edge[::-1] for edge in edges}
    return Fault(name=f"delay {shape}", kinds=("slow",), edges=told, mild=True)


def _thin(made: Cluster, free: list[int]) -> Fault | None:
    found = _some_edges(made, free)
    if found is None:
        return None
    shape, edges, _ = found
    made.data_s |= dict.fromkeys(edges, made.rng.choice([0.2, 0.5, 2.0]))
    return Fault(name=f"thin {shape}", kinds=("bandwidth",), edges=edges, mild=True)


def _interface(made: Cluster, free: list[int]) -> Fault | None:
    """NCCL takes an interface that leads nowhere; what the host opens leaves by the other one."""
    host = _one(free)
    if host is None:
        return None
    facts = made.hosts[host]
    assert facts.place is not None
    first = Address(interface="ibmgmt", address=f"172.31.{host}.1", prefix=24, family=4)
    made.hosts[host] = msgspec.structs.replace(
        facts,
        place=msgspec.structs.replace(facts.place, interface="ibmgmt", address=first.address),
        addresses=(first, *facts.addresses),
    )
    edges = _around(made, host, "in")
    made.dead |= dict.fromkeys(edges, made.rng.choice(["timeout", "unreachable"]))
    return Fault(
        name="interface", kinds=("wrong-interface", "unreachable"), edges=edges, hosts={host}
    )


def _foreign(made: Cluster, free: list[int]) -> Fault | None:
    """A machine that is no host of the job has the address of one; some find that one."""
    host = _one(free)
    if host is None:
        return None
    facts = made.hosts[host]
    assert facts.place is not None
    mac = "02:ff:00:00:00:01"
    others = [each for each in made.everyone() if each != host]
    misled = made.rng.sample(others, made.rng.randint(2, len(others)))
    for src in misled:
        made.neighbours.setdefault(src, {})[facts.place.address] = mac
    made.hosts[host] = msgspec.structs.replace(facts, conflict=mac)
    made.dead.update(dict.fromkeys(schedule.edges_between(misled, (host,)), "refused"))
    made.dead.update(dict.fromkeys(schedule.edges_between((host,), misled), "timeout"))
    kinds = ("duplicate-address", "unreachable")
    edges = _around(made, host, "in and out")
    return Fault(name="foreign", kinds=kinds, edges=edges, hosts={host})


def _twins(made: Cluster, free: list[int]) -> Fault | None:
    """Two hosts with one address."""
    if len(free) < 2:
        return None
    a, b = free.pop(), free.pop()
    one, two = made.hosts[a].place, made.hosts[b].place
    assert one is not None
    assert two is not None
    made.hosts[b] = msgspec.structs.replace(
        made.hosts[b],
        place=msgspec.structs.replace(two, address=one.address),
        addresses=made.hosts[a].addresses,
    )
    edges = _around(made, a, "in and out") | _around(made, b, "in and out")
    return Fault(name="twins", kinds=("duplicate-address",), edges=edges, hosts={a, b})


def _name(made: Cluster, free: list[int]) -> Fault | None:
    """A host's name stands for another host's address on some of them."""
    host = _one(free)
    if host is None:
        return None
    others = [each for each in made.everyone() if each != host]
    whose = made.hosts[made.rng.choice(others)].place
    assert whose is not None
    for src in made.rng.sample(others, made.rng.randint(1, len(others))):
        made.names.setdefault(src, {})[host] = (whose.address,)
    return Fault(name="name", kinds=("name",))


def _same_name(made: Cluster, free: list[int]) -> Fault | None:
    if len(free) < 2:
        return None
    a, b = free.pop(), free.pop()
    made.hosts[b] = msgspec.structs.replace(made.hosts[b], name=made.hosts[a].name)
    return Fault(name="same name", kinds=("duplicate-name",), hosts={a, b})


def _mute(made: Cluster, free: list[int]) -> Fault | None:
    """A host that accepts connections, and says nothing."""
    host = _one(free)
    if host is None:
        return None
    made.mute.add(host)
    edges = _around(made, host, "in and out")
    return Fault(name="mute", kinds=("silent",), edges=edges, hosts={host})


def _missing(made: Cluster, free: list[int]) -> Fault | None:
    made.missing = ("n99",)
    return Fault(name="missing", kinds=("missing",))


PLANTS: tuple[Callable[[Cluster, list[int]], Fault | None], ...] = (
    _dead,
    _dead,
    _dead,
    _ports,
    _ports,
    _mtu,
    _loss,
    _loss,
    _delay,
    _thin,
    _interface,
    _foreign,
    _twins,
    _name,
    _same_name,
    _mute,
    _missing,
)


# --- is it right? ---------------------------------------------------------------------------------

_REMARKS = ("mtu-differs", "one-machine")


def claimed(cause: Cause, n: int) -> set[Edge]:
    """The edges that a cause is about."""
    everyone = range(n)
    if cause.kind in ("name", "duplicate-name", "loopback-name", "missing"):
        return set()
    if cause.shape == "everything":
        return schedule.edges_between(everyone, everyone)
    into = schedule.edges_between(everyone, cause.a)
    out = schedule.edges_between(cause.a, everyone)
    known = cause.kind in ("duplicate-address", "silent", "files", "duplicate-mac")
    if cause.shape == "host" or (known and not cause.b):
        return into | out
    if cause.shape in ("host-in", "host-out"):
        return into if cause.shape == "host-in" else out
    edges = schedule.edges_between(cause.a, cause.b)
    return edges | ({edge[::-1] for edge in edges} if cause.both_ways else set())


def wrongs(made: Cluster, verdict: Verdict) -> list[str]:
    """Convictions, and causes, of what nothing was planted in."""
    bad_hosts = {each for fault in made.faults for each in fault.hosts}
    found = []
    for cause in verdict.causes:
        for host in cause.hosts:
            if host not in bad_hosts and not _smaller(made, verdict, cause):
                found.append(f"host {host} is convicted: {_short(cause)}")
        if cause.severity == "CANNOT-TELL" or cause.shape == "several":
            continue
        fitting = [fault for fault in made.faults if cause.kind in fault.kinds]
        meant = set().union(*(fault.edges for fault in fitting)) if fitting else set()
        if not fitting:
            found.append(f"nothing of the kind was planted: {_short(cause)}")
        elif claimed(cause, made.n) - meant - _hidden(made, cause):
            found.append(f"it is about edges that work: {_short(cause)}")
    return found


def _smaller(made: Cluster, verdict: Verdict, cause: Cause) -> bool:
    """Whether ``cause`` is smaller, for the same failures: of a subnet one host may be left."""
    meant = set().union(*(each.edges for each in made.faults if cause.kind in each.kinds))
    about = claimed(cause, made.n) - _hidden(made, cause)
    return about <= meant and len(verdict.causes) <= len(made.faults)


def _hidden(made: Cluster, cause: Cause) -> set[Edge]:
    """Edges that another fault keeps from being looked at: a cause may be about them as well."""
    others = [fault for fault in made.faults if cause.kind not in fault.kinds]
    return set(itertools.chain.from_iterable(fault.edges for fault in others))


def lacks(made: Cluster, verdict: Verdict) -> list[str]:
    """Faults that no cause names; and more causes than there are faults."""
    found = []
    told = set[Edge]().union(*(claimed(cause, made.n) for cause in verdict.causes))
    kinds = {cause.kind for cause in verdict.causes}
    for fault in made.faults:
        named = bool(kinds & {*fault.kinds})
        if not named and not fault.faint and not (fault.edges and fault.edges <= told):
            found.append(f"{fault.name} is not named")
    causes = [cause for cause in verdict.causes if cause.kind not in _REMARKS]
    if len(causes) > len(made.faults):
        found.append(f"{len(causes)} causes: {'; '.join(map(_short, causes))}")
    return found


def _short(cause: Cause) -> str:
    ends = f"{list(cause.a)}" + (f" -> {list(cause.b)}" if cause.b else "")
    return f"{cause.severity} {cause.kind} {cause.shape} {ends}"


def judged(seeds: Iterable[int]) -> Iterable[tuple[int, Cluster, list[str], list[str]]]:
    """For each seed: what is wrong with the verdict, and what it lacks."""
    for seed in seeds:
        made = make(seed)
        verdict = made.verdict()
        yield seed, made, wrongs(made, verdict), lacks(made, verdict)
