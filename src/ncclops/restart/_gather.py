"""Gathering every rank's grouping keys through the store, for assignments that run rank by rank.

The wrapper gathers keys along with a barrier and does not need this; it serves an assignment
that is called by itself or from a user's own ``RankAssignment``.

Two store operations per rank: it sets its keys and waits for the collection. The lowest living
rank reads all keys and publishes them; if it dies meanwhile, the others' wait ends with its
deadline. Only methods that every ``torch.distributed.Store`` has are used.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from ncclops.restart._world import Keys
from ncclops.restart.exception import TimeoutError  # noqa: A004 - that is its public name

if TYPE_CHECKING:
    from torch.distributed import Store


def gather_keys(
    store: Store, prefix: str, rank: int, alive: Sequence[int], keys: Keys, timeout: timedelta
) -> dict[int, Keys]:
    """The keys of all ``alive`` ranks, by rank. Called by each of them with its own ``keys``.

    ``prefix`` must be the same on all of them and not have been used before on this store.
    Raises ``exception.TimeoutError`` naming the ranks whose keys were not there in time.
    """
    names = {peer: f"{prefix}/keys/{peer}" for peer in alive}
    collected = f"{prefix}/collected"
    store.set(names[rank], json.dumps(keys))
    if rank == min(alive):
        _wait(store, names, timeout)
        found = {peer: json.loads(store.get(name)) for peer, name in names.items()}
        store.set(collected, json.dumps(list(found.items())))
    # Twice the time: the collecting rank may itself wait nearly as long for the slowest.
    _wait(store, {min(alive): collected}, 2 * timeout)
    return {peer: tuple(found) for peer, found in json.loads(store.get(collected))}


def _wait(store: Store, names: dict[int, str], timeout: timedelta) -> None:
    try:
        store.wait(list(names.values()), timeout)
    except RuntimeError as error:  # DistStoreError and its kinds are RuntimeErrors
        missing = [rank for rank, name in names.items() if not store.check([name])]
        raise TimeoutError(
            f"rank assignment waited {timeout.total_seconds():g} s for ranks {missing[:16]}: "
            "they died or are stuck before it"
        ) from error
