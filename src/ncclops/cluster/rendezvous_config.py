"""How the nodes of a job are to find each other: torchrun's options, parsed once into values."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal

from ncclops.errors import UsageError
from ncclops.host_name import with_port
from ncclops.schedulers.node_options import NodeOptions
from ncclops.whole_numbers import MOST_NODES, MOST_PORT, whole_number

Backend = Literal["static", "c10d"]

# torchrun's defaults, which other nodes need to know beforehand.
STATIC_PORT = 29500
C10D_PORT = 29400
# torch.distributed.elastic's defaults.
_JOIN, _LAST_CALL, _BEAT, _MISSED_BEATS = 600, 30, 5, 3

_MOST_SECONDS = 10**9  # 30 years: what a timedelta takes, by far
_SHOWN_CHARS = 80  # of an option's value in an error

# Also torchrun's: all nodes have to name the same.
_JOB_ID = "none"

_TIMES = {
    "join_timeout": _JOIN,
    "timeout": _JOIN,  # the static backend's name for it
    "last_call_timeout": _LAST_CALL,
    "keep_alive_interval": _BEAT,
    "keep_alive_max_attempt": _MISSED_BEATS,
    "close_timeout": 30,
    "heartbeat_timeout": 5,
    "read_timeout": 60,
}


@dataclass(frozen=True, kw_only=True)
class RendezvousPace:
    """``--rdzv-conf``, as values.

    ``join``: by when all nodes are to be there. ``last_call``: how much longer spares may come
    once there are enough. A node that sends no heartbeat for ``lost_after`` is lost.
    ``hosts_store``: whether this node hosts the store, by option; None where it is found out.
    """

    join: timedelta = timedelta(seconds=_JOIN)
    last_call: timedelta = timedelta(seconds=_LAST_CALL)
    beat: timedelta = timedelta(seconds=_BEAT)
    missed_beats: int = _MISSED_BEATS
    hosts_store: bool | None = None

    @property
    def lost_after(self) -> timedelta:
        return self.beat * self.missed_beats


@dataclass(frozen=True, kw_only=True)
class RendezvousConfig:
    """Where and how many: ``active`` nodes train, up to ``most`` take part, the rest in reserve.

    ``host`` and ``port`` are the job's store, ``rank`` this node's place (None: the rendezvous
    gives it). ``external`` says that no node of the job hosts the store. ``expected`` are the
    nodes' names, in the order of their ranks, where a scheduler gives them.
    """

    backend: Backend
    active: int
    most: int
    host: str
    port: int
    job_id: str
    rank: int | None = None
    external: bool = False
    local_addr: str | None = None
    expected: tuple[str, ...] = ()
    pace: RendezvousPace = field(default_factory=RendezvousPace)

    @property
    def address(self) -> str:
        """``host:port``."""
        return with_port(self.host, self.port)


def parse_nnodes(text: str) -> tuple[int, int]:
    """Nodes that train, and nodes in all, of ``N`` or ``N:M``. Raises ``UsageError``."""
    first, _, second = text.partition(":")
    active = whole_number(first, MOST_NODES)
    most = whole_number(second, MOST_NODES) if ":" in text else active
    if not active or most is None:
        raise UsageError(
            f"--nnodes {text[:_SHOWN_CHARS]}: give the number of nodes, as in --nnodes 4"
        )
    if most < active:
        raise UsageError(
            f"--nnodes {text}: the second number counts the spares too, as in 4:5 for one spare"
        )
    return active, most


def parse_pace(text: str | None) -> RendezvousPace:
    """``--rdzv-conf``: ``key=value`` pairs separated by commas, times in seconds."""
    given: dict[str, int] = {}
    hosts: bool | None = None
    for pair in filter(None, (part.strip() for part in (text or "").split(","))):
        key, _, value = (part.strip() for part in pair.partition("="))
        if key == "is_host" and value.lower() in ("true", "false", "1", "0"):
            hosts = value.lower() in ("true", "1")
        elif key in _TIMES and (number := whole_number(value, _MOST_SECONDS)):
            given[key] = number
        else:
            known = ", ".join(("is_host", *_TIMES))
            raise UsageError(
                f"--rdzv-conf {pair[:_SHOWN_CHARS]}: expected key=seconds with one of {known}"
            )
    seconds = _TIMES | given
    join = given.get("join_timeout", seconds["timeout"])
    return RendezvousPace(
        join=timedelta(seconds=join),
        last_call=timedelta(seconds=seconds["last_call_timeout"]),
        beat=timedelta(seconds=seconds["keep_alive_interval"]),
        missed_beats=seconds["keep_alive_max_attempt"],
        hosts_store=hosts,
    )


def parse_rendezvous(
    options: NodeOptions, *, store: str | None = None, expected: tuple[str, ...] = ()
) -> RendezvousConfig | None:
    """The rendezvous of a job of several nodes; None for one node.

    ``store`` is ``NCCLOPS_STORE``, a store that no node hosts. Raises ``UsageError`` where the
    options do not fit together.
    """
    active, most = parse_nnodes(options.nnodes or "1")
    pace = parse_pace(options.rdzv_conf)
    if most == 1:
        return None
    backend = _backend(options.rdzv_backend, options.rdzv_endpoint, options.node_rank)
    host, port = _endpoint(options.rdzv_endpoint, C10D_PORT if backend == "c10d" else STATIC_PORT)
    if backend == "static":
        host, port = options.master_addr or host, options.master_port or port
    if store:
        host, port = _endpoint(store, C10D_PORT)
    if not host:
        option = "--rdzv-endpoint" if backend == "c10d" else "--master-addr"
        raise UsageError(
            f"--nnodes {options.nnodes} needs {option}: the address of node 0, or of a store"
        )
    if backend == "c10d":
        rank = None
    else:
        rank = options.node_rank or 0
        if rank >= most:
            raise UsageError(
                f"--node-rank {rank}: with --nnodes {options.nnodes} it is 0 to {most - 1}"
            )
    return RendezvousConfig(
        backend=backend,
        active=active,
        most=most,
        host=host,
        port=port,
        job_id=options.rdzv_id or _JOB_ID,
        rank=rank,
        external=bool(store),
        local_addr=options.local_addr,
        expected=expected,
        pace=pace,
    )


def _backend(named: str | None, endpoint: str | None, node_rank: int | None) -> Backend:
    """The backend that is named, or the one that the other options require."""
    if named in ("static", "c10d"):
        return "c10d" if named == "c10d" else "static"
    if named:
        raise UsageError(f"--rdzv-backend {named}: c10d and static are supported")
    return "c10d" if endpoint and node_rank is None else "static"


def _endpoint(text: str | None, default_port: int) -> tuple[str, int]:
    """Host and port of ``host``, ``host:port`` or ``[v6]:port``; an empty host without ``text``."""
    match = re.fullmatch(r"(\[[^\]]+\]|[^:]*)(?::(\d+))?", text or "")
    port = whole_number(match[2] or str(default_port), MOST_PORT) if match is not None else None
    if match is None or not port:
        raise UsageError(
            f"{(text or '')[:_SHOWN_CHARS]}: expected the address of a store as HOST:PORT"
        )
    return match[1].strip("[]"), port
