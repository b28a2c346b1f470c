"""Where a value comes from: NCCL's configuration files, and the process that exported it.

NCCL reads ``NCCL_CONF_FILE`` or else ``~/.nccl.conf``, then always ``/etc/nccl.conf``, once per
process, and puts what it finds into the C environment without overwriting. Neither
``os.environ`` nor ``/proc`` shows it. How a line is read was tried on libnccl 2.32.3: nothing is
stripped, no quotes, no comments behind a value, and the first line of a name wins.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from ncclops.record.regular_file import read_regular
from ncclops.toml_files import with_home

_LONGEST = 1023  # bytes of a name or value that NCCL keeps
_MOST_BYTES = 1 << 20  # of a file


@dataclass(frozen=True)
class ConfLine:
    """One setting of a configuration file, as NCCL reads it."""

    name: str
    value: str
    file: Path
    line: int


@dataclass(frozen=True)
class Effective:
    """What NCCL sees for a name: its value and where that comes from."""

    name: str
    value: str
    source: str


def parse_conf(text: str, file: Path) -> list[ConfLine]:
    """The settings in ``text``; a name that occurs twice is there twice, and the first counts."""
    settings = []
    for number, line in enumerate(text.split("\n"), start=1):
        name, equals, value = line.partition("=")
        if not line.startswith("#") and equals:
            settings.append(ConfLine(name[:_LONGEST], value[:_LONGEST], file, number))
    return settings


def conf_files(environ: Mapping[str, str], etc: Path = Path("/etc")) -> list[Path]:
    """The files that NCCL would read under ``environ``, the one that wins first."""
    named = environ.get("NCCL_CONF_FILE")
    # NCCL asks the password database, not $HOME; both agree but for odd set-ups.
    user = Path(named) if named else with_home(environ.get("HOME") or "~") / ".nccl.conf"
    return [user, etc / "nccl.conf"] if named or user.is_absolute() else [etc / "nccl.conf"]


def read_conf_files(environ: Mapping[str, str], etc: Path = Path("/etc")) -> list[ConfLine]:
    """All settings of the regular files that can be read, in the order of NCCL's reading."""
    settings = []
    for path in conf_files(environ, etc):
        try:
            text = read_regular(path, _MOST_BYTES).decode(errors="replace")
        except OSError:
            continue
        settings.extend(parse_conf(text, path))
    return settings


def from_files(environ: Mapping[str, str], etc: Path = Path("/etc")) -> dict[str, Effective]:
    """What NCCL adds to ``environ`` from its files: only names that ``environ`` does not have."""
    added: dict[str, Effective] = {}
    for setting in read_conf_files(environ, etc):
        if setting.name not in environ and setting.name not in added:
            where = f"{setting.file}, line {setting.line}"
            added[setting.name] = Effective(setting.name, setting.value, where)
    return added


def effective(environ: Mapping[str, str], etc: Path = Path("/etc")) -> dict[str, str]:
    """What NCCL and everything else sees: ``environ``, and what the files add to it."""
    return {name: each.value for name, each in from_files(environ, etc).items()} | dict(environ)


def exported_by(name: str, value: str, *, pid: int | None = None) -> str:
    """The origin of ``name``: the nearest ancestor process that started without that value.

    A process that exports a variable does not show it in its own ``/proc`` entry, its children
    do. What the first process already had came with the container image or the service that
    started it; what the scheduler's step daemon hands out came from the submitted environment
    or a prolog.
    """
    giver = "this process's own start"
    for ancestor, environ in _ancestry(pid or os.getpid()):
        if environ is None:
            return f"{giver} or an ancestor of it that cannot be looked into"
        if environ.get(name) != value:
            return _describe(ancestor)
        giver = _describe(ancestor)
        if ancestor.pid == 1:
            return "the container image or the service that started it (process 1)"
    return giver


def _ancestry(pid: int) -> Iterator[tuple[psutil.Process, dict[str, str] | None]]:
    """Ancestors from the parent up, each with the environment it was started with."""
    try:
        ancestors = psutil.Process(pid).parents()
    except psutil.Error:
        return
    for ancestor in ancestors:
        try:
            yield ancestor, ancestor.environ()
        except (psutil.Error, OSError):
            yield ancestor, None


def _describe(process: psutil.Process) -> str:
    try:
        name = process.name()
    except psutil.Error:
        name = "a process that has ended"
    if name.startswith("slurmstepd"):
        return "the scheduler: the submitted environment or a prolog (slurmstepd)"
    return f"{name} (process {process.pid})"
