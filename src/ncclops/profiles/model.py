"""A resolved profile: what the rest of ncclops sees once the files are read and combined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from fnmatch import fnmatchcase
from typing import Any, Literal

from ncclops.durations import format_duration
from ncclops.errors import ProfileError
from ncclops.exit_codes import DEFAULT, ExitCodes
from ncclops.profiles.keys import says
from ncclops.profiles.notification import NOBODY, NotifySettings
from ncclops.versions import satisfies

Kind = Literal["lane", "overlay"]
Nodes = Literal["one", "many", "any"]
RestartMode = Literal["in-process", "process", "none"]
EntryAction = Literal["set", "default", "unset", "scrub"]
# Groups of variables that ``ncclops.env.catalogue`` knows.
Scope = Literal["between_nodes", "within_node"]
Parameter = str | int | float | bool
# What Python callers give in place of one; a duration is a ``timedelta`` there.
GivenParameter = Parameter | timedelta

RESTART_MODES: tuple[RestartMode, ...] = ("in-process", "process", "none")
DEFAULT_RESTART_MODE: RestartMode = "in-process"

# Filled in for each worker when it starts; everything else in braces is a profile parameter.
RUN_PLACEHOLDERS = ("run_dir", "rank_dir")

# Between a stop and SIGKILL, where no profile says otherwise.
STOP_GRACE = timedelta(seconds=15)


def as_text(value: GivenParameter) -> str:
    """A parameter as ``--param`` takes it."""
    if isinstance(value, timedelta):
        return format_duration(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class EntryCondition:
    """When an entry applies; a field that is left out does not restrict.

    ``host`` holds shell-style patterns, one of which the host's name has to match; ``value`` such
    patterns for what the operator gives the variable, in upper or lower case.
    """

    restart: frozenset[RestartMode] | None = None
    torch: str | None = None
    absent: tuple[str, ...] = ()
    host: tuple[str, ...] | None = None
    value: tuple[str, ...] | None = None

    def holds(
        self,
        *,
        restart: RestartMode,
        torch: str | None,
        operator: Mapping[str, str],
        host: str = "",
        name: str = "",
    ) -> bool:
        """Whether it applies; an unknown torch version meets no condition on it.

        ``operator`` is what the operator has given, exported or on the command line; ``host``
        this host's name, with its domain or without; ``name`` the variable's.
        """
        if self.value is not None and not any(
            fnmatchcase(operator.get(name, "").lower(), pattern.lower()) for pattern in self.value
        ):
            return False
        names = {host, host.partition(".")[0]}
        if self.host is not None and not any(
            fnmatchcase(name, pattern) for name in names for pattern in self.host
        ):
            return False
        if self.restart is not None and restart not in self.restart:
            return False
        if self.torch is not None and (torch is None or not satisfies(torch, self.torch)):
            return False
        return not any(name in operator for name in self.absent)


@dataclass(frozen=True)
class Entry:
    """What a profile does with one variable.

    ``value`` belongs to ``set`` and ``default``, ``patterns`` (shell-style, on the entries of
    a path list) to ``scrub``; so do ``holding``, patterns of file names by which a directory goes
    whatever its name, and ``unless_holding``, by which it stays all the same. ``follows`` names a
    second spelling of the same setting: a ``default`` takes the operator's value of that spelling
    when there is one.
    """

    action: EntryAction
    why: str
    source: str
    value: str | None = None
    patterns: tuple[str, ...] = ()
    holding: tuple[str, ...] = ()
    unless_holding: tuple[str, ...] = ()
    reference: str | None = None
    follows: str | None = None
    when: EntryCondition = field(default_factory=EntryCondition)


@dataclass(frozen=True)
class Growth:
    """``[growth]``: what restarts in place may leave behind before new processes are asked for.

    ``gpu_memory_gib`` is 2 because a device's context and communicators are of that order, while
    a model that stays allocated is far beyond. ``fds`` is a quarter of the usual limit of 1024.
    No process group may outlive its iteration: the next one could not make its own.
    """

    gpu_memory_gib: float = field(default=2.0, metadata=says("GPU memory, in GiB.", ge=0))
    fds: int = field(default=256, metadata=says("Open descriptors.", ge=0))
    threads: int = field(default=128, metadata=says("Threads.", ge=0))
    process_groups: int = field(default=0, metadata=says("Process groups.", ge=0))


@dataclass(frozen=True)
class Restarts:
    """``[restarts]``: what a job that restarts in place may come to."""

    min_world_size: int = field(
        default=1,
        metadata=says(
            "The fewest ranks that may train on when others are lost; below it, new processes for"
            " all ranks are asked for, and the retry policy decides. 0: as many as at the start.",
            ge=0,
        ),
    )
    grow: bool = field(
        default=False,
        metadata=says(
            "A new process takes the place of a rank that is lost; `[timeouts] grow` is how long"
            " the others wait for it before they go on without."
        ),
    )


@dataclass(frozen=True)
class WarmStart:
    """``[warm_start]``: workers forked from a process of the node that has imported ``imports``.

    ``enabled`` None: where the restart is in process, whose workers import torch in any case.
    torch imports sympy with the first optimizer; ``torch._dynamo``, which comes with it, reads at
    import what a script may set before.
    """

    enabled: bool | None = None
    imports: tuple[str, ...] = ("torch", "torch.distributed", "sympy")


@dataclass(frozen=True)
class PreflightNeeds:
    """``[preflight]``: what the lane needs of a node; None: judged by what there is.

    ``rdma``: whether the job's ranks talk over InfiniBand or RoCE, so that a port which is down
    ends it. ``gpus``, ``rdma_ports``: how many there have to be at least, ``rdma_gbps`` how fast
    each of those ports. ``ignore`` are ids of checks that say nothing of this cluster.
    ``nodes`` is the profile's.
    """

    nodes: Nodes = "any"

    rdma: bool | None = None
    gpus: int | None = None
    rdma_ports: int | None = None
    rdma_gbps: int | None = None
    ignore: tuple[str, ...] = ()


@dataclass(frozen=True)
class WatchSettings:
    """``[watch]``: how long progress may be missing, and what else the watch goes by.

    ``startup`` is as long as torch's default for groups other than NCCL's, since the slowest starts
    load checkpoints through a file server. ``straggler``: all ranks wait for the slowest, and
    operators look into one that is five percent behind.
    """

    startup: timedelta = field(
        default=timedelta(minutes=30), metadata=says("Until the first sign of training.")
    )
    hang: timedelta = field(
        default=timedelta(minutes=10), metadata=says("How long a rank may be in one collective.")
    )
    quiet: timedelta = field(
        default=timedelta(minutes=30),
        metadata=says("How long a rank may be outside of collectives without a step."),
    )
    straggler: float = field(
        default=0.05,
        metadata=says(
            "The share above the median rank's step time from which a rank is reported as slow.",
            gt=0,
            lt=10,
        ),
    )
    trainers: Sequence[Mapping[str, Any]] = field(
        default=(), metadata=says("Further forms of lines that a trainer prints, see receipts.md.")
    )


@dataclass(frozen=True)
class NetworkSettings:
    """``[network]``: networks of which NCCL is to use one between the job's nodes, none for any.

    Kinds (ib, roce, socket, plugin), or names as NCCL prints them. ``log``: NCCL is had to say
    which one it uses, in a file of the run; else only what it says anyway is judged.
    """

    expect: tuple[str, ...] = ()
    log: bool = False


@dataclass(frozen=True)
class Profile:
    """One or more profile files, combined; ``env`` holds each variable's entries in order.

    ``sources`` are the files it came from, the most basic one first. ``suppress`` maps the
    ids of lint rules the profile knowingly breaks to the reason. ``retry`` is what it changes in
    the retry table (``ncclops.classify.policy``), and ``lane``, which row of the matrix it uses.
    ``scopes`` say what happens to all variables of a kind, but for those that ``env`` names.
    ``growth`` is the budget of restarts in place, ``restarts`` the world that they have to leave;
    ``preflight`` what a node has to have, ``warm_start`` how workers are started, ``exit_codes``
    what `launch` exits with, ``notify`` whom it tells what. ``timeouts`` are those that it names,
    by their names in ``[timeouts]``, for process groups as ``groups.PATTERN``;
    ``ncclops.timeouts.settle`` derives the rest. ``uses`` are, for each parameter, the timeouts
    (``timeouts.NAME``) and variables that follow from it. ``remarks`` are what a person should know
    of how the files combine.
    """

    name: str
    description: str
    kind: Kind
    nodes: Nodes
    parameters: Mapping[str, Parameter]
    timeouts: Mapping[str, timedelta]
    env: Mapping[str, tuple[Entry, ...]]
    suppress: Mapping[str, str]
    retry: Mapping[str, Any]
    sources: tuple[str, ...]
    watch: WatchSettings = WatchSettings()
    network: NetworkSettings = NetworkSettings()
    growth: Growth = Growth()
    restarts: Restarts = Restarts()
    preflight: PreflightNeeds = PreflightNeeds()
    warm_start: WarmStart = WarmStart()
    exit_codes: ExitCodes = DEFAULT
    notify: NotifySettings = NOBODY
    scopes: Mapping[Scope, Entry] = field(default_factory=dict)
    uses: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    @property
    def per_host(self) -> tuple[str, ...]:
        """The variables for which a host's name decides."""
        return tuple(
            name
            for name, entries in self.env.items()
            if any(entry.when.host is not None for entry in entries)
        )

    def require_nodes(self, nnodes: int) -> None:
        """Raise ``ProfileError`` when the profile is not meant for a job of ``nnodes`` nodes."""
        if self.nodes == "one" and nnodes > 1:
            raise ProfileError(
                f"profile {self.name} is for one node and the job has {nnodes}: it switches the"
                " network off; choose multi-host-h200 or multi-host-h200-socket"
            )
        if self.nodes == "many" and nnodes == 1:
            raise ProfileError(
                f"profile {self.name} is for several nodes and the job has one:"
                " choose single-node-h200"
            )
