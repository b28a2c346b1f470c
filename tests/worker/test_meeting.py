"""The ranks of a process group meet before its backend is made; real stores, a thread a rank."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from ncclops.classify import Scanner
from ncclops.record.incident_record import absent_ranks
from ncclops.restart._groups.reconfiguring import is_joining
from ncclops.worker.group_defaults import _meeting
from ncclops.worker.meeting import AbsentRanksError, Meeting, Team

LONG = timedelta(seconds=60)
SHORT = timedelta(seconds=0.2)
# For several that wait at a time: all are there before the first gives up, on a busy machine too.
TOGETHER = timedelta(seconds=1)


class Counted:
    """A store, and how often each of its operations was called."""

    def __init__(self, store: dist.Store) -> None:
        self.store = store
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return getattr(self.store, name)


def team(rank: int, size: int) -> Team:
    """Two ranks on each node."""
    hosts = tuple(f"n{node}" for node in range(size // 2))
    return Team(rank=rank, size=size, nproc=2, node=rank // 2, hosts=hosts, run=None)


def meet(
    store: Any, rank: int, ranks: Sequence[int], limit: timedelta, size: int | None = None
) -> None:
    Meeting(
        store=store,
        group="0",
        what="init_process_group",
        ranks=ranks,
        own=ranks.index(rank),
        team=None if size is None else team(rank, size),
    ).wait(limit)


def errors(futures: Sequence[Future[None]]) -> list[str]:
    return [str(f.exception(60)) for f in futures if f.exception(60) is not None]


def test_all_come_at_a_cost_that_does_not_depend_on_their_number() -> None:
    store, size = dist.HashStore(), 16
    stores = [Counted(store) for _ in range(size)]
    with ThreadPoolExecutor(size) as pool:
        came = [pool.submit(meet, stores[r], r, range(size), LONG) for r in range(size)]
        assert errors(came) == []
    assert sorted(sum(each.calls.values()) for each in stores) == [5] * (size - 1) + [7]


def test_absent_ranks_are_named_with_their_hosts_and_one_rank_finds_out() -> None:
    store, size = dist.HashStore(), 8
    stores = [Counted(store) for _ in range(size)]
    with ThreadPoolExecutor(size) as pool:
        came = [
            pool.submit(meet, stores[r], r, range(size), TOGETHER, size)
            for r in range(size)
            if r not in (1, 6, 7)
        ]
        said = errors(came)
    assert len(said) == 5
    (text,) = {re.sub(r"waited \d+ s", "waited", each) for each in said}
    assert text == (
        "waited for ranks 1, 6, 7 of 8, which had not come to init_process_group:"
        " rank 1 on n0; rank 6 on n3; rank 7 on n3"
    )
    assert {getattr(f.exception(), "absent_ranks", None) for f in came} == {(1, 6, 7)}
    assert absent_ranks(f"AbsentRanksError: {said[0]}") == [1, 6, 7]
    assert sum(each.calls["check"] == size for each in stores) == 1
    scanner = Scanner()
    scanner.feed(0, "stderr.log", f"ncclops.worker.meeting.AbsentRanksError: {said[0]}\n".encode())
    found = scanner.verdict().verdict
    assert (found.signature, found.rank, found.rank_began_it) == ("absent-rank", 1, True)


def test_who_gave_up_may_come_again_and_a_group_may_be_made_again() -> None:
    store = dist.HashStore()
    with pytest.raises(AbsentRanksError, match="for rank 1 of 2"):
        meet(store, 0, range(2), SHORT)
    with pytest.raises(AbsentRanksError, match="for rank 1 of 2"):
        meet(store, 0, range(2), SHORT)
    for order in itertools.islice(itertools.cycle([(1, 0), (0, 1)]), 40):
        with ThreadPoolExecutor(2) as pool:
            came = [pool.submit(meet, store, r, range(2), LONG) for r in order]
            assert errors(came) == []
    with pytest.raises(AbsentRanksError, match="for rank 0 of 2"):
        meet(store, 1, range(2), SHORT)


def test_a_rank_that_comes_when_others_have_given_up_waits_for_them_to_come_again() -> None:
    store = dist.HashStore()
    with pytest.raises(AbsentRanksError, match="for ranks 1, 2 of 3"):
        meet(store, 0, range(3), SHORT)
    with ThreadPoolExecutor(3) as pool:
        late = pool.submit(meet, store, 2, range(3), LONG)
        again = pool.submit(meet, store, 0, range(3), LONG)
        last = pool.submit(meet, store, 1, range(3), LONG)
        assert errors([late, again, last]) == []


def test_a_lost_store_is_no_absent_rank() -> None:
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, None, False, wait_for_workers=False)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(meet, client, 0, range(2), LONG)
        server.wait(["ncclops/meeting/0/2/0/count"], LONG)
        del server
        error = waiting.exception(60)
    assert isinstance(error, RuntimeError)
    assert not isinstance(error, AbsentRanksError)


ALL = [0, 1, 2, 3]
MINE = {"backend": "nccl", "group_name": "1", "group_size": 4, "store": dist.HashStore()}


@pytest.mark.parametrize(
    ("given", "ranks"),
    [
        ({"global_ranks_in_group": [], "group_name": "0", "group_rank": 2}, ALL),
        ({"global_ranks_in_group": [2, 3]}, [2, 3]),
        ({"global_ranks_in_group": [0, 1]}, None),  # not a member, which has to call all the same
        ({"global_ranks_in_group": [2]}, None),
        # Local synchronisation: any order, and NCCL waits for nobody yet.
        ({"global_ranks_in_group": [2, 3], "group_name": "a1b2"}, None),
        ({"global_ranks_in_group": [2, 3], "group_name": "a1b2", "backend": "gloo"}, [2, 3]),
        ({"global_ranks_in_group": [2, 3], "group_name": "a1b2", "device_id": 0}, [2, 3]),
        ({"global_ranks_in_group": [2, 3], "backend": "fake"}, None),
        ({"global_ranks_in_group": [2, 3], "backend": "mpi"}, None),
    ],
)
def test_only_members_meet_and_only_where_all_come_in_one_order_or_wait(
    given: dict[str, Any], ranks: list[int] | None
) -> None:
    torch = SimpleNamespace(get_rank=lambda: 2, get_world_size=lambda: 4)
    found = _meeting(torch, MINE | given, team(2, 4))
    assert (None if found is None else list(found.ranks)) == ranks
    if found is not None:
        assert found.own == found.ranks.index(2)
        assert found.team is not None
    other = _meeting(torch, MINE | given, team(1, 4))  # the script numbers ranks by itself
    assert other is None or other.team is None


def test_who_joins_the_group_of_others_meets_nobody() -> None:
    """They have made theirs before."""
    torch = SimpleNamespace(get_rank=lambda: 2, get_world_size=lambda: 4)
    given = MINE | {"global_ranks_in_group": [], "group_name": "0", "group_rank": 2}
    before = is_joining.set(True)
    found = _meeting(torch, given, team(2, 4))
    is_joining.reset(before)
    assert found is None
