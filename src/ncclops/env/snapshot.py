"""Environments written down, and two of them compared.

A snapshot holds every variable, with secrets taken out, what NCCL's configuration files add,
and the versions that decide what is read.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from ncclops.env.catalogue import catalogue
from ncclops.env.host import installed_nccl, installed_torch
from ncclops.env.sources import from_files
from ncclops.errors import UsageError
from ncclops.record.paths import ENVIRONMENT, RunPaths
from ncclops.redaction.redactor import redact_variables

SCHEMA = "ncclops.env-snapshot/1"
# What a run directory keeps for each rank.


@dataclass(frozen=True)
class EnvSnapshot:
    """One environment. ``files`` is what NCCL adds to it from its configuration files."""

    label: str
    variables: Mapping[str, str]
    files: Mapping[str, str] = field(default_factory=dict)
    host: str | None = None
    taken: float | None = None
    versions: Mapping[str, str | None] = field(default_factory=dict)
    redacted: bool = True

    def to_json(self) -> dict[str, Any]:
        """The document ``ncclops.env-snapshot/1``."""
        return {"schema": SCHEMA, **asdict(self)}

    @property
    def effective(self) -> dict[str, str]:
        """What NCCL and everything else sees: the files never overrule the environment."""
        return {**self.files, **self.variables}


@dataclass(frozen=True)
class VariableDifference:
    """A variable that two environments do not share; ``ranks`` is the catalogue's word on it."""

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
        host=socket.gethostname(),
        taken=time.time(),
        versions={
            "python": platform.python_version(),
            "torch": installed_torch(),
            "nccl": installed_nccl(),
        },
        redacted=not keep_secrets,
    )


def write(environ: Mapping[str, str], path: Path, *, keep_secrets: bool = False) -> EnvSnapshot:
    """Take a snapshot of ``environ`` and write it to ``path``. Raises ``OSError``.

    A rank's directory holds its own as ``environment.json``; ``load`` finds it there.
    """
    taken = take(environ, label=path.stem, keep_secrets=keep_secrets)
    text = json.dumps(taken.to_json(), indent=2)
    path.write_text(text + "\n", encoding="utf-8")
    return taken


def load(what: str) -> EnvSnapshot:
    """The environment that ``what`` names. Raises ``UsageError`` when there is none.

    ``here`` is this process's, ``pid:N`` a running process's; else a snapshot file, a rank's
    directory, or a run directory (its rank 0, or what its plan left in place).
    """
    if what == "here":
        return take(os.environ)
    if what.startswith("pid:"):
        return _of_process(what)
    path = Path(what)
    if path.is_dir():
        path = _in_directory(path)
    try:
        document = json.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UsageError(f"{what}: cannot be read: {reason}") from None
    except json.JSONDecodeError as error:
        raise UsageError(
            f"{path}: not a snapshot but other text ({error}): write one with"
            " `ncclops env snapshot`, or look at a job script with `ncclops env lint`"
        ) from None
    return _from_document(document, what, path)


def _in_directory(directory: Path) -> Path:
    run = RunPaths(directory)
    for candidate in (directory / ENVIRONMENT, run.rank(0).environment, run.run):
        if candidate.is_file():
            return candidate
    raise UsageError(f"{directory}: holds neither {ENVIRONMENT} nor {run.run.name}")


def _from_document(document: Any, what: str, path: Path) -> EnvSnapshot:
    if isinstance(document, dict) and document.get("schema") == SCHEMA:
        known = {
            name: document[name] for name in EnvSnapshot.__dataclass_fields__ if name in document
        }
        return EnvSnapshot(**{**known, "label": what})
    if isinstance(document, dict) and isinstance(document.get("plan"), list):
        rows = {row["name"]: row["after"] for row in document["plan"]}
        present = {name: value for name, value in rows.items() if value is not None}
        return EnvSnapshot(what, redact_variables(present))
    raise UsageError(f"{path}: not a snapshot: write one with `ncclops env snapshot`")


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
