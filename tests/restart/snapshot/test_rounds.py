"""A round of snapshots: complete when all ranks have reported, and told to all where one cannot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import distributed as dist

from ncclops.restart._store.client import AdditionUnknown, Connection, StoreClient
from ncclops.restart.snapshot import SnapshotError
from ncclops.restart.snapshot._background import Background
from ncclops.restart.snapshot._blobs import Blob
from ncclops.restart.snapshot._pace import Cost
from ncclops.restart.snapshot._rounds import Round, Rounds
from ncclops.restart.store import another_connection

SOON = timedelta(seconds=20)


class Rank:
    """One of two ranks, with a thread of its own."""

    def __init__(self, store: dist.Store, role: int) -> None:
        self.background = Background(lambda: StoreClient(Connection(another_connection(store))))
        self.rounds = Rounds(self.background, "rounds", role, 2, None, self.decide, lambda: False)
        self.round = Round(0)

    def decide(self, costs: Sequence[Cost]) -> int:
        return int(sum(each.cost_s for each in costs))

    def client(self) -> StoreClient:
        return self.background.result_of(lambda: self.background.client, SOON)

    def report(self, cost_s: float, blobs: Sequence[Blob] = ()) -> None:
        self.round.cost.put(Cost(1.0, cost_s, 1.0))
        self.background.submit(lambda: self.rounds.run(self.round, blobs, ()))

    def interval(self) -> int:
        self.background.wait(self.round.ended, SOON)
        return self.round.interval


@pytest.fixture
def ranks() -> Iterator[list[Rank]]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    made = [Rank(store, role) for role in range(2)]
    yield made
    for each in made:
        each.background.close()


@pytest.mark.parametrize("carried_out", [True, False])
def test_a_connection_that_is_lost_while_a_rank_is_counted_costs_no_snapshot(
    ranks: list[Rank], monkeypatch: pytest.MonkeyPatch, carried_out: bool
) -> None:
    first, second = ranks
    client = first.client()
    add = client.add

    def lose_the_answer(key: str, amount: int, *, repeatable: bool = False) -> int:
        if carried_out:
            add(key, amount, repeatable=repeatable)
        if not repeatable:
            raise AdditionUnknown("lost")
        return add(key, amount, repeatable=repeatable)

    monkeypatch.setattr(client, "add", lose_the_answer)
    first.report(3.0)
    first.background.wait(first.round.complete, SOON)
    other = second.client()
    while int(other.add("rounds/round/0/count", 0)) < 1 + carried_out:
        pass
    assert not other.check(["rounds/round/0/done"]), "one has not reported, whatever the count is"
    second.report(4.0)
    assert [each.interval() for each in ranks] == [7, 7]


def test_a_rank_that_cannot_complete_its_snapshot_keeps_no_other_one_waiting(
    ranks: list[Rank],
) -> None:
    first, second = ranks
    first.report(1.0)
    broken: Any = Blob(b"{}", torch.empty(0, dtype=torch.uint8), waits_for=[None])
    second.report(1.0, [broken])
    with pytest.raises(AttributeError):
        second.interval()
    with pytest.raises(SnapshotError, match="a rank could not complete its own"):
        first.interval()
