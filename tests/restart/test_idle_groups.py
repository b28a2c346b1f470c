"""Whether an operation of a group is under way, and what is done about that; two ranks of Gloo in
one process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import distributed

from ncclops.restart._groups import gloo_sockets, kept_beside
from ncclops.restart._groups.kept_beside import KeptGroup
from ncclops.restart._groups.recorder import recorded_of_gloo

from .conftest import wait_until

pytestmark = pytest.mark.usefixtures("starts_processes")  # it waits a moment for other threads


def begin(backend: Any) -> Any:
    """An operation that the other rank has to come to."""
    return backend.allreduce([torch.ones(1)], distributed.AllreduceOptions())


@pytest.fixture
def backends() -> Iterator[list[Any]]:
    """Rank 0's is kept, as ``_groups.kept_beside`` has it; either rank has used it once."""
    store, threads = distributed.HashStore(), gloo_sockets.gloo_threads()
    made: dict[int, Any] = {}

    def make(rank: int) -> None:
        made[rank] = distributed.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))

    makers = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
    makers[0].start()
    (thread,) = wait_until(lambda: gloo_sockets.gloo_threads() - threads, "rank 0's device")
    makers[1].start()
    for maker in makers:
        maker.join()
    begun = [begin(made[0])]
    (number,) = (
        n for n, each in recorded_of_gloo().items() if each["last_completed_collective"] < 1
    )
    begun.append(begin(made[1]))
    for work in begun:
        work.wait()
    epoll = gloo_sockets.epoll_of(thread)
    kept = KeptGroup((0, 0), "gloo ", made[0], "a", set(), 0, epoll, number)
    kept_beside.add(kept)
    yield [made[0], made[1]]
    kept_beside.drop()
    gloo_sockets.release_gloo_connections()


def the_kept() -> KeptGroup:
    (kept,) = kept_beside._groups
    return kept


def test_it_is_idle_when_both_ranks_have_done_the_same(backends: list[Any]) -> None:
    assert the_kept().why_not_idle() is None
    works = [begin(backends[0])]
    assert the_kept().why_not_idle() == "an operation of it was under way"
    works.append(begin(backends[1]))
    for work in works:
        work.wait()
    assert wait_until(lambda: the_kept().why_not_idle() is None, "the recorder")


def test_its_connections_are_left_alone_while_it_is_idle(backends: list[Any]) -> None:
    kept_beside.end_waits()
    assert the_kept().why_disconnected() is None
    connections = gloo_sockets.gloo_connections()
    for connection in connections:
        connection.close()
    assert len(connections) == 1, "rank 1's"


def test_what_was_begun_after_the_abort_has_looked_is_ended(backends: list[Any]) -> None:
    the_kept().out = object()  # type: ignore[assignment]  # an abort has gone past it
    work = begin(backends[0])
    kept_beside.end_waits()
    with pytest.raises(RuntimeError, match="onnection"):
        work.wait()
    assert the_kept().why_not == "an operation of it was under way"


def test_who_waits_for_long_has_all_ended_whatever_the_recorder_says(
    backends: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept_beside.end_waits()
    assert the_kept().why_not is None
    monkeypatch.setattr(kept_beside, "_LEAVES_WITHIN_S", 0.0)
    kept_beside.end_waits()
    assert the_kept().why_not == "the main thread waited"


def test_a_lost_connection_is_seen(backends: list[Any]) -> None:
    gloo_sockets.close_gloo_connections()  # rank 1's
    assert wait_until(lambda: the_kept().why_disconnected(), "the end of the connection")


def test_messages_put_a_group_in_doubt(backends: list[Any]) -> None:
    kept_beside.doubt(backends[1], "of another group")
    assert the_kept().why_not is None
    kept_beside.doubt(backends[0], "a message")
    assert the_kept().why_not == "a message"
    assert the_kept().epoll not in gloo_sockets.left_alone
