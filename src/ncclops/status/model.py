"""The status of a run at one moment: plain values, and the document ``ncclops.status/1``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import msgspec

SCHEMA = "ncclops.status/1"

# starting    workers have no process group yet
# warming-up  they have, and no step or update has been made yet: compiling, mostly
# training    steps come
# running     they have a process group, and show nothing of steps
# restarting  after a fault, before the next step
# retrying    an attempt has failed, the next one has not begun
# stopping    the run was asked to stop
# ended       there is a verdict
# lost        no verdict and no agent: it was killed, or its host is gone
RunPhase = Literal[
    "starting",
    "warming-up",
    "training",
    "running",
    "restarting",
    "retrying",
    "stopping",
    "ended",
    "lost",
]


@dataclass(frozen=True, kw_only=True)
class LastEvent:
    """The newest event about a rank: when (seconds since the epoch), its name, what it says."""

    ts: float
    event: str
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """One rank, by its initial number. What is not known is None.

    ``phase`` is ``starting``, ``warming-up``, ``training`` or ``running`` as for the run, ``ended``
    or ``failed`` for a worker that has exited, ``lost`` for one whose end nobody has seen while the
    run is over, or what the script has declared (``checkpoint``).
    ``step_s`` is the median duration of its last steps,
    ``own_step_s`` the same without waiting for others (the whole step where the script does not
    say), ``step_ratio`` its share of the median rank's. Ages are in seconds before ``as_of``.
    """

    rank: int
    host: str
    phase: str
    pid: int | None = None
    iteration: int = 0
    step: int | None = None
    step_s: float | None = None
    own_step_s: float | None = None
    step_ratio: float | None = None
    step_age_s: float | None = None
    heartbeat_age_s: float | None = None
    memory_gib: float | None = None
    gpu_memory_gib: float | None = None
    last_event: LastEvent | None = None

    @property
    def is_gone(self) -> bool:
        """Whether its process has ended, or is not known to run in a run that is over."""
        return self.phase in ("ended", "failed", "lost")


@dataclass(frozen=True, kw_only=True)
class StragglerStatus:
    """A rank whose own time is ``ratio`` of the median's; ``kind`` as the watch has recorded it."""

    rank: int
    ratio: float
    kind: str | None = None
    since_step: int | None = None


@dataclass(frozen=True, kw_only=True)
class FaultStatus:
    """A fault. ``kind`` is its class as far as it is known: the classifier's, else what the
    restart core calls it, else ``unclassified``."""

    ts: float
    rank: int | None
    kind: str
    cause: str


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """A run at ``as_of`` (seconds since the epoch).

    ``source`` is where this is from: the ``agent``'s server, or the run ``directory`` alone.
    ``step`` is the last one that all ranks which still run and report steps have ended.
    ``faults`` counts by class.
    """

    run_id: str
    run_dir: str
    phase: RunPhase
    as_of: float
    source: Literal["agent", "directory"] = "directory"
    notes: tuple[str, ...] = ()
    started: float | None = None
    seconds: float | None = None
    profile: str | None = None
    world_size: int | None = None
    nodes: tuple[str, ...] = ()
    attempt: int = 0
    iteration: int = 0
    restarts: int = 0
    retries: int = 0
    step: int | None = None
    median_step_s: float | None = None
    ranks: tuple[RankStatus, ...] = ()
    stragglers: tuple[StragglerStatus, ...] = ()
    faults: Mapping[str, int] = field(default_factory=dict)
    last_fault: FaultStatus | None = None
    goodput: Mapping[str, Any] | None = None  # see ncclops.goodput
    outcome: str | None = None
    exit_code: int | None = None
    reason: str | None = None

    def to_json(self) -> dict[str, Any]:
        """``ncclops.status/1``."""
        return {"schema": SCHEMA, **asdict(self)}


def from_json(document: Mapping[str, Any]) -> RunStatus:
    """The status that ``to_json`` has written, of this version or a later one.

    Raises ``ValueError`` if it is none.
    """
    if (schema := document.get("schema")) != SCHEMA:
        raise ValueError(f"{schema!r} is not {SCHEMA}")
    try:
        return msgspec.convert(document, RunStatus)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no status: {error}") from error
