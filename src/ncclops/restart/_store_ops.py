"""The operations the ledger needs beyond ``torch.distributed.Store``'s common ones.

TCPStore has them (``append``, ``compare_set``); FileStore and stores written in Python have them
not at all, or not atomically, and get them built from ``add``, which every store has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

from torch.distributed import Store


def append(store: Store, key: str, line: str) -> None:
    """Add ``line`` to the log at ``key``; concurrent appends all survive, in some order."""
    if _is_extended(store):
        store.append(key, line + "\n")
    else:
        slot = store.add(f"{key}/slots", 1)
        store.set(f"{key}/slot/{slot}", line)


def read_log(store: Store, key: str) -> list[str]:
    """The lines of the log at ``key``, none if nobody has written."""
    if _is_extended(store):
        return store.get(key).decode().splitlines() if store.check([key]) else []
    slots = [f"{key}/slot/{slot}" for slot in range(1, store.add(f"{key}/slots", 0) + 1)]
    # A slot that is taken and still empty belongs to a writer that has not counted it yet, or
    # that died and will be reported: either way a later event reads the log again.
    return [store.get(slot).decode() for slot in slots if store.check([slot])]


def publish(store: Store, key: str, value: str) -> None:
    """Set ``key`` unless somebody has set it already: the first value stands."""
    try:
        # The second time for those who wait already: not every server of torch 2.5 tells them of
        # a compare_set. It changes nothing, whoever came first.
        store.set(key, store.compare_set(key, "", value).decode())
    except (RuntimeError, NotImplementedError) as error:
        if _is_extended(store):
            raise
        if not _lacks_compare_set(error):
            raise
        if store.add(f"{key}/claims", 1) == 1:
            store.set(key, value)


def wait(store: Store, key: str, timeout: timedelta) -> str:
    """The value of ``key`` once it has one. Raises what the store raises when that is late."""
    if not _is_extended(store):
        store.wait([key], timeout)
        return str(store.get(key).decode())
    # Their get waits by itself: one message less.
    usual = store.timeout
    store.set_timeout(timeout)
    try:
        return str(store.get(key).decode())
    finally:
        store.set_timeout(usual)


def read_counts(store: Store, keys: Sequence[str]) -> list[int] | None:
    """What was added up under each of ``keys``; ``None`` if one of them is still without."""
    if not store.check(list(keys)):
        return None
    if _is_extended(store):
        return list(map(int, store.multi_get(list(keys))))
    return [store.add(key, 0) for key in keys]


def set_many(store: Store, values: Mapping[str, str]) -> None:
    """Set all of ``values``, in one message where the store can."""
    if _is_extended(store):
        store.multi_set(list(values), list(values.values()))
        return
    for key, value in values.items():
        store.set(key, value)


def _is_extended(store: Store) -> bool:
    return bool(store.has_extended_api())


def _lacks_compare_set(error: Exception) -> bool:
    text = str(error).lower()
    return isinstance(error, NotImplementedError) or "assert" in text or "not implemented" in text
