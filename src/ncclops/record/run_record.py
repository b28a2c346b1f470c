"""``run.json``: what was started. Written once, at the start, and read here alone."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import msgspec

from ncclops.errors import UsageError
from ncclops.moments import LATEST_S
from ncclops.record.document_kind import DocumentKind
from ncclops.record.event_values import EnvChange

# What a run has and a dry run has not.
_BEGUN = ("run_id", "started", "argv", "cwd", "launcher")


class ProfileUsed(msgspec.Struct, frozen=True, kw_only=True):
    """The profile, the files that it was combined from, and its parameters, ``--param`` applied."""

    name: str
    files: list[str] = []
    parameters: dict[str, str | int | float | bool] | msgspec.UnsetType = msgspec.UNSET


class NodesPlanned(msgspec.Struct, frozen=True, kw_only=True):
    """The nodes that train and this one's place; where there are several, how they meet."""

    count: int
    spares: int | msgspec.UnsetType = msgspec.UNSET
    rank: int | None
    backend: str | msgspec.UnsetType = msgspec.UNSET
    store: str | msgspec.UnsetType = msgspec.UNSET
    id: str | msgspec.UnsetType = msgspec.UNSET


class Launcher(msgspec.Struct, frozen=True, kw_only=True):
    """The process that the user started (``host.process_identity``)."""

    host: str
    pid: int
    started_ticks: int
    boot_id: str
    pid_namespace: int


class AdvisoryNamed(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of the table of known issues that concerned the job when it was started."""

    id: str
    severity: str
    title: str


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """``ncclops.run/1``. What an older run does not say has its default.

    ``started`` is in seconds since the epoch, ``argv`` and ``cwd`` are the launcher's; ``command``
    is what each worker runs, both without secrets. ``stack`` has the versions by name, ``timeouts``
    each limit as text (``timeouts.model``), ``plan`` each variable as in `env diff --json`.
    ``software`` is ``host.software.Software`` of the launcher's node, ``advisories`` what was known
    to concern it, ``exit_codes`` what `launch` exits with by the kind of end; a run of before there
    were any has none of these.
    """

    run_id: str | None = None
    started: Annotated[float, msgspec.Meta(ge=0, le=LATEST_S)] | None = None
    argv: list[str] = []
    cwd: str | None = None
    profile: ProfileUsed | None = None
    restart: str | None = None
    max_restarts: int | None = None
    nodes: NodesPlanned | None = None
    nproc_per_node: int | None = None
    world_size: int | None = None
    command: list[str] = []
    stack: dict[str, str | None] = {}
    software: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    advisories: list[AdvisoryNamed] | msgspec.UnsetType = msgspec.UNSET
    exit_codes: dict[str, int] | msgspec.UnsetType = msgspec.UNSET
    timeouts: dict[str, str | None] = {}
    plan: list[EnvChange] = []
    launcher: Launcher | None = None

    def settled(self) -> dict[str, Any]:
        """What a dry run shows of it, as JSON."""
        document: dict[str, Any] = msgspec.to_builtins(self)
        return {name: value for name, value in document.items() if name not in _BEGUN}


RUN = DocumentKind(
    "ncclops.run/1", RunRecord, "`ncclops diagnose` shows what else the run has left"
)


def is_of_another(path: Path, run_id: str) -> bool:
    """Whether the record in ``path`` says that its directory is another run's by now.

    A run goes on where its directory was removed, and writes by paths. Cheap: it is asked before
    each event of a worker.
    """
    try:
        found = path.stat()
    except OSError:  # nothing says so
        return False
    return _run_id_in(path, found.st_ino, found.st_mtime_ns, found.st_size) not in (None, run_id)


@lru_cache(maxsize=1)
def _run_id_in(path: Path, *version: int) -> str | None:  # noqa: ARG001 - read again once it differs
    try:
        record = RUN.read(path)
    except UsageError:
        return None
    return None if record is None else record.run_id
