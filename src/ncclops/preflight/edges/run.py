"""From the first listener to the verdict: all edges of this host, with the others, in time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec

from ncclops.preflight.edges import known, machine, schedule
from ncclops.preflight.edges.judge import judge
from ncclops.preflight.edges.listener import Listener
from ncclops.preflight.edges.meeting import Meeting, Unmet, Where
from ncclops.preflight.edges.model import Again, Facts, Offer, Outcome, Plan, Verdict
from ncclops.preflight.edges.rounds import Rounds
from ncclops.preflight.model import Finding, Traits

# Names of so many hosts are looked up by each, and beyond that those of the next few.
_NAMES_UP_TO, _NAMES_OF = 64, 8
_LOOKUPS_AT_ONCE = 8


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long each part may take, in seconds; together they bound the whole.

    ``join``: until all hosts are there. ``first``, ``second``: of the rounds; what is not done by
    then is said to be unknown. ``slack``: for the slowest host's answer and the judging.
    """

    join: float = 60.0
    first: float = 18.0
    second: float = 22.0
    slack: float = 6.0

    @property
    def all(self) -> float:
        """The most that ``run`` takes, without what comes ``then``."""
        return self.join + self.first + self.second + 6 * self.slack


class Then(Protocol):
    """What hosts do after the verdict, in the same meeting: it takes ``most_s`` at most."""

    @property
    def most_s(self) -> float: ...

    async def __call__(
        self, meeting: Meeting, verdict: Verdict, me: int, arrivals: Mapping[int, int]
    ) -> Verdict:
        """The verdict with what has come of it. This is host ``me``; ``arrivals`` is how the
        meeting counts the hosts of the verdict, where this one gathers for all."""
        ...


def run(
    where: Where,
    *,
    environ: Mapping[str, str] | None = None,
    limits: Limits | None = None,
    name: str | None = None,
    findings: tuple[Finding, ...] = (),
    offer: Offer | None = None,
    traits: Traits | None = None,
    then: Then | None = None,
    note: Callable[[str], None] = lambda _: None,
) -> Verdict:
    """Meet the other hosts at ``where``, try all edges, and return the verdict that all get.

    ``environ`` is what NCCL will be given; ``name`` this host's for the others, and
    ``findings`` what its own checks have found and ``traits`` of what make it is, ``offer`` what it
    has for a collective with another host, which ``then`` runs; all hosts have to give it, or none.
    ``note`` is told how far it is. Raises ``Unmet`` where this host could not take part, within
    ``limits.all``.
    """
    limits = limits or Limits()
    given = os.environ if environ is None else environ
    part = _Part(where, given, limits, name, findings, offer, traits, then, note)
    return asyncio.run(_within(part.verdict(), limits.all + (then.most_s if then else 0.0)))


async def _within(verdict: object, limit_s: float) -> Verdict:
    try:
        return await asyncio.wait_for(verdict, limit_s)  # type: ignore[arg-type]
    except TimeoutError:
        raise Unmet(f"preflight of the edges did not end within {limit_s:.0f} s") from None


class _Part:
    """This host's part in one preflight."""

    def __init__(
        self,
        where: Where,
        environ: Mapping[str, str],
        limits: Limits,
        name: str | None,
        findings: tuple[Finding, ...],
        offer: Offer | None,
        traits: Traits | None,
        then: Then | None,
        note: Callable[[str], None],
    ) -> None:
        self._where, self._environ, self._limits = where, environ, limits
        self._name, self._findings, self._note = name, findings, note
        self._offer, self._traits, self._then = offer, traits, then
        self._arrivals: dict[int, int] = {}
        self._began = time.monotonic()

    async def verdict(self) -> Verdict:
        facts = await machine.read_facts(
            self._environ, rank=self._where.rank, name=self._name, findings=self._findings
        )
        facts = msgspec.structs.replace(facts, offer=self._offer, traits=self._traits)
        listener = Listener(facts.uid)
        place = machine.own_place(facts)
        if place is not None:
            port = machine.store_port(self._environ)
            try:
                await listener.start(place, facts.port_range, schedule.PORTS, port)
            except OSError as error:
                rule = f"{facts.rule}; {place.address}: {error.strerror or error}"
                facts = msgspec.structs.replace(facts, rule=rule)
        facts = msgspec.structs.replace(facts, ports=listener.ports)
        try:
            return await self._with_others(facts, listener)
        except Unmet as error:
            if facts.conflict and facts.place:
                claim = f"another machine, {facts.conflict}, has this host's address"
                raise Unmet(f"{claim} {facts.place.address}: {error}") from None
            raise
        finally:
            await listener.close()

    async def _with_others(self, facts: Facts, listener: Listener) -> Verdict:
        limits = self._limits
        deadline = time.monotonic() + limits.join
        meeting = await Meeting.join(self._where, limits.join)
        async with contextlib.aclosing(meeting):
            me, verdict = await self._met(meeting, facts, deadline)
            if self._then is None:
                return verdict
            await listener.close()  # its ports are wanted
            return await self._then(meeting, verdict, me, self._arrivals)

    async def _met(self, meeting: Meeting, facts: Facts, deadline: float) -> tuple[int, Verdict]:
        limits = self._limits
        await meeting.say("facts", facts, deadline - time.monotonic())
        self._note(f"met at {self._where.address}; waiting for {self._where.count} hosts")
        left, came = max(1.0, deadline - time.monotonic()), dict[int, Facts]()
        if meeting.gathers:
            came = await gather_facts(meeting, self._where.count, left, limits.slack)
            plan = Plan(hosts=_ordered(came.values()))
            await meeting.answer("plan", plan)
        else:
            plan = await meeting.hear("plan", Plan, left + limits.join + limits.slack)
        me = plan.numbers().get(facts.uid)
        if me is None:
            raise Unmet("this host came too late: the others had begun without it")
        return me, await self._rounds(meeting, plan, me, came)

    async def _rounds(
        self, meeting: Meeting, plan: Plan, me: int, facts: Mapping[int, Facts]
    ) -> Verdict:
        """``facts``: of those that have come, as the meeting counts them, where this host
        gathers."""
        limits, count = self._limits, self._where.count
        rounds = Rounds(plan, me)
        self._note(f"{len(plan.hosts)} hosts; each connects to each")
        began = time.monotonic()
        outcome, names = await asyncio.gather(
            rounds.first(limits.first), _names(plan, me, limits.first)
        )
        patience = limits.first + limits.slack
        await meeting.say("first", msgspec.structs.replace(outcome, names=names), patience)
        first: dict[int, Outcome] = {}
        if meeting.gathers:
            left = max(1.0, began + patience - time.monotonic())
            first = await self._outcomes("first", meeting, plan, facts, left)
            facts = {arrival: facts[arrival] for arrival in self._arrivals.values()}
            again = Again(edges=schedule.again(len(plan.hosts), first))
            await meeting.answer("again", again)
        else:
            again = await meeting.hear("again", Again, patience + limits.slack)
        began, edges = time.monotonic(), again.edges.get(me, ())
        if edges:
            self._note(f"edges tried once more: {len(edges)}")
        patience = limits.second + limits.slack
        await meeting.say("second", await rounds.second(edges, limits.second), patience)
        if not meeting.gathers:
            return await meeting.hear("verdict", Verdict, patience + limits.slack)
        second: dict[int, Outcome] = {}
        if again.edges:
            left = max(1.0, began + patience - time.monotonic())
            second = await self._outcomes("second", meeting, plan, facts, left)
        # One that is only late is no host to leave out.
        unheard = {*known.unheard(plan.hosts, first, second)}
        unheard -= known.sharing_an_address(plan.hosts)
        verdict = judge(
            plan.hosts,
            first,
            second,
            answering=await rounds.answering(unheard),
            missing=_missing(self._where, plan.hosts),
            expected=count,
            least=self._where.least,
            seconds=time.monotonic() - self._began,
        )
        await meeting.answer("verdict", verdict)
        return verdict

    async def _outcomes(
        self,
        topic: str,
        meeting: Meeting,
        plan: Plan,
        facts: Mapping[int, Facts],
        within_s: float,
    ) -> dict[int, Outcome]:
        """What hosts report of a round, by their numbers; one that reports what it cannot have
        seen, or for another host, is as if it had not."""
        numbers, told = plan.numbers(), dict[int, Outcome]()
        # The verdict needs no word of hosts that share an address, and theirs may be lost.
        sharing = known.sharing_an_address(plan.hosts)
        waited = [each for each, host in facts.items() if numbers[host.uid] not in sharing]
        heard = await meeting.gather(topic, Outcome, waited, within_s)
        heard |= await meeting.gather(topic, Outcome, facts.keys() - {*waited}, 0.0)
        for arrival, each in heard.items():
            if plan.may_say(numbers[facts[arrival].uid], each):
                told[each.src] = each
                self._arrivals[each.src] = arrival
        return told


async def gather_facts(
    meeting: Meeting, count: int, within_s: float, slack_s: float
) -> dict[int, Facts]:
    """What ``count`` hosts tell of themselves, as the meeting counts them.

    They have it at hand when they come: where all have come, and one tells of another machine with
    its address, what is not here after ``slack_s`` more is lost between the two.
    """
    deadline = time.monotonic() + within_s
    came = await meeting.gather("facts", Facts, range(count), min(within_s, slack_s))
    while len(came) < count and (left := deadline - time.monotonic()) > 0:
        is_lost = any(each.conflict for each in came.values()) and await meeting.all_came()
        late = [each for each in range(count) if each not in came]
        came |= await meeting.gather("facts", Facts, late, min(left, slack_s))
        if is_lost:
            break
    return came


def _ordered(hosts: object) -> tuple[Facts, ...]:
    """By their ranks; by name where not all have one."""
    listed: list[Facts] = list(hosts)  # type: ignore[call-overload]
    if all(each.rank is not None for each in listed):
        return tuple(sorted(listed, key=lambda each: (each.rank or 0, each.uid)))
    return tuple(sorted(listed, key=lambda each: (_natural(each.name), each.uid)))


def _natural(name: str) -> list[tuple[int, str]]:
    """So that n9 comes before n10."""
    words, digits = list[tuple[int, str]](), ""
    for letter in name + "\0":
        if letter.isdecimal():
            digits += letter
            continue
        if digits:
            words.append((int(digits), ""))
            digits = ""
        words.append((-1, letter))
    return words


def _missing(where: Where, hosts: tuple[Facts, ...]) -> tuple[str, ...]:
    """Who did not come, by name or by rank, as far as that is known."""
    if len(hosts) >= where.count:
        return ()
    names = {each.name.partition(".")[0] for each in hosts}
    if where.expected:
        return tuple(each for each in where.expected if each.partition(".")[0] not in names)
    ranks = {each.rank for each in hosts}
    if None in ranks:
        return ()
    return tuple(f"rank {rank}" for rank in range(where.count) if rank not in ranks)


async def _names(plan: Plan, me: int, within_s: float) -> dict[int, tuple[str, ...]]:
    """The hosts whose names stand here for addresses that are none of theirs."""
    n = len(plan.hosts)
    asked = schedule.peers(n, me) if n <= _NAMES_UP_TO else schedule.peers(n, me)[:_NAMES_OF]
    limit, wrong = asyncio.Semaphore(_LOOKUPS_AT_ONCE), dict[int, tuple[str, ...]]()

    async def look_up(dst: int) -> None:
        host = plan.hosts[dst]
        async with limit:
            found = await machine.lookup(host.name)
        if found and not {*found} & {each.address for each in host.addresses}:
            wrong[dst] = found

    try:
        async with asyncio.timeout(within_s), asyncio.TaskGroup() as group:
            for dst in asked:
                if plan.hosts[dst].name != plan.hosts[me].name:
                    group.create_task(look_up(dst))
    except TimeoutError:
        pass  # a name server that does not answer: nothing is known of the rest
    return dict(wrong)


__all__ = ["Limits", "Then", "Unmet", "Where", "run"]
