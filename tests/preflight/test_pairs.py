"""Which two hosts run a collective together, round by round, and whom that convicts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ncclops.preflight.edges.collectives import ROUNDS, next_round, with_pairs
from ncclops.preflight.edges.model import Cause, Facts, Offer, PairTried, Place, Verdict
from ncclops.preflight.edges.sentences import tell
from ncclops.preflight.model import Finding, NodeReport, Status
from ncclops.preflight.pairs import offer
from ncclops.profiles.model import PreflightNeeds

BAD = Finding(check="gpu.ecc", status=Status.FAIL, subject="GPU 3", read="2 errors", wanted="none")
EIGHT = Offer(backend="nccl", ranks=8, model="NVIDIA H200", least_gbps=250.0)


def facts(number: int, given: Offer | None = EIGHT, *findings: Finding) -> Facts:
    place = Place(interface="eth0", address=f"10.0.0.{number}", prefix=24, family=4)
    return Facts(
        name=f"n{number}",
        uid=f"{number:032x}",
        place=place,
        ports=(29500, 41000, 42000, 43000),
        offer=given,
        findings=findings,
    )


def cluster(count: int, given: Offer | None = EIGHT) -> Verdict:
    return Verdict(hosts=tuple(facts(number, given) for number in range(count)))


Rule = Callable[[int, int], bool | float]


def tried_out(verdict: Verdict, rule: Rule) -> tuple[Verdict, list[tuple[tuple[int, int], ...]]]:
    """All rounds, where ``rule`` says whether a pair does well, or how many GB/s it reaches."""
    tried: list[PairTried] = []
    rounds = []
    for _ in range(ROUNDS):
        if not (pairs := next_round(verdict, tried)):
            break
        assert len({host for pair in pairs for host in pair}) == 2 * len(pairs)
        rounds.append(pairs)
        for a, b in pairs:
            came = rule(a, b)
            well, gbps = (came, 300.0) if isinstance(came, bool) else (True, came)
            tried.append(PairTried(a=a, b=b, well=well, gbps=gbps, says="" if well else "no end"))
    found = with_pairs(verdict, tried)
    assert all(told.what and told.remedy for told in tell(found))
    return found, rounds


def blamed(verdict: Verdict, kind: str = "collective") -> set[tuple[int, ...]]:
    """The hosts, and the pairs, that causes of ``kind`` are about."""
    return {(*each.a, *each.b) for each in verdict.causes if each.kind == kind}


def bad_hosts(*bad: int) -> Rule:
    return lambda a, b: not {a, b} & {*bad}


def test_neighbours_are_pairs_and_one_round_is_all_where_nothing_fails() -> None:
    found, rounds = tried_out(cluster(6), bad_hosts())
    assert rounds == [((0, 1), (2, 3), (4, 5))]
    assert found.causes == ()
    assert [each.well for each in found.pairs] == [True] * 3


def test_the_last_of_an_odd_number_is_tried_as_well() -> None:
    assert tried_out(cluster(5), bad_hosts())[1] == [((0, 1), (2, 3)), ((0, 4),)]


@pytest.mark.parametrize("count", [3, 4, 5, 6, 9, 64])
def test_a_host_that_fails_with_everybody_is_convicted_and_no_other(count: int) -> None:
    for bad in {0, 1, 2, count - 1}:
        found, _ = tried_out(cluster(count), bad_hosts(bad))
        assert blamed(found) == {(bad,)}, bad
        assert found.excluded == [f"n{bad}"]


@pytest.mark.parametrize("count", [3, 4, 6, 64])
def test_a_pair_that_fails_for_itself_is_the_pair(count: int) -> None:
    found, _ = tried_out(cluster(count), lambda a, b: (a, b) != (0, 1))
    assert blamed(found) == {(0, 1)}
    assert found.excluded == []


def test_of_two_hosts_neither_is_convicted() -> None:
    found, rounds = tried_out(cluster(2), lambda a, b: False)
    assert len(rounds) == 1
    assert blamed(found) == {(0, 1)}
    assert found.failed
    assert found.excluded == []


def test_two_bad_hosts_of_one_pair_and_of_two_pairs_are_both_convicted() -> None:
    for bad in ((0, 1), (0, 2), (1, 2), (4, 7)):
        assert blamed(tried_out(cluster(8), bad_hosts(*bad))[0]) == {(each,) for each in bad}


def test_where_all_pairs_fail_it_is_no_host() -> None:
    found, _ = tried_out(cluster(6), lambda a, b: False)
    (cause,) = found.causes
    assert (cause.severity, cause.shape, cause.hosts) == ("FAIL", "several", ())


def test_a_slow_host_is_said_and_excludes_nobody() -> None:
    found, _ = tried_out(cluster(8), lambda a, b: 100.0 if 5 in (a, b) else 320.0)
    assert blamed(found, "collective-bandwidth") == {(5,)}
    assert not found.failed
    assert found.excluded == []


def test_where_all_are_slow_it_is_one_remark_and_one_round() -> None:
    found, rounds = tried_out(cluster(6), lambda a, b: 90.0)
    assert len(rounds) == 1
    (cause,) = found.causes
    assert (cause.kind, cause.severity) == ("collective-bandwidth", "WARN")


def test_without_a_figure_only_half_of_the_usual_is_slow() -> None:
    given = Offer(backend="nccl", ranks=8, model="NVIDIA GH200 480GB")
    found, _ = tried_out(cluster(8, given), lambda a, b: 20.0 if 2 in (a, b) else 45.0)
    assert blamed(found, "collective-bandwidth") == {(2,)}
    assert tried_out(cluster(8, given), lambda a, b: 30.0 if 2 in (a, b) else 45.0)[0].causes == ()


def test_what_cannot_be_told_convicts_nobody() -> None:
    tried = [PairTried(a=0, b=1, says="the other node's ranks did not come")]
    found = with_pairs(cluster(2), tried)
    assert [each.severity for each in found.causes] == ["CANNOT-TELL"]
    assert not found.failed


def test_hosts_that_are_accused_or_unlike_are_left_alone() -> None:
    four = Offer(backend="nccl", ranks=4, model="NVIDIA H200")
    hosts = (facts(0), facts(1, four), facts(2, None), facts(3, EIGHT, BAD), facts(4), facts(5))
    dead = Cause(kind="unreachable", severity="FAIL", shape="edge", symptom="dead", a=(4,), b=(2,))
    assert next_round(Verdict(hosts=hosts), ()) == ((0, 4),)
    assert next_round(Verdict(hosts=hosts, causes=(dead,)), ()) == ((0, 5),)


def reported(check: str, status: Status) -> NodeReport:
    found = Finding(check=check, status=status, subject="host", read="as it is", wanted="")
    return NodeReport(host="n0", time=0.0, findings=(found,))


def test_a_node_without_gpus_offers_a_process_and_one_that_is_not_fit_nothing() -> None:
    found = offer(reported("host.shm", Status.OK), {}, PreflightNeeds())
    assert found == Offer(backend="gloo", ranks=1)
    for report in (
        reported("gpu.count", Status.OK),  # GPUs, of which no all_reduce was asked for
        reported("gpu.all-reduce", Status.FAIL),
        reported("gpu.all-reduce", Status.CANNOT_TELL),
    ):
        assert offer(report, {}, PreflightNeeds()) is None
