"""The archive: a run's own records, without secrets, and a manifest that says what was done."""

from __future__ import annotations

import io
import json
import os
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from ncclops._version import __version__
from ncclops.errors import NcclopsError, UsageError
from ncclops.record import environment_record
from ncclops.record.paths import (
    AGENT_LOG,
    ENVIRONMENT,
    EVENTS,
    NODES_LOG,
    RUN,
    STORE_LOG,
    VERDICT,
    RunPaths,
)
from ncclops.redaction.marks import Mark, marks_of
from ncclops.redaction.redactor import Redactor, redact_variables, rules

SCHEMA = "ncclops.bundle/1"
MANIFEST = "bundle.json"
# A ticket's attachment: what is longer is cut in the middle, where logs say least.
FILE_LIMIT_BYTES = 32 << 20

# What a run writes itself. Anything else in its directory is the script's (checkpoints, data), and
# not packed.
_TOP = frozenset({RUN, EVENTS, VERDICT, AGENT_LOG, STORE_LOG, NODES_LOG})
_FOLDERS = frozenset({"ranks", "incidents", "nodes"})
_DOCUMENTS = frozenset({".json"})
_LINES = frozenset({".jsonl", ".log", ".txt"})
_HEAD_SHARE = 4  # of a cut file, one part in four is its beginning


@dataclass(frozen=True)
class Packed:
    """One file of the archive; sizes in bytes. ``cut``: its middle is missing."""

    path: str
    bytes: int
    original_bytes: int
    cut: bool


@dataclass(frozen=True)
class LeftOut:
    """A file that is not in the archive, and why."""

    path: str
    why: str


@dataclass(frozen=True)
class Bundle:
    """What was packed, what was not, and how often each rule took something out."""

    archive: Path
    files: tuple[Packed, ...]
    left_out: tuple[LeftOut, ...]
    redactions: Counter[str]

    def manifest(self) -> dict[str, Any]:
        """The document ``ncclops.bundle/1``, as it lies in the archive."""
        return {
            "schema": SCHEMA,
            "ncclops": __version__,
            "created": time.time(),
            "files": [asdict(file) for file in self.files],
            "left_out": [asdict(file) for file in self.left_out],
            "redactions": dict(self.redactions),
            "rules": [{"name": rule.name, "what": rule.what} for rule in rules()],
        }


def pack(run: Path, archive: Path, *, file_limit: int = FILE_LIMIT_BYTES) -> Bundle:
    """Pack the records of ``run`` into ``archive`` (gzip-compressed tar), readable by its owner.

    The archive appears whole or not at all. Raises ``UsageError`` if ``run`` holds no run, or
    ``archive`` exists or cannot be written.
    """
    paths = RunPaths(run)
    if not paths.run.is_file() and not paths.events.is_file():
        raise UsageError(f"{run} holds no run (no {RUN}): name a run directory")
    if archive.exists():
        raise UsageError(f"{archive} exists: name another file with -o, or remove it")
    partial = archive.with_name(archive.name + ".partial")
    try:
        with open(partial, "xb", opener=_private) as file:
            bundle = _write(run, archive, file, file_limit)
        partial.replace(archive)
    except OSError as error:
        raise UsageError(f"cannot write {archive} ({error.strerror}): name another with -o") from (
            error
        )
    finally:
        partial.unlink(missing_ok=True)
    return bundle


def _write(run: Path, archive: Path, file: IO[bytes], file_limit: int) -> Bundle:
    redactor = Redactor(_marks(run))
    packed: list[Packed] = []
    left_out: list[LeftOut] = []
    folder = archive.name.partition(".")[0]
    with tarfile.open(fileobj=file, mode="w:gz") as tar:
        for path in _walk(run):
            name = path.relative_to(run).as_posix()
            try:
                why = _reason_to_leave_out(path, name, file_limit)
                if why is None:
                    packed.append(_add(tar, folder, path, name, redactor, file_limit))
            except OSError as error:
                why = error.strerror or "cannot be read"
            if why is not None:
                left_out.append(LeftOut(name, why))
        bundle = Bundle(archive, tuple(packed), tuple(left_out), redactor.taken)
        text = json.dumps(bundle.manifest(), indent=2).encode() + b"\n"
        tar.addfile(_entry(f"{folder}/{MANIFEST}", len(text), time.time()), io.BytesIO(text))
    return bundle


def _marks(run: Path) -> Iterator[Mark]:
    """Of the values of secrets in the environments of the run's ranks, and in this one."""
    yield from marks_of(os.environ, redact_variables(os.environ))
    for path in _walk(run):
        if path.name == ENVIRONMENT:
            with suppress(NcclopsError, OSError):
                snapshot = environment_record.ENVIRONMENT.read(path)
                yield from () if snapshot is None else snapshot.marks


def _walk(run: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(run):
        folders.sort()
        yield from (Path(folder) / name for name in sorted(files))


def _reason_to_leave_out(path: Path, name: str, file_limit: int) -> str | None:
    top = name.partition("/")[0]
    if name not in _TOP and (top not in _FOLDERS or "/" not in name):
        return "not a record of the run"
    if path.is_symlink() or not path.is_file():
        return "not a plain file"
    if path.suffix not in _DOCUMENTS | _LINES:
        return "not text"
    if path.suffix in _DOCUMENTS and path.stat().st_size > file_limit:
        return f"a document of {path.stat().st_size} bytes cannot be cut"
    return None


def _add(
    tar: tarfile.TarFile, folder: str, path: Path, name: str, redactor: Redactor, file_limit: int
) -> Packed:
    status = path.stat()
    cut = status.st_size > file_limit
    with tempfile.TemporaryFile() as clean:
        for text in _clean(path, redactor, file_limit if cut else None):
            clean.write(text.encode(errors="surrogateescape"))
        size = clean.tell()
        clean.seek(0)
        tar.addfile(_entry(f"{folder}/{name}", size, status.st_mtime), clean)
    return Packed(name, size, status.st_size, cut)


def _clean(path: Path, redactor: Redactor, keep: int | None) -> Iterator[str]:
    """The file's text without secrets; ``keep`` bytes of it if that is given."""
    if path.suffix in _LINES:
        lines = _all_lines(path) if keep is None else _ends(path, keep)
        yield from _records(lines, redactor) if path.suffix == ".jsonl" else redactor.lines(lines)
        return
    text = path.read_text(errors="surrogateescape")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        yield from redactor.lines(text.splitlines(keepends=True))
    else:
        yield json.dumps(redactor.document(document), indent=2) + "\n"


def _records(lines: Iterator[str], redactor: Redactor) -> Iterator[str]:
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            yield redactor.text(line)
        else:
            yield json.dumps(redactor.document(record)) + "\n"


def _all_lines(path: Path) -> Iterator[str]:
    with path.open(errors="surrogateescape", newline="\n") as file:
        yield from file


def _ends(path: Path, keep: int) -> Iterator[str]:
    """The beginning and the end of a file that is longer than ``keep`` bytes, in whole lines."""
    head = keep // _HEAD_SHARE
    with path.open("rb") as file:
        first = file.read(head)
        first = first[: first.rfind(b"\n") + 1] or first
        file.seek(-(keep - head), os.SEEK_END)
        file.readline()  # the rest of a line
        left_out = file.tell() - len(first)
        yield from first.decode(errors="surrogateescape").splitlines(keepends=True)
        yield f"[ncclops bundle: {left_out} bytes left out here]\n"
        for line in file:
            yield line.decode(errors="surrogateescape")


def _entry(name: str, size: int, modified: float) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mtime, entry.mode = size, int(modified), 0o600
    return entry


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
