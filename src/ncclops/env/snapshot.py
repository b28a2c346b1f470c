"""Environments written down, and two of them compared.

A snapshot holds every variable, with secrets taken out, what NCCL's configuration files add,
and the versions that decide what is read.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path

import psutil

from ncclops.env.catalogue import catalogue
from ncclops.env.origins import from_files
from ncclops.errors import UsageError
from ncclops.given_path import given_path
from ncclops.host.software import installed_nccl, installed_torch
from ncclops.host_name import host_name
from ncclops.record import documents
from ncclops.record.environment_record import ENVIRONMENT, EnvSnapshot
from ncclops.record.paths import ENVIRONMENT_FILE, RunPaths
from ncclops.record.regular_file import write_named
from ncclops.record.run_record import RUN
from ncclops.redaction.marks import marks_of
from ncclops.redaction.redactor import redact_variables

__all__ = ["EnvSnapshot", "VariableDifference", "compare", "load", "take", "write"]


@dataclass(frozen=True)
class VariableDifference:
    """A variable that two environments do not share; ``ranks`` is as in the catalogue."""

    name: str
    a: str | None
    b: str | None
    ranks: str


def take(
    environ: Mapping[str, str], *, label: str = "here", keep_secrets: bool = False
) -> EnvSnapshot:
    """A snapshot of ``environ`` on this host."""
    added = {name: setting.value for name, setting in from_files(environ).items()}
    variables = environ if keep_secrets else redact_variables(environ)
    files = added if keep_secrets else redact_variables(added)
    return EnvSnapshot(
        label=label,
        variables=dict(sorted(variables.items())),
        files=dict(sorted(files.items())),
        host=host_name(),
        taken=time.time(),
        versions={
            "python": platform.python_version(),
            "torch": installed_torch(),
            "nccl": installed_nccl(),
        },
        redacted=not keep_secrets,
        marks=[] if keep_secrets else marks_of(environ, variables),
    )


def is_another_file(path: Path) -> bool:
    """Whether ``path`` holds something else than a snapshot, which a newer one may replace."""
    try:
        if not path.is_file() or not path.stat().st_size:
            return False
        ENVIRONMENT.parse(documents.load(path), path)
    except (OSError, ValueError, UsageError):
        return True
    return False


def write(
    environ: Mapping[str, str], path: str | PathLike[str], *, keep_secrets: bool = False
) -> EnvSnapshot:
    """Take a snapshot of ``environ`` and write it to ``path``, which may be a device or a pipe.

    Raises ``OSError``. A rank's directory holds its own; ``load`` finds it there.
    """
    path = Path(path)
    taken = take(environ, label=path.stem, keep_secrets=keep_secrets)
    write_named(path, ENVIRONMENT.encode(taken))
    return taken


def load(what: str | PathLike[str]) -> EnvSnapshot:
    """The environment that ``what`` names. Raises ``UsageError`` when there is none.

    ``here`` is this process's, ``pid:N`` a running process's; else a snapshot file, a rank's
    directory, or a run directory (its rank 0, or what its plan left in place).
    """
    what = str(given_path(what, "a snapshot or a run, 'here' or 'pid:N'"))
    if what == "here":
        return take(os.environ)
    if what.startswith("pid:"):
        return _of_process(what)
    path = Path(what)
    if path.is_dir():
        path = _in_directory(path)
    try:
        document = documents.load(path)
    except OSError as error:
        raise UsageError(f"{what}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(
            f"{path}: not a snapshot but other text ({error}): write one with"
            " `ncclops env snapshot`, or look at a job script with `ncclops env lint`"
        ) from None
    return _from_document(document, what, path)


def _in_directory(directory: Path) -> Path:
    run = RunPaths(directory)
    for candidate in (directory / ENVIRONMENT_FILE, run.rank(0).environment, run.run):
        if candidate.is_file():
            return candidate
    raise UsageError(f"{directory}: holds neither {ENVIRONMENT_FILE} nor {run.run.name}")


def _from_document(document: object, what: str, path: Path) -> EnvSnapshot:
    if isinstance(document, dict) and isinstance(document.get("plan"), list):
        # run.json, or what a dry run has printed
        plan = RUN.parse(document | {"schema": RUN.schema}, path).plan
        present = {row.name: row.after for row in plan if row.after is not None}
        return EnvSnapshot(what, redact_variables(present))
    return replace(ENVIRONMENT.parse(document, path), label=what)


def _of_process(what: str) -> EnvSnapshot:
    number = what.removeprefix("pid:")
    try:
        environ = psutil.Process(int(number)).environ()
    except ValueError:
        raise UsageError(f"{what}: write a process as pid:1234") from None
    except psutil.AccessDenied:
        raise UsageError(f"{what}: not allowed to look into that process") from None
    except (psutil.Error, OSError):
        raise UsageError(f"{what}: there is no such process") from None
    return take(environ, label=what)


def compare(a: EnvSnapshot, b: EnvSnapshot) -> list[VariableDifference]:
    """What differs between two environments, what must be equal on all ranks first."""
    left, right = a.effective, b.effective
    differences = [
        VariableDifference(name, left.get(name), right.get(name), _ranks(name))
        for name in sorted(left.keys() | right.keys())
        if left.get(name) != right.get(name)
    ]
    order = {"equal": 0, "better equal": 1, "": 2, "free": 3, "per host": 4, "per rank": 5}
    return sorted(differences, key=lambda row: (order.get(row.ranks, 2), row.name))


def _ranks(name: str) -> str:
    variable = catalogue().get(name)
    return variable.ranks if variable else ""
