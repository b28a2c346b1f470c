"""The archive: a run's own records, without secrets, and a manifest that says what was done."""

from __future__ import annotations

import errno
import io
import json
import os
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from ncclops._version import __version__
from ncclops.errors import UsageError
from ncclops.record.paths import (
    AGENT_LOG,
    EVENTS,
    FORK_SERVER_LOG,
    INCIDENTS,
    NODES,
    NODES_LOG,
    PREFLIGHT_FILE,
    RANKS,
    RUN_FILE,
    STORE_LOG,
    VERDICT_FILE,
    WHERE,
    RunPaths,
)
from ncclops.record.regular_file import open_regular
from ncclops.record.runs import no_run
from ncclops.record.tree import walk
from ncclops.redaction.of_run import redactor_of
from ncclops.redaction.redactor import Redactor, rules

SCHEMA = "ncclops.bundle/1"
MANIFEST = "bundle.json"
# A ticket's attachment: what is longer is cut in the middle, where logs say least.
FILE_LIMIT_BYTES = 32 << 20

# What a run writes itself. Anything else in its directory is the script's (checkpoints, data), and
# not packed.
_TOP = frozenset(
    {RUN_FILE, EVENTS, VERDICT_FILE, PREFLIGHT_FILE}
    | {AGENT_LOG, STORE_LOG, NODES_LOG, FORK_SERVER_LOG}
)
_FOLDERS = frozenset({RANKS, INCIDENTS, NODES, WHERE})
_DOCUMENTS = frozenset({".json"})
_LINES = frozenset({".jsonl", ".log", ".txt"})
_TOO_DEEP = "JSON of too many levels"
# A script that writes a file a step into the run directory must not keep a bundle from being made.
_MOST_FILES, _MOST_IN_FOLDER = 100_000, 10_000
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


def pack(
    run: Path, archive: Path, *, file_limit: int = FILE_LIMIT_BYTES, replace: bool = False
) -> Bundle:
    """Pack the records of ``run`` into ``archive`` (gzip-compressed tar), readable by its owner.

    The archive appears whole or not at all. Raises ``UsageError`` if ``run`` holds no run, or
    ``archive`` exists (a file, unless ``replace``) or cannot be written.
    """
    if not RunPaths(run).holds_run():
        raise no_run(run)
    if archive.exists() and not (replace and archive.is_file()):
        raise UsageError(f"{archive} exists: name another file with -o, or give --force")
    partial: Path | None = None
    try:
        # A name of its own: another bundle of the run may be under way.
        fd, name = tempfile.mkstemp(f".{archive.name[:100]}.partial", ".", archive.parent)
        partial = Path(name)
        with os.fdopen(fd, "wb") as file:
            bundle = _write(run, archive, file, file_limit)
        partial.replace(archive)
    except OSError as error:
        raise UsageError(f"cannot write {archive} ({error.strerror}): name another with -o") from (
            error
        )
    finally:
        if partial is not None:
            partial.unlink(missing_ok=True)
    return bundle


def _write(run: Path, archive: Path, file: IO[bytes], file_limit: int) -> Bundle:
    run = run.resolve()
    redactor = redactor_of(RunPaths(run))
    packed: list[Packed] = []
    left_out: list[LeftOut] = []
    # Never empty: a member's name would begin with "/".
    folder = archive.name.partition(".")[0] or archive.name.strip(".").partition(".")[0] or "run"
    with tarfile.open(fileobj=file, mode="w:gz") as tar:
        for path in _walk(run, left_out):
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


def _walk(run: Path, left_out: list[LeftOut]) -> Iterator[Path]:
    """The files of ``run`` in order; what there are too many of is added to ``left_out``."""
    left = _MOST_FILES
    for folder, folders, files in walk(run):
        folders.sort()
        taken = min(len(files), _MOST_IN_FOLDER, left)
        left -= taken
        yield from (folder / name for name in sorted(files)[:taken])
        if taken < len(files):
            name = folder.relative_to(run).as_posix()
            left_out.append(LeftOut(name, f"{len(files) - taken:,} more files are there"))


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
    with open_regular(path, follow=False) as file:
        if not _is_at(file, path):
            raise OSError(errno.ELOOP, "a link leads out of the run")
        # Of this moment: a file may grow faster than it is read.
        status = os.fstat(file.fileno())
        cut = status.st_size > file_limit
        raw = _ends(file, status.st_size, file_limit) if cut else file.read(status.st_size)
    with tempfile.TemporaryFile() as clean:
        for text in _clean(path.suffix, raw, redactor):
            clean.write(text.encode(errors="surrogateescape"))
        size = clean.tell()
        clean.seek(0)
        tar.addfile(_entry(f"{folder}/{name}", size, status.st_mtime), clean)
    return Packed(name, size, status.st_size, cut)


def _is_at(file: IO[bytes], path: Path) -> bool:
    """Whether ``file`` lies at ``path``, and not where one of its folders leads: who has made the
    run may put a link in the place of a folder at any time, to files of the reader's."""
    found = Path(f"/proc/self/fd/{file.fileno()}").readlink()
    return found == path


def _clean(suffix: str, raw: bytes, redactor: Redactor) -> Iterator[str]:
    """The text of a file without secrets."""
    lines = io.TextIOWrapper(io.BytesIO(raw), "utf-8", errors="surrogateescape", newline="\n")
    if suffix in _LINES:
        yield from _records(lines, redactor) if suffix == ".jsonl" else redactor.lines(lines)
        return
    try:
        yield _without_secrets(raw, redactor, indent=2)
    except ValueError:
        yield from redactor.lines(lines)


def _records(lines: Iterable[str], redactor: Redactor) -> Iterator[str]:
    for line in lines:
        try:
            yield _without_secrets(line, redactor)
        except ValueError:
            yield redactor.text(line)


def _without_secrets(text: str | bytes, redactor: Redactor, *, indent: int | None = None) -> str:
    """A JSON value without secrets, with its newline. Raises ``ValueError`` if it is none.

    One that is nested more deeply than it can be looked through is left out, and says so.
    """
    try:
        return json.dumps(redactor.document(json.loads(text)), indent=indent) + "\n"
    except RecursionError:
        return json.dumps(f"[ncclops bundle: {len(text)} characters left out: {_TOO_DEEP}]") + "\n"


def _ends(file: IO[bytes], size: int, keep: int) -> bytes:
    """The beginning and the end of ``size`` bytes, ``keep`` of them at most, in whole lines."""
    head = keep // _HEAD_SHARE
    first = file.read(head)
    first = first[: first.rfind(b"\n") + 1] or first
    file.seek(size - (keep - head))
    _, _, last = file.read(keep - head).partition(b"\n")  # without the rest of a line
    left_out = size - len(first) - len(last)
    return first + b"[ncclops bundle: %d bytes left out here]\n" % left_out + last


def _entry(name: str, size: int, modified: float) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mtime, entry.mode = size, int(modified), 0o600
    return entry
