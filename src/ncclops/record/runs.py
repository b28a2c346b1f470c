"""Which run is meant: a directory, an id or the beginning of one, or the newest."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from ncclops.errors import UsageError
from ncclops.record.paths import DEFAULT_PARENT, EVENTS, RunPaths

_CONNECT_LIMIT_S = 2.0
_NAMED = 4  # runs that an error names


class Found(NamedTuple):
    """A run, and how many others are under way beside it."""

    path: Path
    other_live: int = 0


def find(text: str | None, *, live_only: bool = False, parent: Path = DEFAULT_PARENT) -> Found:
    """The run that ``text`` names, in ``parent`` if it is no path of its own.

    Without ``text`` the newest that is under way, and without such a one the newest of all, unless
    ``live_only``. Raises ``UsageError`` where there is none, or more than one.
    """
    if text is not None:
        return Found(_named(text, parent))
    runs = sorted(_different(_runs(parent)), key=_began, reverse=True)
    if not runs:
        raise UsageError(f"no runs in {parent}/: name a run directory, or go where it was started")
    live = [run for run in runs if is_live(run)]
    if live:
        return Found(live[0], len(live) - 1)
    if live_only:
        raise UsageError(
            f"no run in {parent}/ is under way here: name a run directory, or go to its host"
        )
    return Found(runs[0])


def is_live(run_dir: Path) -> bool | None:
    """Whether the run has an agent on this machine that we may talk to.

    None where there may be one, and it is another user's: whether its launcher runs is to be seen.
    """
    from ncclops.record import control_address  # sockets and tokens, which few need

    if RunPaths(run_dir).verdict.exists():
        return False
    try:
        control_address.connect_unix(run_dir, _CONNECT_LIMIT_S).close()
    except PermissionError:
        return None
    except OSError:
        return False
    return True


def refuse_several(directory: Path) -> None:
    """Raise ``UsageError`` for a directory of several runs, which is no run itself."""
    if (
        not RunPaths(directory).holds_run()
        and len(runs := sorted(_different(_runs(directory)))) > 1
    ):
        raise UsageError(
            f"{directory} holds {len(runs)} runs ({some_of(runs)}): name one of them, as in"
            f" {directory / runs[-1].name}"
        )


def no_run(directory: Path, text: str | None = None) -> UsageError:
    """What to raise for a ``directory``, named as ``text``, that holds no run, or none that this
    user may look into."""
    named = text or directory
    try:
        RunPaths(directory).events.stat()
    except PermissionError as error:
        return UsageError(f"cannot read {named} ({error.strerror}): ask as its owner")
    except OSError:
        pass
    return UsageError(f"{named} holds no run (no {EVENTS}): name a run directory")


def some_of(runs: Iterable[Path]) -> str:
    """The names of ``runs``, cut where there are many."""
    names = [run.name for run in runs]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _named(text: str, parent: Path) -> Path:
    direct = Path(text)
    if RunPaths(direct).holds_run():
        return direct.resolve()
    if direct.exists():
        refuse_several(direct)
        raise no_run(direct, text)
    fitting = [run for run in _runs(parent) if text and run.name.startswith(text)]
    exact = [run for run in fitting if run.name == text]
    match _different(exact or fitting):
        case [one]:
            return one.resolve()
        case []:
            raise UsageError(
                f"no run {text!r}: it is neither a run directory nor the beginning of a run's id"
                f" in {parent}/; `ncclops runs` lists those there are"
            )
        case several:
            raise UsageError(f"{text!r} fits several runs ({some_of(sorted(several))}): say more")


def _runs(parent: Path) -> list[Path]:
    try:
        return [path for path in parent.iterdir() if RunPaths(path).holds_run()]
    except OSError:
        return []


def _different(runs: list[Path]) -> list[Path]:
    """``runs`` without links to others of them: one was moved while it went on."""
    links_first = sorted(runs, key=Path.is_symlink, reverse=True)
    return list({run.resolve(): run for run in links_first}.values())


def _began(run: Path) -> tuple[float, str]:
    # run.json is written once, at the start; ids have a resolution of seconds.
    paths = RunPaths(run)
    for path in (paths.run, paths.events):
        try:
            return path.stat().st_mtime, run.name
        except OSError:
            continue
    return 0.0, run.name
