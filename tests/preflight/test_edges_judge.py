"""From what hosts have told and seen to the verdict: the cause is the smallest, and no other."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from ncclops.preflight.edges import schedule
from ncclops.preflight.edges.explain import Edge, explain
from ncclops.preflight.edges.judge import judge
from ncclops.preflight.edges.model import (
    Address,
    Cause,
    Facts,
    How,
    Outcome,
    Place,
    Plan,
    Seen,
    Verdict,
)
from ncclops.preflight.edges.schedule import edges_between
from ncclops.preflight.edges.sentences import tell
from ncclops.preflight.model import Traits

PORTS = tuple(range(33000, 60000, 1000))
N = 6


def host(number: int, *, net: int = 0, interface: str = "eth0", **more: Any) -> Facts:
    """A host with one interface, and what ``more`` says."""
    address = f"10.0.{net}.{number + 1}"
    place = Place(
        interface=interface,
        address=address,
        prefix=24,
        family=4,
        mtu=1500,
        mac=f"02:00:00:00:00:{number:02x}",
    )
    given: dict[str, Any] = {
        "name": f"n{number}",
        "uid": f"{number:032x}",
        "rank": number,
        "boot_id": str(number),
        "place": place,
        "addresses": (Address(interface=interface, address=address, prefix=24, family=4),),
        "ports": (29500, *PORTS),
        "port_range": (32768, 60999),
    }
    return Facts(**(given | more))


def with_address(facts: Facts, interface: str, address: str) -> Facts:
    more = Address(interface=interface, address=address, prefix=24, family=4)
    return msgspec.structs.replace(facts, addresses=(*facts.addresses, more))


def dead(dst: int, how: How = "timeout", **more: Any) -> Seen:
    return Seen(dst=dst, failed=dict.fromkeys((0, 1, 9, 18), how), **more)


def outcomes(seen: dict[Edge, Seen], n: int = N, **more: Any) -> dict[int, Outcome]:
    by_src: dict[int, list[Seen]] = {number: [] for number in range(n)}
    for (src, _), each in seen.items():
        by_src[src].append(each)
    return {
        src: Outcome(src=src, seen=tuple(each), rtt_ms=0.2, **more) for src, each in by_src.items()
    }


def judged(
    hosts: Iterable[Facts], seen: dict[Edge, Seen], again: dict[Edge, Seen] | None = None
) -> Verdict:
    given = tuple(hosts)
    first = outcomes(seen, len(given))
    second = outcomes(seen if again is None else again, len(given))
    verdict = judge(given, first, second, expected=len(given), least=len(given))
    assert all(each.what and each.remedy for each in tell(verdict))
    return verdict


def failures(verdict: Verdict) -> list[Cause]:
    return [each for each in verdict.causes if each.severity == "FAIL"]


def ports_seen(dst: int, failed: Iterable[int], sources: dict[int, int]) -> Seen:
    lost = set(failed)
    passed = tuple(slot for slot in range(1, len(PORTS) + 1) if slot not in lost)
    return Seen(
        dst=dst,
        failed=dict.fromkeys(lost, "timeout"),
        passed=passed,
        sources=sources,
        repeated=True,
    )


def test_a_firewall_without_state_is_one_cause() -> None:
    """Host 2 drops what comes to its ports 40000 to 49999: what is opened there, and answers."""
    blocked = [slot for slot, port in enumerate(PORTS, 1) if 40000 <= port < 50000]
    seen = {(src, 2): ports_seen(2, blocked, {}) for src in range(N) if src != 2}
    for dst in range(N):
        if dst != 2:
            sources = {slot: 33000 + (slot * 7919 + dst * 613) % 27000 for slot in range(1, 28)}
            lost = [slot for slot, port in sources.items() if 40000 <= port < 50000]
            seen[2, dst] = ports_seen(dst, lost, sources)
    (cause,) = failures(judged(map(host, range(N)), seen))
    assert (cause.kind, cause.shape, cause.a, cause.edges) == ("ports", "host-in", (2,), 10)
    assert (cause.blocked[0], cause.blocked[-1]) == (40000, 49000)
    (told,) = tell(judged(map(host, range(N)), seen))
    assert "keeps no state" in told.what


def test_ports_that_fail_both_ways_for_themselves_are_both_said() -> None:
    """Two rules, one for each direction: local ports do not explain what fails."""
    seen = {}
    for other in (0, 1, 3, 4, 5):
        seen[other, 2] = ports_seen(2, (5, 6, 7), dict.fromkeys(range(1, 28), 58000))
        seen[2, other] = ports_seen(other, (20, 21), dict.fromkeys(range(1, 28), 33000))
    causes = failures(judged(map(host, range(N)), seen))
    assert {cause.kind for cause in causes} == {"ports"}
    assert sum(cause.edges for cause in causes) == 10


def test_losses_are_no_rule_for_ports() -> None:
    """What failed here and there passed when it was repeated."""
    seen, again = {}, {}
    for other in (0, 1, 3, 4):
        for src, dst in ((2, other), (other, 2)):
            seen[src, dst] = ports_seen(dst, (3 + src, 9, 14 + dst), {})
            left = ports_seen(dst, (9,), {})
            again[src, dst] = msgspec.structs.replace(left, lost=4)
    again[2, 5] = seen[2, 5] = ports_seen(5, (), {})  # the sixth host was lucky, the first time
    verdict = judged(map(host, range(5)), {e: s for e, s in seen.items() if 5 not in e}, again)
    (cause,) = failures(verdict)
    assert (cause.kind, cause.shape, cause.a) == ("loss", "host", (2,))


def test_ports_that_accept_and_never_answer_are_one_cause() -> None:
    """A rule that drops what carries data to all ports but MASTER_PORT: nothing fails at random."""
    seen = {
        (src, 3): Seen(
            dst=3, failed=dict.fromkeys((3, 9, 14, 22, 25), "silent"), passed=(0,), repeated=True
        )
        for src in (0, 1, 2, 4)
    }
    (cause,) = judged(map(host, range(5)), seen).causes
    assert (cause.kind, cause.shape, cause.hosts) == ("ports", "host-in", (3,))


@pytest.mark.parametrize("never", [(), (1, 3)], ids=["some-passed", "none-from-two"])
def test_a_host_that_takes_no_more_connections_is_one_cause(never: tuple[int, ...]) -> None:
    """As a rule that counts them: the first ones have passed, and none does at the second look."""
    first, again = {}, {}
    for src in (0, 1, 3, 4):
        passed = () if src in never else (1, 7, 8)
        failed: dict[int, How] = dict.fromkeys((12, 14, 18, 22), "timeout")
        first[src, 2] = Seen(dst=2, failed=failed, passed=passed)
        again[src, 2] = Seen(dst=2, failed=dict.fromkeys((0, 1, 5, 9, 15, 20), "timeout"))
    verdict = judged(map(host, range(5)), first, again)
    (cause,) = failures(verdict)
    assert (cause.kind, cause.shape, cause.a) == ("unreachable", "host-in", (2,))
    assert verdict.excluded == ["n2"]
    (told,) = tell(verdict)
    assert "the first ones have passed" in told.what


def test_large_packets_that_are_lost_between_one_host_and_some_are_one_cause() -> None:
    """A switch's port with a small MTU: what comes from other subnets is told of it by ICMP."""
    seen = {
        edge: Seen(
            dst=edge[1],
            failed=dict.fromkeys((1, 9, 14, 22), "large-out"),
            passed_mtu=576,
            beyond_mtu=1280,
        )
        for edge in ((3, 4), (4, 3), (4, 5), (5, 4))
    }
    (cause,) = judged((host(number, net=number // 3) for number in range(N)), seen).causes
    assert (cause.kind, cause.a, cause.b, cause.edges) == ("mtu", (4,), (3, 5), 4)
    assert not cause.hosts


def test_an_edge_of_which_nobody_has_looked_why_is_not_known_to_work() -> None:
    seen = {(src, 2): dead(2) for src in (1, 3)}
    for src in (0, 4):
        seen[src, 2] = msgspec.structs.replace(ports_seen(2, (8, 12, 20), {}), repeated=False)
    (cause,) = failures(judged(map(host, range(5)), seen))
    assert (cause.kind, cause.shape, cause.a) == ("unreachable", "host-in", (2,))


def test_what_fails_here_and_there_and_was_not_looked_into_is_told() -> None:
    seen = {(0, 1): msgspec.structs.replace(ports_seen(1, (5, 18), {}), repeated=False)}
    verdict = judged(map(host, range(N)), seen)
    (cause,) = verdict.causes
    assert (cause.kind, cause.severity, cause.a, cause.b) == ("flaky", "CANNOT-TELL", (0,), (1,))
    (told,) = tell(verdict)
    assert "no time to look why" in told.what


def test_what_was_not_looked_into_is_told_beside_a_cause_of_other_hosts() -> None:
    seen = {(src, 2): dead(2) for src in range(N) if src != 2}
    seen[0, 1] = msgspec.structs.replace(ports_seen(1, (5, 18), {}), repeated=False)
    causes = judged(map(host, range(N)), seen).causes
    assert [(each.kind, each.a, each.b) for each in causes] == [
        ("unreachable", (2,), ()),
        ("flaky", (0,), (1,)),
    ]


def test_an_edge_whose_last_few_tries_fail_beside_a_rule_for_ports_is_of_that_rule() -> None:
    """A rule without state drops some of the answers as well: a few tries may all fail."""
    blocked = [slot for slot, port in enumerate(PORTS, 1) if port < 45000]
    first = {(src, 2): ports_seen(2, blocked, {}) for src in (0, 1, 3, 4)}
    again = dict(first)
    failed: dict[int, How] = dict.fromkeys((3, 9, 12), "timeout")
    first[5, 2] = Seen(dst=2, failed=failed, passed=(18,))
    again[5, 2] = Seen(dst=2, failed=dict.fromkeys((1, 3, 6, 9, 12, 18), "timeout"))
    (cause,) = failures(judged(map(host, range(N)), first, again))
    assert (cause.kind, cause.shape, cause.a) == ("ports", "host-in", (2,))


def test_what_time_ran_out_on_is_tried_again_after_what_failed() -> None:
    """And counts only by what comes of that: where time runs out again, nothing is known."""
    first = outcomes({(0, 3): Seen(dst=3), (0, 4): dead(4)})
    first[0] = msgspec.structs.replace(first[0], skipped=(2, 3))
    assert schedule.again(N, first) == {0: (4, 3)}
    hosts = tuple(map(host, range(N)))
    some: dict[int, How] = {1: "timeout", 2: "timeout", 3: "timeout", 4: "timeout"}
    seen = Seen(dst=3, failed=some, passed=(6, 7))
    first = {**outcomes({}), 0: Outcome(src=0, skipped=(3,), seen=(seen,))}
    for second, unknown, kinds in (
        (Outcome(src=0, seen=(seen,), skipped=(3,)), 1, []),
        (Outcome(src=0, seen=(msgspec.structs.replace(seen, repeated=True),)), 0, ["ports"]),
        (Outcome(src=0), 1, []),
    ):
        verdict = judge(hosts, first, {**outcomes({}), 0: second}, expected=N, least=N)
        assert (verdict.unknown_edges, [each.kind for each in verdict.causes]) == (unknown, kinds)


def test_data_that_one_end_alone_measures_as_slow_is_not_slow() -> None:
    """The other end has measured as well, and reports only what takes long."""
    slow = {(0, 1): Seen(dst=1, passed=(1,), out_s=0.7, in_s=0.001)}
    first = outcomes(slow, data_s=0.001)
    hosts = tuple(map(host, range(N)))
    assert judge(hosts, first, {}, expected=N, least=N).causes == ()
    # Nobody knows where that end had no time to look.
    first[1] = msgspec.structs.replace(first[1], skipped=(0,))
    (cause,) = judge(hosts, first, {}, expected=N, least=N).causes
    assert (cause.kind, cause.a, cause.b) == ("bandwidth", (0,), (1,))


def test_in_a_small_job_all_that_failed_is_tried_again() -> None:
    """An edge between two hosts with which most edges fail, as well."""
    seen = {edge: dead(edge[1]) for edge in edges_between(range(N), (0, 1))}
    seen |= {edge: dead(edge[1]) for edge in edges_between((0, 1), range(N))}
    tried = schedule.again(N, outcomes(seen))
    assert {(src, dst) for src, dsts in tried.items() for dst in dsts} == {*seen}


def test_a_rule_of_many_ranges_is_one_cause() -> None:
    """What host 2 opens fails from some local ports, and passes from others: not by chance."""
    seen, rule = {}, (2, 5, 9, 13, 14, 20, 24)
    for other in (0, 1, 3, 4, 5):
        seen[other, 2] = ports_seen(2, rule, {})
        mine = ports_seen(other, (3 + other, 17, 22), {})
        seen[2, other] = msgspec.structs.replace(mine, by_source=True)
    (cause,) = failures(judged(map(host, range(N)), seen))
    assert (cause.kind, cause.shape, cause.a, cause.edges) == ("ports", "host-in", (2,), 10)


def test_a_host_that_stood_still_has_lost_nothing_at_random() -> None:
    """Its connections failed for some seconds, and all of them passed the second time."""
    seen, again = {}, {}
    for other in (0, 1, 3, 4, 5):
        for src, dst in ((3, other), (other, 3)):
            if src != dst:
                seen[src, dst] = dead(dst, "silent")
                again[src, dst] = Seen(dst=dst, passed=tuple(range(len(PORTS) + 1)), rtt_ms=0.2)
    verdict = judged(map(host, range(N)), seen, again)
    assert [(each.kind, each.severity) for each in verdict.causes] == [("flaky", "CANNOT-TELL")]


@pytest.mark.parametrize("unanswered", [(), (3, 9)])
def test_requests_that_arrived_and_pass_later_are_no_losses(unanswered: tuple[int, ...]) -> None:
    sources = {1: 40_100, 3: 40_200, 5: 40_300, 9: 40_400, 12: 40_500}
    failed: dict[int, How] = {3: "silent", 9: "silent"}
    first = Seen(dst=1, failed=failed, passed=(1, 5, 12), sources=sources, unanswered=unanswered)
    second = Seen(dst=1, passed=(1, 3, 5, 9, 12), repeated=True)
    verdict = judged(map(host, range(N)), {(0, 1): first}, {(0, 1): second})
    assert [each.kind for each in verdict.causes] == ["flaky" if unanswered else "loss"]


def test_data_that_stalled_does_not_say_that_large_packets_pass() -> None:
    """One edge of host 4 lost data twice, and no size of packets could be said."""
    ports = tuple(range(2, len(PORTS) + 1))
    seen, again = {}, {}
    for other in (0, 1, 2, 3, 5):
        for src, dst in ((4, other), (other, 4)):
            lost = Seen(dst=dst, failed={1: "large-out"}, passed=ports, rtt_ms=0.2)
            seen[src, dst] = lost
            again[src, dst] = msgspec.structs.replace(lost, passed_mtu=1400, repeated=True)
    again[4, 2] = Seen(dst=2, passed=(0, 1, *ports), rtt_ms=0.2, stalled=True, repeated=True)
    (cause,) = failures(judged(map(host, range(N)), seen, again))
    assert (cause.kind, cause.shape, cause.a) == ("mtu", "host", (4,))


def test_ports_that_may_have_failed_by_chance_are_unknown() -> None:
    """For lack of time they were not repeated."""
    seen = {
        edge: msgspec.structs.replace(ports_seen(edge[1], (5,), {}), repeated=False)
        for edge in ((0, 1), (2, 1), (3, 1))
    }
    verdict = judged(map(host, range(N)), seen)
    assert {each.severity for each in verdict.causes} == {"CANNOT-TELL"}
    assert verdict.unknown_edges == 3


def test_what_there_was_no_time_to_repeat_is_lost_like_the_rest() -> None:
    """Three hosts lose connections to host 1 here and there; one had time to repeat them."""
    seen = {(src, 1): ports_seen(1, (5, 9, 14), {}) for src in (0, 2, 3)}
    again = {
        edge: msgspec.structs.replace(each, repeated=edge == (0, 1), lost=4 * (edge == (0, 1)))
        for edge, each in seen.items()
    }
    verdict = judged(map(host, range(4)), seen, again)
    assert [(each.kind, each.shape, each.a) for each in verdict.causes] == [("loss", "host", (1,))]
    assert verdict.causes[0].facts["way"] == "unknown"


def test_one_connection_that_was_lost_convicts_nobody() -> None:
    once = ports_seen(1, (4,), {})
    again = msgspec.structs.replace(ports_seen(1, (), {}), lost=1)
    verdict = judged(map(host, range(N)), {(0, 1): once}, {(0, 1): again})
    assert [(each.kind, each.severity) for each in verdict.causes] == [("flaky", "CANNOT-TELL")]


def passing(dst: int, resent: int) -> Seen:
    return Seen(dst=dst, passed=(0, 1, 9), rtt_ms=0.2, sent=120, resent=resent)


def test_a_host_whose_packets_are_lost_is_named_though_all_connections_pass() -> None:
    """TCP sends again what is lost; so do NCCL's sockets, at a tenth of the speed."""
    into, out = edges_between(range(N), [3]), edges_between([3], range(N))
    lossy = {edge: passing(edge[1], 18) for edge in out} | {e: passing(e[1], 5) for e in into}
    (cause,) = judged(map(host, range(N)), lossy).causes
    assert (cause.kind, cause.severity, cause.shape, cause.hosts) == ("loss", "FAIL", "host", (3,))
    little = {edge: passing(edge[1], 5) for edge in into | out}
    (cause,) = judged(map(host, range(N)), little).causes
    assert (cause.severity, cause.hosts) == ("WARN", ())


def test_the_way_that_packets_are_lost_is_told_where_it_is_known() -> None:
    """What opens connections is sent again whichever way it is lost, or its answer is. A host's own
    firewall says so to TCP, which then counts no data as lost."""
    into, out = edges_between(range(N), [3]), edges_between([3], range(N))

    def told(lost_to: int, lost_from: int) -> Cause:
        lost = dict.fromkeys(into, 8 + lost_to) | dict.fromkeys(out, 8 + lost_from)
        seen = {
            edge: msgspec.structs.replace(passing(edge[1], count), opening=8)
            for edge, count in lost.items()
        }
        (cause,) = judged(map(host, range(N)), seen).causes
        return cause

    found = {(to, by): told(to, by) for to in (0, 30) for by in (0, 30)}
    assert {each: cause.shape for each, cause in found.items()} == {
        (30, 0): "host-in",
        (0, 30): "host-out",
        (30, 30): "host",
        (0, 0): "host",
    }
    assert [cause.facts["way"] for cause in found.values()].count("unknown") == 1
    assert found[0, 0].facts["way"] == "unknown"


def test_what_opens_connections_is_lost_to_the_host_that_counts_them() -> None:
    """The others accept all that it opens."""
    seen = {
        (src, 3): msgspec.structs.replace(passing(3, 20), opening=20, passed=(*range(12),))
        for src in range(N)
        if src != 3
    }
    (cause,) = judged(map(host, range(N)), seen).causes
    assert (cause.kind, cause.shape, cause.facts["way"]) == ("loss", "host-in", "in")


def test_dead_edges_of_one_host_are_one_cause_where_they_fail_alike() -> None:
    """Nobody is convicted: the host reaches others."""

    def told(*hows: How) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
        seen = {(1, dst): dead(dst, how) for dst, how in zip((2, 3), hows, strict=True)}
        causes = failures(judged(map(host, range(N)), seen, seen))
        assert not any(each.hosts for each in causes)
        return [(each.shape, each.a, each.b) for each in causes]

    assert told("timeout", "timeout") == [("group", (1,), (2, 3))]
    assert told("timeout", "refused") == [("edge", (1,), (2,)), ("edge", (1,), (3,))]


def test_a_host_that_loses_few_packets_is_named_though_not_every_edge_shows_it() -> None:
    """As from a rule of its own OUTPUT chain, which TCP hardly notices. Nobody is convicted."""
    few = {(1, dst): passing(dst, resent) for dst, resent in ((0, 5), (3, 4), (4, 6))}
    (cause,) = judged(map(host, range(N)), few).causes
    assert (cause.kind, cause.severity, cause.shape, cause.a) == ("loss", "WARN", "host-out", (1,))
    many = {(dst, 1): passing(1, 40) for dst in (0, 3, 4)}
    (cause,) = judged(map(host, range(N)), many).causes
    assert (cause.severity, cause.shape, cause.hosts) == ("FAIL", "host-in", ())
    both = few | {(2, 1): passing(1, 5)}
    (cause,) = judged(map(host, range(N)), both).causes
    assert (cause.severity, cause.shape, cause.a) == ("WARN", "host", (1,))
    # Hosts of one of two subnets alone: it may lie between these.
    subnets = (host(number, net=int(number > 2)) for number in range(N))
    (cause,) = judged(subnets, {(1, 3): few[1, 3], (1, 4): few[1, 4]}).causes
    assert (cause.shape, cause.a, cause.b, cause.hosts) == ("group", (1,), (3, 4), ())


@pytest.mark.parametrize(("n", "bad"), [(6, (1, 4)), (8, (1, 4, 6)), (5, (0, 2))])
def test_each_of_few_hosts_that_lose_packets_is_named(n: int, bad: tuple[int, ...]) -> None:
    """They show on more than half of all edges; those between the others are quiet."""
    mine = [edge for edge in edges_between(range(n), range(n)) if {*bad} & {*edge}]
    lossy = {edge: passing(edge[1], 18) for edge in mine}
    causes = judged(map(host, range(n)), lossy).causes
    assert {(c.kind, c.severity, c.shape, c.hosts) for c in causes} == {
        ("loss", "FAIL", "host", (each,)) for each in bad
    }
    # One edge of one of them does not show it: named, and not convicted.
    del lossy[bad[0], 3]
    causes = judged(map(host, range(n)), lossy).causes
    assert {(c.shape, c.a, c.hosts) for c in causes} == {
        ("host", (each,), () if each == bad[0] else (each,)) for each in bad
    }


def test_losses_that_leave_no_host_out_are_no_few_hosts_own() -> None:
    """Between two subnets, of which one has two hosts; and on some edges of all hosts."""
    subnets = [host(number, net=int(number > 3)) for number in range(N)]
    across = edges_between(range(4), (4, 5)) | edges_between((4, 5), range(4))
    (cause,) = judged(subnets, {edge: passing(edge[1], 18) for edge in across}).causes
    assert (cause.kind, cause.shape, cause.hosts) == ("loss", "group", ())
    rings = {(a, (a + k) % N): passing((a + k) % N, 18) for a in range(N) for k in (1, 2)}
    (cause,) = judged(map(host, range(N)), rings).causes
    assert (cause.shape, cause.hosts) == ("everything", ())


def test_a_queue_that_is_full_on_one_edge_and_loses_packets_on_the_others_is_the_hosts() -> None:
    lossy = {(3, dst): passing(dst, 20) for dst in (0, 1, 2, 4)}
    lossy[3, 5] = msgspec.structs.replace(passing(5, 0), out_s=5.0, in_s=0.002)
    lossy[5, 3] = msgspec.structs.replace(passing(3, 0), out_s=0.002, in_s=5.0)
    (cause,) = judged(map(host, range(N)), lossy).causes
    assert (cause.kind, cause.severity, cause.shape, cause.hosts) == (
        "loss",
        "FAIL",
        "host-out",
        (3,),
    )


def test_packets_that_are_lost_once_convict_nobody() -> None:
    """As where many hosts at once are too much for a switch, or the path's MTU is being learnt."""
    first = {edge: passing(edge[1], 12) for edge in edges_between(range(N), range(N))}
    again = {edge: passing(edge[1], 0) for edge in first}
    assert judged(map(host, range(N)), first, again).causes == ()
    not_again = {edge: seen for edge, seen in again.items() if edge[0] < 2}
    assert judged(map(host, range(N)), first, not_again).causes == ()


def test_an_edge_that_is_dead_beside_lost_packets_stays_a_cause_of_its_own() -> None:
    lossy = {edge: passing(edge[1], 20) for edge in edges_between([3], range(N))}
    seen = lossy | {(0, 1): dead(1), (1, 0): dead(0)}
    assert {each.kind for each in judged(map(host, range(N)), seen).causes} == {
        "loss",
        "unreachable",
    }


def test_an_interface_that_one_host_lacks() -> None:
    """The others listen on ib0, and all of them have an address where the one listens."""
    hosts = [
        with_address(host(number, net=9, interface="ib0"), "eth0", f"10.0.0.{number + 1}")
        for number in range(N)
    ]
    hosts[2] = host(2)
    seen = {(2, dst): dead(dst) for dst in range(N) if dst != 2}
    verdict = judged(hosts, seen)
    (cause,) = failures(verdict)
    assert (cause.kind, cause.hosts) == ("interface-missing", (2,))
    assert "NCCL_SOCKET_IFNAME=eth0" in tell(verdict)[0].remedy


def test_another_family_is_named_as_such() -> None:
    """Two hosts have IPv6 alone; the others would listen on their IPv4 addresses."""
    hosts = []
    for number in range(N):
        six = Address(interface="eth0", address=f"fd00::{number + 1}", prefix=64, family=6)
        facts = msgspec.structs.replace(
            host(number), addresses=(*host(number).addresses[: number < 4], six)
        )
        if number >= 4:
            place = Place(interface="eth0", address=six.address, prefix=64, family=6, mtu=1500)
            facts = msgspec.structs.replace(facts, place=place)
        hosts.append(facts)
    seen = {(src, dst): dead(dst, "unreachable") for src in (4, 5) for dst in range(4)}
    verdict = judged(hosts, seen)
    (cause,) = failures(verdict)
    assert cause.kind == "wrong-interface"
    assert "NCCL_SOCKET_FAMILY=AF_INET6" in tell(verdict)[0].remedy


@pytest.mark.parametrize("common", [True, False])
def test_one_host_without_the_others_family_is_named_as_such(common: bool) -> None:
    """It has IPv6 alone; of the others, which listen on IPv4, all have IPv6 as well, or none."""
    six = [
        Address(interface="eth0", address=f"fd00::{number + 1}", prefix=64, family=6)
        for number in range(N)
    ]
    link = Address(interface="eth0", address="169.254.7.7", prefix=16, family=4)
    hosts = [host(number) for number in range(N)]
    if common:
        hosts = [
            msgspec.structs.replace(each, addresses=(*each.addresses, address))
            for each, address in zip(hosts, six, strict=True)
        ]
    place = Place(interface="eth0", address=six[4].address, prefix=64, family=6, mtu=1500)
    hosts[4] = msgspec.structs.replace(hosts[4], place=place, addresses=(link, six[4]))
    edges = edges_between([4], range(N)) | (set() if common else edges_between(range(N), [4]))
    verdict = judged(hosts, {edge: dead(edge[1], "unreachable") for edge in edges})
    (cause,) = failures(verdict)
    assert (cause.kind, cause.hosts) == ("unreachable", (4,))
    (told,) = tell(verdict)
    assert "n4 has no IPv4 address" in told.what
    assert "an IPv4 address" in told.remedy
    assert ("NCCL_SOCKET_FAMILY=AF_INET6" in told.remedy) is common


def test_no_more_connections_have_failed_than_were_tried() -> None:
    """A rule that counts connections lets few pass: most fail again when they are repeated."""
    losing = Seen(dst=2, passed=(0, 1), failed={9: "timeout"}, lost=12, sent=60, resent=30)
    seen = {(src, 2): losing for src in range(N) if src != 2}
    (cause,) = failures(judged(map(host, range(N)), seen))
    assert cause.kind == "loss"
    assert int(cause.facts["lost"]) <= int(cause.facts["tried"])


def test_a_bridge_with_one_address_on_every_host_excludes_nobody() -> None:
    hosts = []
    for number in range(N):
        place = Place(interface="cni0", address="10.244.0.1", prefix=24, family=4, mtu=1500)
        facts = with_address(host(number), "cni0", "10.244.0.1")
        hosts.append(msgspec.structs.replace(facts, place=place))
    verdict = judged(hosts, {})
    (cause,) = failures(verdict)
    assert (cause.kind, cause.hosts) == ("address-everywhere", ())
    assert cause.facts["whose"] == "n0, n1, n2, n3 and 2 more"
    hosts[0] = msgspec.structs.replace(hosts[0], conflict="02:00:00:00:00:99")
    (cause,) = (each for each in failures(judged(hosts, {})) if not each.facts.get("their_mac"))
    assert cause.kind == "duplicate-address"


def test_two_hosts_with_one_address_that_fall_silent_are_one_cause() -> None:
    """Each takes the other's packets, so the meeting loses both of them."""
    hosts = [host(number) for number in range(N)]
    place, address = hosts[4].place, hosts[4].addresses
    assert place is not None
    hosts[4] = msgspec.structs.replace(hosts[4], conflict="02:00:00:00:00:05")
    own = msgspec.structs.replace(place, mac="02:00:00:00:00:05")
    hosts[5] = host(5, place=own, addresses=address, conflict=place.mac)
    given = outcomes({}, 4)
    verdict = judge(tuple(hosts), given, given, expected=N, least=N)
    (cause,) = failures(verdict)
    assert (cause.kind, cause.a) == ("duplicate-address", (4, 5))
    assert verdict.failed_edges == 0


def test_a_host_that_falls_silent_as_another_machine_has_its_address_is_one_cause() -> None:
    hosts = [host(number) for number in range(N)]
    hosts[4] = msgspec.structs.replace(hosts[4], conflict="02:00:00:00:00:99")
    given = {src: each for src, each in outcomes({}).items() if src != 4}
    (cause,) = judge(tuple(hosts), given, given, expected=N, least=N).causes
    assert (cause.kind, cause.severity, cause.hosts) == ("duplicate-address", "FAIL", (4,))
    # One that answers lives: nobody is convicted.
    causes = judge(tuple(hosts), given, given, expected=N, least=N, answering={4}).causes
    assert [(each.kind, each.severity, each.hosts) for each in causes] == [
        ("duplicate-address", "WARN", ()),
        ("late", "CANNOT-TELL", ()),
    ]


def test_an_address_that_another_host_has_beside_its_own_is_one_cause() -> None:
    """Host 2 has that of host 4 as well, and answers for it: neither is at fault by its edges."""
    hosts = [host(number) for number in range(N)]
    hosts[2] = msgspec.structs.replace(
        with_address(hosts[2], "eth0", "10.0.0.5"), macs=("02:00:00:00:00:02",)
    )
    hosts[4] = msgspec.structs.replace(hosts[4], conflict="02:00:00:00:00:02")
    (cause,) = failures(judged(hosts, {(0, 4): dead(4, "other", other=2)}))
    assert (cause.kind, cause.facts["other"]) == ("duplicate-address", "n2")


def test_two_hosts_with_one_hardware_address() -> None:
    """Said where connections with them fail: containers of one machine may share it well."""
    hosts = [host(number) for number in range(N)]
    place = hosts[2].place
    assert place is not None
    mac = "02:00:00:00:00:03"
    hosts[2] = msgspec.structs.replace(hosts[2], place=msgspec.structs.replace(place, mac=mac))
    assert not judged(hosts, {}).causes
    seen = {(0, 2): ports_seen(2, (3, 4, 17), {}), (3, 2): dead(2)}
    (cause,) = failures(judged(hosts, seen))
    assert (cause.kind, cause.a) == ("duplicate-mac", (2, 3))


def test_a_host_with_few_descriptors_convicts_no_edge() -> None:
    hosts = [host(number) for number in range(N)]
    hosts[3] = host(3, files=64, ports=())
    seen = {(0, 3): dead(3, "silent"), (1, 3): dead(3, "silent")}
    (cause,) = failures(judged(hosts, seen))
    assert (cause.kind, cause.hosts) == ("files", (3,))


def test_one_host_with_a_wrong_neighbour_convicts_no_address() -> None:
    """The others find host 3 where it is: it is one host's table."""
    seen = {
        (1, 3): dead(3, "unreachable", mac="02:00:00:00:00:99"),
        (3, 1): dead(1),
    }
    hosts = [host(number, macs=(f"02:00:00:00:00:{number:02x}",)) for number in range(N)]
    first = {
        src: msgspec.structs.replace(each, macs_agree=4) for src, each in outcomes(seen).items()
    }
    verdict = judge(tuple(hosts), first, first, expected=N, least=N)
    (cause,) = failures(verdict)
    assert (cause.kind, cause.shape) == ("unreachable", "pair")
    assert "ip neigh" in tell(verdict)[0].remedy


@pytest.mark.parametrize(
    ("usual", "edges", "slow"),
    [
        (0.2, {(0, 1)}, True),
        (20.0, {(0, 1)}, False),
        (80.0, {(0, 1)}, False),
        (80.0, edges_between(range(N), range(N)), True),
    ],
)
def test_what_is_slow_goes_by_what_is_usual(usual: float, edges: set[Edge], slow: bool) -> None:
    """60 ms among hosts that are 20 ms apart are no finding; if all edges take that, they are."""
    seen = {edge: Seen(dst=edge[1], passed=(1,), rtt_ms=60.0) for edge in edges}
    first = {
        src: msgspec.structs.replace(each, rtt_ms=usual) for src, each in outcomes(seen).items()
    }
    verdict = judge(tuple(map(host, range(N))), first, {}, expected=N, least=N)
    assert [each.kind for each in verdict.causes] == (["slow"] if slow else [])


def test_a_host_with_little_bandwidth_is_said_and_not_convicted() -> None:
    """1 Mbit/s out of host 2, seen from both ends; where all are so slow, nobody is an outlier."""
    seen = {(2, dst): Seen(dst=dst, passed=(1,), out_s=0.5, in_s=0.01) for dst in (0, 1, 3, 4, 5)}
    seen |= {(src, 2): Seen(dst=2, passed=(1,), out_s=0.01, in_s=0.5) for src in (0, 1, 3, 4, 5)}
    for usual, kinds in ((0.001, ["bandwidth"]), (0.4, [])):
        first = {
            src: msgspec.structs.replace(each, data_s=usual) for src, each in outcomes(seen).items()
        }
        verdict = judge(tuple(map(host, range(N))), first, {}, expected=N, least=N)
        assert [each.kind for each in verdict.causes] == kinds
        for cause in verdict.causes:
            assert (cause.severity, cause.shape, cause.a) == ("WARN", "host-out", (2,))
            assert not cause.hosts
        assert all("1.0 Mbit/s" in each.what for each in tell(verdict))


def test_what_waits_for_a_host_with_little_bandwidth_is_no_finding_of_its_own() -> None:
    """Host 4's data to host 2 is said to have arrived late, behind what host 2 sends."""
    seen = {(2, dst): Seen(dst=dst, passed=(1,), out_s=0.5, in_s=0.01) for dst in (0, 1, 3, 4, 5)}
    seen |= {(src, 2): Seen(dst=2, passed=(1,), out_s=0.01, in_s=0.5) for _, src in [*seen]}
    seen[4, 2] = Seen(dst=2, passed=(1,), out_s=0.3, in_s=0.5)
    seen[2, 4] = Seen(dst=4, passed=(1,), out_s=0.5, in_s=0.3)
    first = {
        src: msgspec.structs.replace(each, data_s=0.001) for src, each in outcomes(seen).items()
    }
    (cause,) = judge(tuple(map(host, range(N))), first, {}, expected=N, least=N).causes
    assert (cause.kind, cause.shape, cause.a) == ("bandwidth", "host-out", (2,))


def test_of_a_host_that_has_fallen_silent_nothing_is_counted() -> None:
    """Neither its edges nor another round of them: the others need not wait for it."""
    seen = {(src, 3): dead(3, "silent") for src in (0, 1, 2, 4, 5)}
    first = {src: each for src, each in outcomes(seen).items() if src != 3}
    assert schedule.again(N, first) == {}
    verdict = judge(tuple(map(host, range(N))), first, {}, expected=N, least=N)
    assert [each.kind for each in failures(verdict)] == ["silent"]
    assert (verdict.failed_edges, verdict.unknown_edges) == (0, 10)


def test_a_host_whose_words_are_lost_loses_packets() -> None:
    """Others reach it now and then: it lives, so it is not said to be silent."""
    lossy = {}
    for src in (0, 1, 2, 4, 5):
        left = ports_seen(3, (2 + src, 9, 21 - src), {})
        lossy[src, 3] = msgspec.structs.replace(left, lost=4)
    first = {src: each for src, each in outcomes(lossy).items() if src != 3}
    assert set(schedule.again(N, first).values()) == {(3,)}
    verdict = judge(tuple(map(host, range(N))), first, first, expected=N, least=N)
    (cause,) = failures(verdict)
    assert (cause.kind, cause.a, cause.hosts) == ("loss", (3,), (3,))


def test_a_host_that_dies_between_the_rounds_is_silent() -> None:
    """What refuses connections then is no firewall."""
    seen = {(src, 3): ports_seen(3, (4, 5, 6, 7), {}) for src in (0, 1, 2, 4, 5)}
    refused = {edge: dead(3, "refused") for edge in seen}
    first, second = outcomes(seen), outcomes(refused)
    del second[3]
    verdict = judge(tuple(map(host, range(N))), first, second, expected=N, least=N)
    assert [each.kind for each in failures(verdict)] == ["silent"]


def test_a_host_that_answers_and_has_not_reported_is_not_left_out() -> None:
    """As one that is so busy that its report comes too late."""
    first = outcomes({})
    for late, second in ((dict(first), {}), (first, dict(first))):
        (second or late).pop(3)
        given = tuple(map(host, range(N)))
        (silent,) = judge(given, late, second, expected=N, least=N).causes
        assert (silent.kind, silent.severity, silent.hosts) == ("silent", "FAIL", (3,))
        verdict = judge(given, late, second, expected=N, least=N, answering={3})
        (cause,) = verdict.causes
        assert (cause.kind, cause.severity, cause.hosts) == ("late", "CANNOT-TELL", ())
        assert "is not left out" in tell(verdict)[0].remedy
        assert not verdict.failed


def never(edge: Edge) -> bool:
    return False


def test_a_host_and_some_of_the_others_are_one_finding() -> None:
    """Without a conviction: host 5 works with hosts 0 and 4."""
    failed = edges_between((1, 2, 3), (5,)) | edges_between((5,), (1, 2, 3))
    (claim,) = explain(range(N), failed, never)
    assert claim.shape == "group"
    assert claim.both_ways
    assert {claim.a, claim.b} == {(1, 2, 3), (5,)}


def test_a_subnet_that_reaches_nobody_is_one_finding() -> None:
    """Not its own hosts either: one claim, not one for each network."""
    failed = edges_between((0, 1, 2), range(N))
    groups = {"subnet": {"10.0.1.0/24": [0, 1, 2], "10.0.2.0/24": [3, 4, 5]}}
    (claim,) = explain(range(N), failed, never, groups)
    assert (claim.shape, claim.a, claim.by) == ("group", (0, 1, 2), "subnet: 10.0.1.0/24")


@pytest.mark.parametrize(
    "said",
    [
        {"src": 2},
        {"src": 99},
        {"seen": (Seen(dst=N),)},
        {"seen": (Seen(dst=1),)},
        {"seen": (dead(-1),)},
        {"seen": (Seen(dst=2, failed={400: "timeout"}),)},
        {"seen": (Seen(dst=2, passed=(-30,)),)},
        {"seen": (Seen(dst=2, failed={1: "other"}, other=55),)},
        {"skipped": (N,)},
        {"names": {55: ("10.0.0.1",)}},
    ],
    ids=str,
)
def test_a_host_that_reports_what_it_cannot_have_seen_is_not_heard(said: dict[str, Any]) -> None:
    plan = Plan(hosts=tuple(map(host, range(N))))
    good = Outcome(src=1, seen=(dead(2, sources={1: 40000}),), skipped=(0,), names={3: ("::1",)})
    assert plan.may_say(1, good)
    assert not plan.may_say(1, msgspec.structs.replace(good, **said))


@pytest.mark.parametrize("address", ["", "n1", "999.0.0.1", "10.0.0.1/8"])
@pytest.mark.parametrize("kind", [Address, Place])
def test_a_host_whose_address_is_none_is_not_heard(
    kind: type[Address] | type[Place], address: str
) -> None:
    told = {"interface": "eth0", "address": address, "prefix": 24, "family": 4}
    with pytest.raises(msgspec.ValidationError, match="does not appear to be an IPv4"):
        msgspec.convert(told, kind)


MAKE = Traits(
    make="R760xa, H100", memory_mib=2_063_000, gpus=8, ports=8, driver="570.1", nccl="2.28"
)


def of_traits(*changed: dict[str, Any]) -> list[tuple[str, tuple[int, ...], str]]:
    """What differs between hosts of one make, but for what is ``changed``."""
    made = [msgspec.structs.replace(MAKE, **each) for each in changed]
    hosts = tuple(host(number, traits=each) for number, each in enumerate(made))
    outcomes = {number: Outcome(src=number, rtt_ms=0.1) for number in range(len(hosts))}
    verdict = judge(hosts, outcomes, {})
    assert verdict.excluded == []
    assert all(told.remedy for told in tell(verdict))
    return [(each.facts["what"], each.a, each.facts["read"]) for each in verdict.causes]


def test_a_host_that_differs_from_its_like_is_named() -> None:
    assert of_traits(*[{}] * 5) == []
    lost_module = {"memory_mib": 2_063_000 * 31 // 32}
    assert of_traits({}, {}, lost_module, {}) == [("memory_mib", (2,), "1998531")]
    assert of_traits({}, {}, {}, {"gpus": 7, "ports": 7}) == [
        ("gpus", (3,), "7"),
        ("ports", (3,), "7"),
    ]
    assert of_traits(*[{}] * 7, {"driver": "565.2"}) == [("driver", (7,), "565.2")]
    other = {"make": "R7525, A100"}
    assert of_traits(*[{}] * 3, {**other, "nccl": "2.21"}) == [("nccl", (3,), "2.21")]


def of_addresses(*addresses: tuple[str, ...]) -> list[tuple[tuple[int, ...], str]]:
    """Which of hosts with ``addresses`` on their RDMA ports share some, and which."""
    hosts = tuple(
        host(number, traits=Traits(rdma=each), boot_id=str(number))
        for number, each in enumerate(addresses)
    )
    outcomes = {number: Outcome(src=number, rtt_ms=0.1) for number in range(len(hosts))}
    verdict = judge(hosts, outcomes, {})
    assert verdict.excluded == []
    assert all(told.remedy for told in tell(verdict))
    assert {each.severity for each in verdict.causes} <= {"WARN"}
    return [(each.a, each.facts["values"]) for each in verdict.causes]


def test_hosts_that_share_an_rdma_address_are_named_once() -> None:
    own = [(f"10.1.0.{number}", f"10.2.0.{number}") for number in range(6)]
    assert of_addresses(*own) == []
    assert of_addresses(*own[:5], own[1]) == [((1, 5), "10.1.0.1, 10.2.0.1")]
    within_each = [("192.168.0.1", *each) for each in own]
    assert of_addresses(*within_each) == []


@pytest.mark.parametrize(
    "changed",
    [
        [{}, {}, {"memory_mib": 1_030_000}, {}],  # bought so
        [{}, {}, {"memory_mib": 2_062_990}, {"memory_mib": 2_099_000}],
        [*[{}] * 3, *[{"make": "R7525, A100", "memory_mib": 1_800_000, "gpus": 4}] * 3],
        [{}, {}, {}, {"make": "R7525, A100", "driver": "535", "gpus": 4, "ports": 1}],
        [*[{}] * 4, *[{"driver": "575.4", "nccl": "2.29", "ports": 4}] * 4],  # half of a roll-out
        [{}, {}, {"gpus": 7}],  # too few to say what is usual
        [*[{"make": ""}] * 3, {"make": "", "gpus": 1, "driver": "535"}],
        [{}, {}, {}, {"memory_mib": 0, "gpus": 0, "driver": "", "nccl": ""}],  # not known
    ],
)
def test_a_cluster_of_several_kinds_has_no_odd_one(changed: list[dict[str, Any]]) -> None:
    assert of_traits(*changed) == []


def test_a_firewall_that_lets_few_ports_pass_everywhere_is_one_cause() -> None:
    """Most connections wait for their limit, so no host has the time to look why some fail."""
    passing = (19, 20)
    rest = [slot for slot in range(1, len(PORTS) + 1) if slot not in passing]
    seen = {
        (src, dst): Seen(dst=dst, failed=dict.fromkeys(rest, "timeout"), passed=passing)
        for src, dst in edges_between(range(N), range(N))
    }
    verdict = judged(map(host, range(N)), seen)
    (cause,) = failures(verdict)
    assert (cause.kind, cause.shape, cause.hosts) == ("ports", "everything", ())
    assert f"all ports but {PORTS[18]} to {PORTS[19]}" in tell(verdict)[0].what
    # The same number at other ports on each edge: that may be chance.
    for number, edge in enumerate(sorted(seen)):
        there = tuple(1 + (number * 7 + each * 9) % len(PORTS) for each in range(2))
        rest = [slot for slot in range(1, len(PORTS) + 1) if slot not in there]
        seen[edge] = Seen(dst=edge[1], failed=dict.fromkeys(rest, "timeout"), passed=there)
    assert not failures(judged(map(host, range(N)), seen))


def test_two_hosts_that_lack_an_interface_are_named_and_not_the_four_that_have_it() -> None:
    hosts = [
        with_address(host(number, net=9, interface="ib0"), "eth0", f"10.0.0.{number + 1}")
        for number in range(4)
    ]
    hosts += [host(4), host(5)]
    seen = {edge: dead(edge[1]) for edge in edges_between((4, 5), range(4))}
    (cause,) = failures(judged(hosts, seen))
    assert (cause.kind, cause.a, cause.facts["theirs"]) == ("interface-missing", (4, 5), "ib0")


def test_an_edge_is_shown_with_both_of_its_addresses() -> None:
    (told,) = tell(judged(map(host, range(N)), {(1, 2): dead(2)}))
    assert told.evidence == "1 edge; 10.0.0.2 to 10.0.0.3"


def test_the_better_interface_is_looked_for_in_each_subnet() -> None:
    """That of host 5 is in the smaller one."""
    hosts = [host(number, net=int(number > 3)) for number in range(7)]
    hosts[5] = with_address(host(5, net=8, interface="ibmgmt"), "eth0", "10.0.1.6")
    seen = {(src, 5): dead(5) for src in range(7) if src != 5}
    (cause,) = failures(judged(hosts, seen))
    assert (cause.kind, cause.facts["better"], cause.hosts) == ("wrong-interface", "eth0", (5,))


def test_losses_of_an_address_that_another_machine_has_are_no_cause_of_their_own() -> None:
    """Packets go now to one, now to the other."""
    hosts = [host(number) for number in range(N)]
    hosts[3] = msgspec.structs.replace(hosts[3], conflict="02:00:00:00:00:99")
    seen = {edge: passing(edge[1], 18) for edge in ((2, 3), (3, 2))}
    (cause,) = judged(hosts, seen).causes
    assert (cause.kind, cause.severity, cause.a) == ("duplicate-address", "FAIL", (3,))


def test_one_edge_that_loses_beside_edges_that_failed_once_convicts_nobody() -> None:
    """What failed once towards the others and then passed may be chance."""
    into = edges_between(range(N), (1,))
    once: dict[int, How] = {4: "timeout"}
    first = {edge: Seen(dst=1, failed=once, passed=(0, 1, 9)) for edge in into}
    again = {edge: Seen(dst=1, passed=(0, 1, 4, 9), repeated=True) for edge in into}
    again[0, 1] = msgspec.structs.replace(again[0, 1], lost=3)
    (cause,) = judged(map(host, range(N)), first, again).causes
    assert (cause.kind, cause.a, cause.hosts) == ("loss", (1,), ())


def test_large_packets_that_passed_among_losses_may_have_passed_in_small_ones() -> None:
    """A host that loses packets behind a small MTU: the edges that carried data tell nothing."""
    out: dict[int, How] = {1: "large-out"}
    back: dict[int, How] = {1: "large-in"}
    bad = {
        edge: Seen(dst=edge[1], failed=failed, passed=(0, 2, 9), repeated=True)
        for dst in (0, 2, 3)
        for edge, failed in (((1, dst), out), ((dst, 1), back))
    }
    seen = bad | {edge: passing(edge[1], 18) for edge in ((1, 4), (4, 1), (1, 5), (5, 1))}
    sizes = [each for each in failures(judged(map(host, range(N)), seen)) if each.kind == "mtu"]
    assert [(each.shape, each.a) for each in sizes] == [("host-out", (1,))]


def test_ports_that_fail_last_where_most_connections_are_lost_are_no_rule_for_ports() -> None:
    """As under a rule that lets so many connections a second pass: at first all do."""
    first = {(src, 2): ports_seen(2, range(22, 28), {}) for src in (0, 1, 3, 4, 5)}
    again = {edge: msgspec.structs.replace(seen, lost=16) for edge, seen in first.items()}
    verdict = judged(map(host, range(N)), first, again)
    assert {each.kind for each in verdict.causes} == {"loss"}
