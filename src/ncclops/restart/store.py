"""Stores: what the wrapper builds with ``store_factory`` and what it needs of it.

::

    RestartError
    └── BarrierError
        ├── BarrierTimeout      not all ranks came in time
        └── BarrierOverflow     more came than were expected
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from datetime import timedelta

import torch.distributed as dist

from ncclops.restart import store_server
from ncclops.restart._store.addresses import is_numeric, one_short_query, resolve
from ncclops.restart._store.variables import external_store
from ncclops.restart.exception import RestartError


class BarrierError(RestartError):
    """A barrier over the store failed."""


class BarrierTimeout(BarrierError):
    """Not all ranks came before the deadline."""


class BarrierOverflow(BarrierError):
    """More ranks entered than the barrier was for: two groups use the same name."""


class StoreMixin:
    """Mix it into a ``torch.distributed.Store`` to make it fit for ``store_factory``.

    ``class MyStore(torch.distributed.TCPStore, StoreMixin)`` is all that it takes. The store has
    to offer ``set``, ``get``, ``add``, ``check`` and ``wait``; ``compare_set`` and ``append`` are
    used where they exist. The wrapper reaches nothing through the mixin that a method of
    torch's store could shadow.
    """

    @property
    def critical_ranks(self) -> tuple[int, ...]:
        """Initial ranks whose end would take the store away: they leave the wrapper last."""
        return ()


def barrier(
    store: dist.Store,
    ranks: Collection[int],
    group_name: str,
    rendezvous_count: int,
    timeout: timedelta,
) -> None:
    """Wait until ``rendezvous_count`` ranks have entered the barrier ``group_name``.

    ``ranks`` are those that enter with this call: as a rule one, more to stand in for others.
    Costs each caller one addition and one wait. A name serves once.

    Raises ``BarrierTimeout`` after ``timeout`` and ``BarrierOverflow`` when too many enter.
    """
    entered = store.add(f"{group_name}/entered", len(ranks))
    if entered > rendezvous_count:
        raise BarrierOverflow(
            f"barrier {group_name!r} is for {rendezvous_count} ranks and {entered} entered it"
        )
    if entered == rendezvous_count:
        store.set(f"{group_name}/complete", "1")
    try:
        store.wait([f"{group_name}/complete"], timeout)
    except RuntimeError as error:
        entered = store.add(f"{group_name}/entered", 0)
        raise BarrierTimeout(
            f"barrier {group_name!r}: {entered} of {rendezvous_count} ranks came within {timeout}"
        ) from error


class TCPStore(dist.TCPStore, StoreMixin):  # type: ignore[misc]
    """The default store: a TCPStore whose server outlives rank 0.

    Rank 0 starts the server as a separate process, unless the port is taken already (by a
    launcher's store, as under torchrun), and all ranks connect as clients. ``NCCLOPS_STORE``
    (``host:port``) points every rank to a server that runs elsewhere, such as ``ncclops store
    serve``, and takes precedence over ``host_name`` and ``port``. ``None`` stands for
    ``MASTER_ADDR``, ``MASTER_PORT`` and ``WORLD_SIZE``.

    ``timeout`` bounds the connecting and every operation that has no timeout of its own.
    ``multi_tenant`` is accepted for compatibility: the server is shared by all that connect.

    Raises ``ValueError`` when no address is known, and ``torch.distributed.DistNetworkError``
    when the name is not resolved, or no server answers there, within ``timeout``.
    """

    def __init__(
        self,
        host_name: str | None = None,
        port: int | None = None,
        world_size: int | None = None,
        timeout: timedelta = timedelta(seconds=300),
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        use_libuv: bool = True,
    ) -> None:
        del multi_tenant
        if (external := external_store(os.environ)) is not None:
            host_name, port = external
        host = host_name if host_name is not None else _required("MASTER_ADDR", "host_name")
        port = port if port is not None else int(_required("MASTER_PORT", "port"))
        if world_size is None:
            world_size = int(os.environ.get("WORLD_SIZE", "1"))
        hosts = external is None and os.environ.get("RANK", "0") == "0"
        reap = _host_server(port) if hosts else None
        # By address: a name server that hangs later does not keep a rank from connecting again.
        with _first_contact(host, port, timeout) as address, one_short_query():
            self._connect(address, port, timeout, use_libuv)
        if reap is not None:
            reap()
        if wait_for_workers:
            self._wait_for_workers(world_size, timeout)

    def _connect(self, host: str, port: int, timeout: timedelta, use_libuv: bool) -> None:
        super().__init__(
            host,
            port,
            None,  # torch would make the server count the workers, and only the server waits
            False,
            timeout,
            wait_for_workers=False,
            use_libuv=use_libuv,
        )

    def _wait_for_workers(self, world_size: int, timeout: timedelta) -> None:
        key = f"{job_prefix()}/workers"
        if self.add(key, 1) >= world_size:
            self.set(f"{key}/complete", "1")
        self.wait([f"{key}/complete"], timeout)


class FileStore(dist.FileStore, StoreMixin):  # type: ignore[misc]
    """A store in a file that all ranks can see, for jobs without a network between them.

    torch's FileStore looks at the file every few milliseconds while it waits: good for tests and
    single nodes, not for many ranks.
    """


class PrefixStore(dist.PrefixStore, StoreMixin):  # type: ignore[misc]
    """``store`` with every key under ``iteration``, so that iterations do not see each other's."""

    def __init__(self, iteration: int | str, store: dist.Store) -> None:
        super().__init__(str(iteration), store)
        self._critical_ranks = critical_ranks(store)

    @property
    def critical_ranks(self) -> tuple[int, ...]:
        """As of the store underneath."""
        return self._critical_ranks


def critical_ranks(store: dist.Store) -> tuple[int, ...]:
    """The initial ranks that must be the last to leave the wrapper, given this store."""
    ranks: Iterable[int] = getattr(store, "critical_ranks", ())
    return tuple(ranks)


def connect_to_server(host: str, port: int, timeout: timedelta) -> dist.TCPStore:
    """A connection to a TCPStore's server; torch asks a name server for its messages."""
    with one_short_query():
        return dist.TCPStore(host, port, None, False, timeout, wait_for_workers=False)


def another_connection(store: dist.Store, address: str | None = None) -> dist.Store:
    """A store over a separate connection.

    A blocking ``wait`` occupies its connection, so each thread needs one. A TCPStore is connected
    to again at ``address``, where that is known: torch would look up its name. Other kinds
    (FileStore, HashStore, stores in Python) have ``clone``, from torch 2.9 on, or do not occupy
    anything while they wait.
    """
    if isinstance(store, dist.TCPStore):
        host = store.host if address is None else address
        return connect_to_server(host, store.port, store.timeout)
    with contextlib.suppress(AttributeError, NotImplementedError, RuntimeError):
        return store.clone()
    return store


def job_prefix() -> str:
    """The name space of this job and attempt in a store that others may use as well."""
    chosen = os.environ.get("NCCLOPS_STORE_PREFIX")
    if chosen:
        return chosen
    names = (
        *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
        *("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID"),
    )
    return "/".join(["ncclops", *(os.environ[name] for name in names if name in os.environ)])


def _host_server(port: int) -> Callable[[], object] | None:
    """Start a server on ``port``, unless there is one already, as under torchrun.

    See ``store_server.start`` for what is returned.
    """
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if agents and str(port) == os.environ.get("MASTER_PORT"):
        return None  # another port of a script's choice, as Megatron-LM's, nobody serves yet
    listener = store_server.bind(port)
    if listener is None:
        return None
    with listener:
        return store_server.start(listener, dist.TCPStore)


# Between two attempts to reach a server that does not listen yet.
_FIRST_PAUSE_S = 0.002
_LONGEST_PAUSE_S = 0.5
_LOOKUP_PAUSE_S = 0.1


@contextlib.contextmanager
def _first_contact(host: str, port: int, timeout: timedelta) -> Iterator[str]:
    """A connection to the server, held while torch makes its own; gives the server's address.

    torch pauses for seconds when it is refused, which a rank is that comes before rank 0. Raises
    ``DistNetworkError`` when the name of the host is not resolved in time.
    """
    contact = None
    address, failure = host, OSError("no time was left")
    pause_s, deadline = _FIRST_PAUSE_S, time.monotonic() + timeout.total_seconds()
    while contact is None and (left_s := deadline - time.monotonic()) > 0:
        try:
            addresses = resolve(host, left_s)
        except OSError as error:
            # The name of a pod, say, is known some time after the pod has started.
            failure, pause_s = error, max(pause_s, _LOOKUP_PAUSE_S)
        else:
            address, contact, goes_on = _connect_to_one(addresses, port, left_s)
            if not goes_on:
                break  # torch knows how to wait for a route, and what to say
        if contact is None:
            # Nothing announces that another machine begins to listen.
            time.sleep(min(pause_s * random.uniform(0.5, 1), left_s))
            pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
    if not is_numeric(address):
        raise dist.DistNetworkError(
            f"the store at {host}:{port}: {failure}; check the name server, or put the name into "
            "/etc/hosts, or use the address"
        )
    with contact or contextlib.nullcontext():
        yield address


def _connect_to_one(
    addresses: Sequence[str], port: int, timeout_s: float
) -> tuple[str, socket.socket | None, bool]:
    """The address that answers, else the first, and the connection; whether to try again."""
    refused = False
    for address in addresses:
        try:
            return address, socket.create_connection((address, port), timeout_s), True
        except ConnectionRefusedError:
            refused = True
        except OSError:
            continue
    return addresses[0], None, refused


def _required(variable: str, parameter: str) -> str:
    value = os.environ.get(variable)
    if not value:
        raise ValueError(
            f"TCPStore: {variable} is not set; start the script by `ncclops launch` or torchrun, "
            f"which set it, or set it on every rank, or pass {parameter}= in store_kwargs, or "
            "point NCCLOPS_STORE to a server"
        )
    return value
