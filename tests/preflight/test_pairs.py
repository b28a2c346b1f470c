"""Which two hosts try a collective together, and which do not."""

from __future__ import annotations

from ncclops.preflight.edges.model import Cause, Facts, Place, Verdict
from ncclops.preflight.model import Finding, Status
from ncclops.preflight.pairs import Pair, find

BAD = Finding(check="gpu.ecc", status=Status.FAIL, subject="GPU 3", read="2 errors", wanted="none")


def facts(number: int, gpus: int = 8, *findings: Finding) -> Facts:
    place = Place(interface="eth0", address=f"10.0.0.{number}", prefix=24, family=4)
    return Facts(
        name=f"n{number}",
        uid=f"{number:032x}",
        place=place,
        ports=(29500, 40000 + number),
        gpus=gpus,
        findings=findings,
    )


def test_neighbours_are_pairs_and_the_first_serves_the_store() -> None:
    verdict = Verdict(hosts=tuple(facts(number) for number in range(5)))
    for number, first in ((0, True), (1, False)):
        assert find(verdict, f"10.0.0.{number}") == Pair(
            first=first, peer=f"n{1 - number}", gpus=8, address="10.0.0.0", port=40000
        )
    assert find(verdict, "10.0.0.3") == Pair(
        first=False, peer="n2", gpus=8, address="10.0.0.2", port=40002
    )
    assert find(verdict, "10.0.0.4") is None, "the last of an odd number"
    assert find(verdict, "10.0.0.9") is None, "no host of these"


def test_both_have_to_be_fit_and_alike_and_all_edges_to_work() -> None:
    for other in (facts(1, 4), facts(1, 0), facts(1, 8, BAD)):
        hosts = (facts(0), other)
        assert find(Verdict(hosts=hosts), "10.0.0.0") is None
        assert find(Verdict(hosts=hosts), "10.0.0.1") is None
    dead = Cause(kind="unreachable", severity="FAIL", shape="edge", symptom="dead", a=(0,), b=(1,))
    verdict = Verdict(hosts=(facts(0), facts(1)), causes=(dead,))
    assert find(verdict, "10.0.0.0") is None
