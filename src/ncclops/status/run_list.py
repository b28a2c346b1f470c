"""The runs below a directory, each in a line: what a list of thousands of them needs, and no more.

Of ``run.json`` and ``verdict.json`` some fields are read, and no events. A run whose files cannot
be read has a line that says so.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from ncclops.exit_codes import NextAction
from ncclops.host import process_identity, process_view
from ncclops.host.process_identity import ProcessIdentity
from ncclops.host_name import host_name
from ncclops.rank_lists import ranks_named
from ncclops.record import runs
from ncclops.record.paths import EVENTS, RunPaths
from ncclops.record.regular_file import read_regular
from ncclops.record.run_record import RUN
from ncclops.record.verdict_record import VERDICT, Outcome

State = Literal["ended", "running", "lost", "unknown", "unreadable"]
# A run is a few directories below the one that is asked about; what is further below is not ours.
_MOST_LEVELS = 6
_MOST_DIRECTORIES = 100_000

Part = TypeVar("Part")


class _Launcher(msgspec.Struct, frozen=True):
    host: str = ""
    pid: int = 0
    started_ticks: int = 0
    boot_id: str = ""
    pid_namespace: int = 0


class _Profile(msgspec.Struct, frozen=True):
    name: str = ""


class _Run(msgspec.Struct, frozen=True):
    """Of ``run.json``."""

    schema: str = ""
    run_id: str | None = None
    started: float | None = None
    world_size: int | None = None
    profile: _Profile | None = None
    launcher: _Launcher | None = None


class _Story(msgspec.Struct, frozen=True):
    what: str = ""


class _Class(msgspec.Struct, frozen=True):
    class_: str = msgspec.field(name="class", default="")


class _Goodput(msgspec.Struct, frozen=True):
    ratio: float | None = None


class _Verdict(msgspec.Struct, frozen=True):
    """Of ``verdict.json``."""

    outcome: Outcome
    reason: str
    seconds: float
    exit_code: int
    schema: str = ""
    ranks_lost: list[int] = []
    next_action: NextAction | None = None
    classification: _Class | None = None
    goodput: _Goodput | None = None
    story: _Story | None = None


@dataclass(frozen=True, kw_only=True)
class RunLine:
    """One run. ``started`` is in seconds since the epoch, ``seconds`` how long it took or has taken
    so far, ``goodput`` a share from 0 to 1; None: not known, or not measured yet.

    ``state``: ``lost`` has no verdict and no agent, ``unknown`` neither a verdict nor a host that
    can be looked at from here. ``cause`` is a sentence, empty where there is nothing to say;
    ``failure_class`` what kind of failure it was.
    """

    path: Path
    state: State
    outcome: Outcome | None = None
    started: float | None = None
    seconds: float | None = None
    goodput: float | None = None
    cause: str = ""
    failure_class: str | None = None
    next_action: NextAction | None = None
    exit_code: int | None = None
    run_id: str | None = None
    world_size: int | None = None
    profile: str | None = None

    @property
    def is_bad(self) -> bool:
        """Whether the job has not done what it was started for, by its own fault or others'."""
        return self.outcome in ("failed", "no-receipt") or self.state in ("lost", "unreadable")

    def to_json(self) -> dict[str, Any]:
        """As in ``ncclops.runs/1``."""
        return {
            "run_dir": str(self.path),
            "run_id": self.run_id,
            "state": self.state,
            "outcome": self.outcome,
            "exit_code": self.exit_code,
            "next_action": self.next_action,
            "started": self.started,
            "seconds": self.seconds,
            "goodput": self.goodput,
            "class": self.failure_class,
            "cause": self.cause,
            "world_size": self.world_size,
            "profile": self.profile,
        }


def list_runs(directories: Sequence[Path], *, since: float | None = None) -> Iterator[RunLine]:
    """The runs in and below ``directories``, the newest first, each read when it is asked for.

    ``since`` leaves out those that were started before, in seconds since the epoch. Raises
    ``OSError`` where one of ``directories`` cannot be read; what is below it costs its own line.
    """
    found = {path: None for directory in directories for path in _below(directory)}
    began = [(*_begun(path), path) for path in found]
    # One of which it is not known when it was started is shown: it may be what is looked for.
    kept = [each for each in began if since is None or each[0] is None or each[0] >= since]
    newest = sorted(kept, key=lambda each: (each[0] or float("inf"), str(each[3])), reverse=True)
    for started, run, problem, path in newest:
        yield _line(path, started, run, problem)


def _below(directory: Path) -> Iterator[Path]:
    """The run directories in and below ``directory``; not those within a run."""
    if RunPaths(directory).holds_run():
        yield directory
        return
    level, looked_at = [directory], 0
    for depth in range(_MOST_LEVELS):
        following: list[Path] = []
        for each in level:
            looked_at += 1
            if looked_at > _MOST_DIRECTORIES:
                return
            try:
                with os.scandir(each) as entries:
                    inside = sorted(entry.path for entry in entries if _is_directory(entry))
            except OSError:
                if depth == 0:
                    raise
                continue  # of others, or gone meanwhile: no run that we could read
            for path in inside:
                if RunPaths(Path(path)).holds_run():
                    yield Path(path)
                else:
                    following.append(Path(path))
        level = following


def _is_directory(entry: os.DirEntry[str]) -> bool:
    # A link may lead in a circle, or to what is listed anyway.
    return not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)


def _begun(path: Path) -> tuple[float | None, _Run | None, str | None]:
    """When a run was started, what it records of that, and what is wrong with the record."""
    paths = RunPaths(path)
    problem = None
    try:
        run = _part(paths.run, _Run, RUN.schema)
    except (OSError, ValueError) as error:
        run, problem = None, _problem(paths.run, error)
    if run is not None and run.started is not None:
        return run.started, run, problem
    try:
        return paths.events.stat().st_mtime, run, problem
    except OSError:
        return None, run, problem


def _line(path: Path, started: float | None, run: _Run | None, problem: str | None) -> RunLine:
    run = run or _Run()
    begun: dict[str, Any] = {
        "path": path,
        "started": started,
        "run_id": run.run_id,
        "world_size": run.world_size,
        "profile": None if run.profile is None else run.profile.name,
    }
    paths = RunPaths(path)
    try:
        verdict = _part(paths.verdict, _Verdict, VERDICT.schema)
    except (OSError, ValueError) as error:
        return RunLine(state="unreadable", cause=_problem(paths.verdict, error), **begun)
    if verdict is None:
        state, seconds = _without_verdict(path, run)
        if problem is not None:
            return RunLine(state="unreadable", cause=problem, **begun)
        return RunLine(state=state, seconds=seconds, cause=_SAYS[state], **begun)
    return RunLine(
        state="ended",
        outcome=verdict.outcome,
        exit_code=verdict.exit_code,
        next_action=verdict.next_action,
        seconds=verdict.seconds,
        goodput=None if verdict.goodput is None else verdict.goodput.ratio,
        failure_class=None if verdict.classification is None else verdict.classification.class_,
        cause=_cause(verdict),
        **begun,
    )


_SAYS: dict[State, str] = {
    "running": "",
    "lost": f"its agent is gone and has left no verdict; see {EVENTS}",
    "unknown": "no verdict so far, and no agent of it on this machine",
}


def _cause(verdict: _Verdict) -> str:
    if verdict.outcome == "completed":
        return f"finished without {ranks_named(verdict.ranks_lost)}" if verdict.ranks_lost else ""
    return verdict.reason if verdict.story is None else verdict.story.what


def _without_verdict(path: Path, run: _Run) -> tuple[State, float | None]:
    """Whether it runs, and for how long it has done so, or did."""
    began = run.started
    if is_under_way(path, run.launcher):
        return "running", None if began is None else max(0.0, time.time() - began)
    try:
        last = RunPaths(path).events.stat().st_mtime
    except OSError:
        last = None
    seconds = None if began is None or last is None else max(0.0, last - began)
    return ("lost" if _was_here(run.launcher) else "unknown"), seconds


def is_under_way(run_dir: Path, launcher: Any | None) -> bool:
    """Whether a run without a verdict has an agent on this machine: by its socket, which a copy of
    its directory does not have, or by ``launcher`` of ``run.json``, if known."""
    live = runs.is_live(run_dir)
    if not live and launcher is not None:
        live = process_identity.is_alive(ProcessIdentity.of(launcher))
    return bool(live)


def _was_here(launcher: _Launcher | None) -> bool:
    """Whether an agent of the run would be on this machine; a restart of it has ended all."""
    if launcher is None:
        return False
    try:
        return launcher.boot_id == process_view.boot_id() or launcher.host == host_name()
    except OSError:
        return False


def _part(path: Path, kind: type[Part], schema: str) -> Part | None:
    """Some fields of the document in ``path``; None if there is none.

    Raises ``OSError`` or ``ValueError`` where it cannot be read, or is another document.
    """
    try:
        text = read_regular(path)
    except FileNotFoundError:
        return None
    part = msgspec.json.decode(text, type=kind)
    if (found := getattr(part, "schema", None)) != schema:
        raise ValueError(f"it is {found or 'a document without a schema'}, not {schema}")
    return part


def _problem(path: Path, error: Exception) -> str:
    what = error.strerror if isinstance(error, OSError) else str(error)
    return f"{path.name} cannot be read: {what}"
