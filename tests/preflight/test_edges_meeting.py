"""What comes from another host in the meeting, and is not what it should be."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from datetime import timedelta

import msgspec
import pytest
import torch.distributed as dist

from ncclops.preflight.edges.meeting import Meeting, Unmet, Where
from ncclops.preflight.edges.model import Facts, Outcome, Plan
from ncclops.preflight.edges.run import Limits, gather_facts

LIMIT = timedelta(seconds=60)
DEEP = '{"name": "n1", "uid": "1", "of_another_version": ' + "[" * 100_000
BAD = ["", "[", '{"hosts": 5}', '{"name": 1}', DEEP, '{"hosts": [], "more": ' + "[" * 100_000]


@pytest.fixture
def store() -> Iterator[dist.TCPStore]:
    yield dist.TCPStore("127.0.0.1", 0, None, True, LIMIT, wait_for_workers=False)


def meeting(store: dist.TCPStore) -> Meeting:
    where = Where(host="127.0.0.1", port=store.port, count=2, least=2)
    return Meeting(where, store, 0, AsyncExitStack())


@pytest.mark.parametrize("said", BAD, ids=lambda each: each[:12])
def test_what_cannot_be_read_is_as_if_it_had_not_come(store: dist.TCPStore, said: str) -> None:
    store.set("ncclops-preflight/none/0/facts/1", said)
    store.set("ncclops-preflight/none/0/first/1", said)
    assert asyncio.run(meeting(store).gather("facts", Facts, [1], 5.0)) == {}
    assert asyncio.run(meeting(store).gather("first", Outcome, [1], 5.0)) == {}


@pytest.mark.parametrize("said", BAD, ids=lambda each: each[:12])
def test_a_plan_that_cannot_be_read_is_said_in_a_line(store: dist.TCPStore, said: str) -> None:
    store.set("ncclops-preflight/none/0/plan", said)
    with pytest.raises(Unmet, match="the plan that came from the host that gathers"):
        asyncio.run(meeting(store).hear("plan", Plan, 5.0))


@pytest.mark.parametrize(("conflict", "came"), [("02:00:00:00:00:99", 2), ("", 2), ("02::", 1)])
def test_facts_that_another_machine_takes_are_not_waited_for(
    store: dist.TCPStore, conflict: str, came: int
) -> None:
    """Where all have come and one tells of a machine with its address. Else to the end."""
    store.add("ncclops-preflight/none/came", came)
    told = Facts(name="n0", uid="0", conflict=conflict)
    store.set("ncclops-preflight/none/0/facts/0", msgspec.json.encode(told).decode())
    is_taken = bool(conflict) and came == 2
    within_s, limits = (1000.0 if is_taken else 0.3), Limits(slack=0.05)
    found = asyncio.run(gather_facts(meeting(store), 2, within_s, limits.slack))
    assert {number: each.name for number, each in found.items()} == {0: "n0"}
