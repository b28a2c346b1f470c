"""Connections to the store, and ending a wait of the main thread on a peer that does not come."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterable
from traceback import walk_stack
from types import FrameType
from typing import Any

from torch import distributed
from torch.distributed import Store

from ncclops.restart import _gloo_sockets
from ncclops.restart.settings import Settings
from ncclops.restart.store import PrefixStore, another_connection

# The calls of wrapped functions in this process, in their order, which all ranks share.
_calls = itertools.count()


class Connections:
    """To the store of one call; each thread uses one of its own, as a wait occupies it.

    ``raw_store`` is what the store factory made, ``first`` the main thread's connection in the
    name space of this call. Raises what the factory raises.
    """

    def __init__(self, settings: Settings) -> None:
        self._own_sockets: set[int] = set()
        self._connecting = threading.Lock()
        before = _inodes()
        factory: Any = settings.store_factory
        self.raw_store: Store = factory(**(settings.store_kwargs or {}))
        self._own_sockets |= _inodes() - before
        self._prefix = f"{_job_prefix()}/call{next(_calls)}"
        self.first: Store = PrefixStore(self._prefix, self.raw_store)

    def another(self) -> Store:
        """A further connection, in the same name space. Any thread."""
        with self._connecting:  # the reporter does while the main thread is in the function
            before = _inodes()
            store = another_connection(self.raw_store)
            self._own_sockets |= _inodes() - before
        return PrefixStore(self._prefix, store)

    def for_groups(self, iteration: int) -> Store:
        """For the process groups of ``iteration``, over a separate connection.

        It is shut down when the iteration is aborted, which ends a wait on it.
        """
        with self._connecting:  # or it would be taken for our own, which are never shut down
            store = another_connection(self.raw_store)
        return PrefixStore(f"{self._prefix}/{iteration}/groups", store)

    def end_wait(self, frame: FrameType, world_size: int) -> None:
        """End a wait of ``frame``, the main thread's, for a peer: on a store, or in Gloo."""
        ports = {port for store in _stores_in(frame) if (port := _port_of(store)) is not None}
        if isinstance(self.raw_store, distributed.TCPStore):
            ports.add(self.raw_store.port)
        for port in ports:
            _gloo_sockets.shut_down_connections_to(port, keep=self._own_sockets)
        _gloo_sockets.shut_down_gloo_connections()
        if _is_making_a_group(frame):
            _gloo_sockets.answer_gloo_rendezvous(world_size + 1)


def _inodes() -> set[int]:
    return set(_gloo_sockets.socket_inodes().values())


def _job_prefix() -> str:
    """The name space of this job and attempt in a store that others may use as well."""
    chosen = os.environ.get("NCCLOPS_STORE_PREFIX")
    if chosen:
        return chosen
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_STEP_ID")
    return "/".join(["ncclops", *(os.environ[name] for name in names if name in os.environ)])


def _is_making_a_group(frame: FrameType) -> bool:
    """Whether ``frame`` or one of its callers is torch's making of a process group."""
    return any(f.f_code.co_name == "_new_process_group_helper" for f, _ in walk_stack(frame))


def _stores_in(frame: FrameType) -> Iterable[Store]:
    """The stores among the local variables of ``frame`` and its callers."""
    for caller, _ in walk_stack(frame):
        for value in list(caller.f_locals.values()):
            if isinstance(value, Store):
                yield value


def _port_of(store: Any) -> int | None:
    """The port of the TCPStore at the bottom of ``store``."""
    while isinstance(store, distributed.PrefixStore):
        store = store.underlying_store
    return store.port if isinstance(store, distributed.TCPStore) else None
