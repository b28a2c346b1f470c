"""Which two hosts try a collective together, and which do not."""

from __future__ import annotations

import asyncio
from functools import partial

import msgspec

from ncclops.preflight.edges.model import Cause, Facts, PairsTried, PairTried, Place, Verdict
from ncclops.preflight.model import Finding, Status
from ncclops.preflight.pairs import Pair, both_rounds, find, second

BAD = Finding(check="gpu.ecc", status=Status.FAIL, subject="GPU 3", read="2 errors", wanted="none")


def facts(number: int, gpus: int = 8, *findings: Finding) -> Facts:
    place = Place(interface="eth0", address=f"10.0.0.{number}", prefix=24, family=4)
    return Facts(
        name=f"n{number}",
        uid=f"{number:032x}",
        place=place,
        ports=(29500, 41000 + number, 40000 + number),
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


def test_a_suspect_is_tried_with_a_host_that_did_well() -> None:
    verdict = Verdict(hosts=tuple(facts(number) for number in range(8)))
    tried = PairsTried(well={0: True, 1: True, 2: False, 3: True, 4: True, 5: True, 6: True})
    found = {number: second(verdict, tried, number) for number in range(8)}
    assert {n: each.peer for n, each in found.items() if each} == {
        0: "n2",
        2: "n0",
        1: "n3",
        3: "n1",
    }
    assert found[2] == Pair(first=False, peer="n0", gpus=8, address="10.0.0.0", port=41000)
    assert second(verdict, PairsTried(well={0: False, 1: False}), 0) is None, "nobody did well"


def test_the_host_that_fails_with_two_is_convicted() -> None:
    """Host 1 fails with everybody: only it is told so."""
    verdict = Verdict(hosts=tuple(facts(number) for number in range(4)))

    def try_with(number: int, pair: Pair | None) -> Finding | None:
        if pair is None:
            return None
        status = Status.FAIL if "n1" in (pair.peer, f"n{number}") else Status.OK
        return msgspec.structs.replace(BAD, check="gpu.pair", status=status, read="no end")

    async def every() -> list[tuple[tuple[Finding, ...], bool]]:
        told, all_told = dict[int, bool](), asyncio.Event()

        async def tell(own: PairTried) -> PairsTried:
            assert own.well is not None
            told[own.number] = own.well
            all_told.set() if len(told) == 4 else None
            await all_told.wait()
            return PairsTried(well=told)

        return await asyncio.gather(
            *(both_rounds(verdict, n, partial(try_with, n), tell) for n in range(4))
        )

    found = asyncio.run(every())
    assert [convicted for _, convicted in found] == [False, True, False, False]
    assert [[str(each.status) for each in findings] for findings, _ in found] == [
        ["FAIL", "OK"],
        ["FAIL", "FAIL"],
        ["OK"],
        ["OK"],
    ]
    assert "it is this host: n3 did well" in found[1][0][1].read
