"""All edges of this host: the first round to every host, and the second to those that failed."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from ncclops.preflight.edges import machine, schedule, wire
from ncclops.preflight.edges.model import Facts, How, Outcome, Plan, Seen
from ncclops.preflight.edges.probe import FIRST, SECOND, SIZE, Patience, Probe, probe
from ncclops.preflight.edges.states import (
    LOSSES,
    LOST,
    NOTABLE_DATA_S,
    NOTABLE_RTT_MS,
    NOTED,
    doubtful,
    scattered,
)

# Hosts that one host is connected to at a time, and connections in all.
_HOSTS_AT_ONCE, _CONNECTIONS_AT_ONCE = 8, 16
# In the second round there are few edges, and most of them wait.
_AGAIN_AT_ONCE, _CONNECTIONS_AGAIN = 24, 64
_PINGS, _PINGS_AGAIN = 4, 12
# If the first port fails and so many more: the others of that host are not tried in this round.
_DEAD_AFTER = 3
# The second round tries one port in so many, and the others where one of these passes.
_SPREAD = 5
# What may have failed by chance is repeated so often: of packets, one in five may be lost.
_REPEATS = 2
# So often a connection is tried that this process was too late for.
_LATE = 3
# Some of it is tried from so many other local ports as well, a prime apart.
_ASKED, _OTHERS, _STEP = 6, 4, 7919
# Sizes of packets that links are set to, in bytes: IPv6's least, tunnels of several kinds, cloud
# networks, Ethernet, IP over InfiniBand, jumbo frames.
SIZES = (576, 1280, 1350, 1400, 1420, 1450, 1460, 1480, 1500, 2044, 4092, 8500, 8900, 9000)
_TIMES = 3  # a size is tried, before it is said not to pass
_PASSES = 6  # so often the one below has to pass then
_HEADERS = {4: 40, 6: 60}  # of IP and TCP, in bytes
_TIMESTAMPS = 12  # of which Linux's TCP puts into every packet so many bytes more
_ETHERNET = 1500


_LARGE = ("large-out", "large-in")


@dataclass
class _Edge:
    """What this host has seen of one edge so far."""

    dst: int
    begun: bool = False
    failed: dict[int, How] = field(default_factory=dict)
    passed: list[int] = field(default_factory=list)
    sources: dict[int, int] = field(default_factory=dict)
    rtt_ms: float = -1.0
    out_s: float = -1.0
    in_s: float = -1.0
    source: str = ""
    other: int = -1
    says: str = ""
    passed_mtu: int = 0
    beyond_mtu: int = 0
    lost: int = 0
    repeated: bool = False
    stalled: bool = False
    by_source: bool = False
    sent: int = 0
    resent: int = 0
    opening: int = 0
    unanswered: set[int] = field(default_factory=set)  # slots: their last requests arrived

    def seen(self, mac: str) -> Seen:
        return Seen(
            dst=self.dst,
            failed=self.failed,
            passed=tuple(self.passed),
            sources=self.sources if "timeout" in self.failed.values() else {},
            rtt_ms=round(self.rtt_ms, 3),
            out_s=round(self.out_s, 3),
            in_s=round(self.in_s, 3),
            source=self.source,
            mac=mac,
            other=self.other,
            says=self.says,
            passed_mtu=self.passed_mtu,
            beyond_mtu=self.beyond_mtu,
            lost=self.lost,
            repeated=self.repeated,
            stalled=self.stalled,
            by_source=self.by_source,
            sent=self.sent,
            resent=self.resent,
            opening=self.opening,
            unanswered=tuple(sorted(self.unanswered & self.failed.keys())),
        )


@dataclass(frozen=True, kw_only=True)
class Network:
    """What the rounds ask of this machine's network; a simulation answers for one of its own."""

    probe: Callable[..., Awaitable[Probe]] = probe
    neighbours: Callable[[], Mapping[str, str]] = machine.neighbours
    source_towards: Callable[[str], str] = machine.source_towards


class Rounds:
    """The edges that host number ``me`` of ``plan`` opens."""

    def __init__(self, plan: Plan, me: int, network: Network | None = None) -> None:
        self._network = network or Network()
        self._hosts = plan.hosts
        self._me = me
        self._numbers = {each.uid: number for number, each in enumerate(plan.hosts)}
        self._lost_data: set[int] = set()  # the hosts with which that happened in the first round
        self._lost: dict[int, dict[int, int]] = {}  # by host and slot: from which local port
        self._passed: dict[int, list[int]] = {}  # by host: slots
        self._connections = asyncio.Semaphore(_CONNECTIONS_AT_ONCE)

    async def first(self, within_s: float) -> Outcome:
        """Every other host; those that are not looked at wholly in time are said to be skipped.

        Those on which time ran out are reported as well: they may be slow for what is wrong there.
        """
        edges = {dst: _Edge(dst) for dst in schedule.peers(len(self._hosts), self._me)}
        usable = [each for each in edges.values() if self._can_be_tried(each.dst)]
        began, before = time.perf_counter(), machine.own_place(self._own)
        done = await self._all(usable, self._first_edge, _HOSTS_AT_ONCE, within_s) if before else ()
        whole = {*done}
        tried = sum(len(each.failed) + len(each.passed) for each in edges.values())
        took_s = time.perf_counter() - began
        rtts = [each.rtt_ms for each in edges.values() if each.rtt_ms >= 0]
        # Of both ways the longer one: what comes back may have come while the first was waited for.
        ways = [(each.out_s, each.in_s) for each in edges.values()]
        took = [max(way) for way in ways if min(way) >= 0]
        macs = self._network.neighbours()
        self._lost_data = {dst for dst, each in edges.items() if _lost_data(each)}
        self._lost = {dst: _lost_from(each) for dst, each in edges.items() if each.passed}
        self._passed = {dst: each.passed for dst, each in edges.items() if each.failed}
        return Outcome(
            src=self._me,
            seen=tuple(
                self._report(each, macs)
                for dst, each in edges.items()
                if (_notable(each) if dst in whole else each.begun)
            ),
            skipped=tuple(dst for dst in edges if dst not in whole),
            rtt_ms=round(_usual(rtts), 3),
            data_s=round(_usual(took), 4),
            rate=round(tried / took_s, 1) if took_s > 0 else 0.0,
            macs_agree=self._macs_agree(macs),
        )

    async def second(self, dsts: Iterable[int], within_s: float) -> Outcome:
        """``dsts`` again: every port, more patiently, and which sizes pass. All are reported."""
        edges = {dst: _Edge(dst) for dst in dsts if self._can_be_tried(dst)}
        self._connections = asyncio.Semaphore(_CONNECTIONS_AGAIN)
        # What is dead waits for one batch more.
        share = max(1, _CONNECTIONS_AGAIN // max(1, len(edges)))
        second = functools.partial(self._second_edge, share=share)
        whole = {*await self._all(list(edges.values()), second, _AGAIN_AT_ONCE, within_s)}
        macs = self._network.neighbours()
        return Outcome(
            src=self._me,
            seen=tuple(
                self._report(each, macs)
                for dst, each in edges.items()
                if dst in whole or _tried(each)
            ),
            skipped=tuple(dst for dst in edges if dst not in whole),
        )

    async def answering(self, dsts: Iterable[int]) -> frozenset[int]:
        """Which of ``dsts`` answer this host now, each on one port; within 6 s."""

        async def answers(dst: int) -> bool:
            ports = self._hosts[dst].ports
            slot = next((slot for slot, port in enumerate(ports) if port), None)
            if slot is None or not self._can_be_tried(dst):
                return False
            found = await self._probe(dst, slot, FIRST)
            return found.how is None and self._numbers.get(found.uid) == dst

        asked = list(dsts)
        answered = await asyncio.gather(*map(answers, asked))
        return frozenset(dst for dst, is_there in zip(asked, answered, strict=True) if is_there)

    # --- edges ----------------------------------------------------------------------------------

    async def _first_edge(self, edge: _Edge) -> None:
        other = self._hosts[edge.dst]
        wanted = schedule.slots(len(self._hosts), self._me, edge.dst, len(other.ports) - 1)
        wanted = [slot for slot in wanted if other.ports[slot]]
        if not wanted:
            return
        slot, *waiting = wanted
        found = await self._probe(edge.dst, slot, FIRST, _PINGS, wire.DATA_BYTES)
        edge.out_s, edge.in_s = found.out_s, found.in_s
        self._note(edge, slot, found)
        if edge.failed and slot not in edge.passed and not _lost_data(edge):
            # Spread: ports beside each other may be one blocked range.
            few = [waiting[len(waiting) * each // _DEAD_AFTER] for each in range(_DEAD_AFTER)]
            few = few if len(waiting) > _DEAD_AFTER else waiting
            await self._ports(edge, few, FIRST)
            waiting = [each for each in waiting if each not in few]
            if not edge.passed:
                return
            await self._whole(edge, FIRST, _PINGS)
        if edge.passed and not _lost_data(edge):
            await self._packet(edge, FIRST)
        await self._ports(edge, waiting, FIRST)

    async def _second_edge(self, edge: _Edge, share: int) -> None:
        """Where nothing passes, ``share`` more ports are tried, from local ports far apart."""
        ports = self._hosts[edge.dst].ports
        every = [slot for slot, port in enumerate(ports) if port]
        # Spread over the range: what a firewall leaves open is among the first, if it is much.
        first, before = every[::_SPREAD], self._passed.get(edge.dst, [])
        if not {*before} & {*first}:
            first += before[:1]  # where that fails as well, nothing passes any more
        rest = [slot for slot in every if slot not in first]
        _, steady = await asyncio.gather(self._ports(edge, first, SECOND), self._fails_again(edge))
        if not edge.passed and {*edge.failed.values()} <= {*LOST}:
            tried = rest[:: -(-len(rest) // share)] if rest else []
            await self._from_spread(edge, tried)
            rest = [slot for slot in rest if slot not in tried]
        if not edge.passed:
            return
        if scattered(edge.failed, edge.passed) or "silent" in edge.failed.values():
            await self._repeated(edge, 1)
            if edge.lost >= LOSSES:
                self._fail_still(edge, steady - {*edge.passed})
                edge.repeated = True
                return  # what else fails, fails by chance
        patience = FIRST if edge.failed else SECOND
        slot = await self._whole(edge, patience, _PINGS_AGAIN)
        if edge.passed and not _lost_data(edge):
            await self._packet(edge, patience)
        if _lost_data(edge) or edge.dst in self._lost_data:
            await self._sizes(edge, slot)
        await self._ports(edge, rest, FIRST)
        _, pass_from_others = await asyncio.gather(
            self._repeated(edge), self._pass_from_others(edge)
        )
        known = {slot: passes for slot, passes in pass_from_others.items() if slot in edge.failed}
        known |= dict.fromkeys(steady.intersection(edge.passed), True)
        self._fail_still(edge, steady.intersection(edge.passed))
        for slot in edge.unanswered.intersection(edge.failed) if edge.passed else ():
            del edge.failed[slot]  # the network has carried what it was given
        edge.repeated = True
        edge.by_source = 2 * sum(known.values()) > len(known)

    async def _whole(self, edge: _Edge, patience: Patience, pings: int) -> int:
        """Much data over a port that passes, which is returned."""
        slot = self._passing(edge)
        found = await self._probe(edge.dst, slot, patience, pings, wire.DATA_BYTES)
        edge.out_s, edge.in_s = found.out_s, found.in_s
        self._note(edge, slot, found)
        return slot

    async def _packet(self, edge: _Edge, patience: Patience) -> None:
        """One packet of the largest size: much data may pass in others where a card cuts it up."""
        slot, size = self._passing(edge), self._largest(edge.dst)
        self._note(edge, slot, await self._probe(edge.dst, slot, patience, 0, self._payload(size)))

    async def _repeated(self, edge: _Edge, times: int = _REPEATS) -> None:
        """What failed here and there, from and to the same ports: what passes now was lost."""
        if not doubtful(edge.failed, edge.passed):
            return
        unsure = [slot for slot, how in edge.failed.items() if how in LOST]

        async def one(slot: int) -> None:
            async with self._connections:
                port = edge.sources.get(slot, 0)
                found = await self._probe(edge.dst, slot, FIRST, source_port=port)
                if found.how == "own":
                    # The kernel keeps a local port back for a minute once a connection has stood.
                    found = await self._probe(edge.dst, slot, FIRST)
            if found.how is None:
                edge.lost += slot not in edge.unanswered
                del edge.failed[slot]
                edge.passed.append(slot)

        for _ in range(times):
            async with asyncio.TaskGroup() as group:
                for slot in unsure:
                    group.create_task(one(slot))
            unsure = [slot for slot in unsure if slot in edge.failed]

    async def _fails_again(self, edge: _Edge) -> set[int]:
        """Of what failed in the first round, the slots that still do from the same local ports.

        A local port that cannot be had again says nothing: the kernel keeps it back for a minute
        where the connection stood after all, as where this host itself did not run for some time.
        """
        before = self._lost.get(edge.dst, {})

        async def again(slot: int, port: int) -> bool:
            tries = [await self._from(edge, slot, port) for _ in range(_REPEATS)]
            return all(how in LOST for how in tries)

        failed = await asyncio.gather(*(again(slot, port) for slot, port in before.items()))
        return {slot for slot, fails in zip(before, failed, strict=True) if fails}

    def _fail_still(self, edge: _Edge, slots: Iterable[int]) -> None:
        """``slots`` fail from the local ports from which they failed in the first round."""
        edge.passed = [slot for slot in edge.passed if slot not in {*slots}]
        for slot in slots:
            edge.failed[slot], edge.sources[slot] = "timeout", self._lost[edge.dst][slot]

    async def _pass_from_others(self, edge: _Edge) -> dict[int, bool]:
        """Of what fails here and there, whether some of the slots pass from other local ports."""
        if not doubtful(edge.failed, edge.passed):
            return {}
        unsure = [slot for slot, how in edge.failed.items() if how in LOST]
        unsure = unsure[:: -(-len(unsure) // _ASKED)]
        tries = [
            (slot, self._local_port(slot, number)) for slot in unsure for number in range(_OTHERS)
        ]
        passed = await asyncio.gather(*(self._passes(edge, *each) for each in tries))
        found = {slot for (slot, _), passes in zip(tries, passed, strict=True) if passes}
        return {slot: slot in found for slot in unsure}

    def _local_port(self, slot: int, number: int) -> int:
        """By default the kernel takes ports beside each other, which one rule may have."""
        low, high = self._own.port_range
        return low + (slot * _STEP + number * _STEP**2) % max(1, high - low)

    async def _from_spread(self, edge: _Edge, slots: Iterable[int]) -> None:
        """``slots`` from a local port each: a rule without state drops answers to some, too."""

        async def one(slot: int) -> None:
            source_port = self._local_port(slot, 0)
            async with self._connections:
                found = await self._probe(edge.dst, slot, FIRST, source_port=source_port)
            self._note(edge, slot, found)

        async with asyncio.TaskGroup() as group:
            for slot in slots:
                group.create_task(one(slot))

    async def _passes(self, edge: _Edge, slot: int, source_port: int) -> bool:
        how = await self._from(edge, slot, source_port)
        return how != "own" and how not in LOST

    async def _from(self, edge: _Edge, slot: int, source_port: int) -> How | None:
        async with self._connections:
            return (await self._probe(edge.dst, slot, FIRST, source_port=source_port)).how

    async def _ports(self, edge: _Edge, slots: Iterable[int], patience: Patience) -> None:
        async def one(slot: int) -> None:
            async with self._connections:
                self._note(edge, slot, await self._probe(edge.dst, slot, patience))

        async with asyncio.TaskGroup() as group:
            for slot in slots:
                group.create_task(one(slot))

    async def _sizes(self, edge: _Edge, slot: int) -> None:
        """The largest packet that passes both ways, and the next size, which does not."""
        other = self._hosts[edge.dst].place
        if other is None:
            return
        largest = self._largest(edge.dst)
        for size in sorted({*(each for each in SIZES if each < largest), largest}):
            segment = size - _HEADERS[other.family]
            for _ in range(_TIMES):
                found = await self._probe(
                    edge.dst, slot, SIZE, 0, self._payload(size), segment=segment
                )
                if found.how is None:
                    edge.passed_mtu = size
                    break
            else:
                if await self._loses(edge, slot):
                    break
                edge.beyond_mtu = size
                if found.how is not None and found.how.startswith("large"):
                    # Even if the kernel got all of it through, later and in smaller packets.
                    self._note(edge, slot, found)
                return
        for each, how in list(edge.failed.items()):
            if how in _LARGE:  # not for its size
                edge.stalled = True
                del edge.failed[each]
                edge.passed.append(each)

    async def _loses(self, edge: _Edge, slot: int) -> bool:
        """Whether a size that has passed fails now: it is not for its size, then."""
        payload = self._payload(edge.passed_mtu)
        for _ in range(_PASSES if edge.passed_mtu else 0):
            if (await self._probe(edge.dst, slot, SIZE, 0, payload)).how is not None:
                return True
        return False

    @staticmethod
    def _passing(edge: _Edge) -> int:
        return min(edge.passed, key=lambda each: (each == 0, each))

    def _largest(self, dst: int) -> int:
        """The largest packet that both ends are set to, in bytes."""
        ends = (self._own.place, self._hosts[dst].place)
        return min((each.mtu for each in ends if each and each.mtu), default=_ETHERNET)

    def _payload(self, size: int) -> int:
        """What one packet of ``size`` bytes carries."""
        family = self._own.place.family if self._own.place else 6
        return max(1, size - _HEADERS[family] - _TIMESTAMPS)

    async def _probe(
        self,
        dst: int,
        slot: int,
        patience: Patience,
        pings: int = 0,
        data_bytes: int = 0,
        *,
        segment: int = 0,
        source_port: int = 0,
    ) -> Probe:
        other, own = self._hosts[dst], self._own
        assert other.place is not None  # see _can_be_tried
        assert own.place is not None
        for _ in range(_LATE):
            found = await self._network.probe(
                other.place.address,
                other.ports[slot],
                own_uid=own.uid,
                place=own.place,
                patience=patience,
                pings=pings,
                data_bytes=data_bytes,
                segment=segment,
                source_port=source_port,
            )
            if found.late != "here":
                return found
        return replace(found, how="own")

    def _note(self, edge: _Edge, slot: int, found: Probe) -> None:
        how = found.how
        if found.source_port:
            edge.sources[slot] = found.source_port
        who = self._numbers.get(found.uid)
        if found.uid and who != edge.dst:
            how = "foreign" if who is None else "other"
            edge.other = -1 if who is None else who
        if how is None:
            edge.sent, edge.resent = edge.sent + found.sent, edge.resent + found.resent
            edge.opening += found.opening
            edge.passed.append(slot) if slot not in edge.passed else None
            edge.rtt_ms = found.rtt_ms if found.rtt_ms >= 0 else edge.rtt_ms
            return
        if how == "own":
            return  # this host's lack says nothing of the edge
        if slot in edge.passed:
            edge.passed.remove(slot)
        edge.failed[slot] = how
        (edge.unanswered.add if found.late else edge.unanswered.discard)(slot)
        source = edge.source or found.source
        edge.source = source or self._network.source_towards(self._address(edge.dst))
        edge.says = edge.says or found.says
        if how in _LARGE:
            edge.rtt_ms = found.rtt_ms if found.rtt_ms >= 0 else edge.rtt_ms

    # --- what is around them --------------------------------------------------------------------

    @property
    def _own(self) -> Facts:
        return self._hosts[self._me]

    def _address(self, dst: int) -> str:
        place = self._hosts[dst].place
        return place.address if place else ""

    def _can_be_tried(self, dst: int) -> bool:
        """Not where the address leads back here: what is wrong with it is known without a probe."""
        address = self._address(dst)
        own = {each.address for each in self._own.addresses}
        return bool(address and self._hosts[dst].ports) and not (
            machine.leads_here(address) or address in own
        )

    async def _all(
        self, edges: list[_Edge], tried: object, at_once: int, within_s: float
    ) -> list[int]:
        """Try each of ``edges``, so many at once; the hosts whose edges were looked at wholly."""
        waiting, done = iter(edges), list[int]()

        async def walk() -> None:
            for edge in waiting:
                edge.begun = True
                await tried(edge)  # type: ignore[operator]
                done.append(edge.dst)

        walks = [asyncio.ensure_future(walk()) for _ in range(min(at_once, len(edges)))]
        if walks:
            _, late = await asyncio.wait(walks, timeout=within_s)
            for each in late:
                each.cancel()
            results = await asyncio.gather(*walks, return_exceptions=True)
            for result in results:
                if isinstance(result, Exception):
                    raise result
        return done

    def _report(self, edge: _Edge, macs: Mapping[str, str]) -> Seen:
        return edge.seen(macs.get(self._address(edge.dst), "") if edge.failed else "")

    def _macs_agree(self, macs: Mapping[str, str]) -> int:
        others = [each for each in self._hosts if each is not self._own]
        places = [(each.place.address, each.macs) for each in others if each.place]
        return sum(macs.get(address) in known for address, known in places)


def _usual(times: list[float]) -> float:
    """The lower quartile: more than half of a host's edges may be slow. -1 where there is none."""
    return sorted(times)[(len(times) - 1) // 4] if times else -1.0


def _tried(edge: _Edge) -> bool:
    return bool(edge.failed or edge.passed)


def _lost_data(edge: _Edge) -> bool:
    return any(how in _LARGE for how in edge.failed.values())


def _lost_from(edge: _Edge) -> dict[int, int]:
    """The slots that nothing came back from, and the local ports of those connections."""
    return {
        slot: edge.sources[slot]
        for slot, how in edge.failed.items()
        if how == "timeout" and slot in edge.sources
    }


def _notable(edge: _Edge) -> bool:
    slow = edge.rtt_ms > NOTABLE_RTT_MS or max(edge.out_s, edge.in_s) > NOTABLE_DATA_S
    return bool(edge.failed) or slow or edge.resent >= NOTED
