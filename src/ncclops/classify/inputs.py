"""Where logs come from: files, standard input, directories; plain, gzip or zstd.

A torchelastic error file is one line of JSON; it is read as the traceback it carries.
"""

from __future__ import annotations

import codecs
import gzip
import os
import stat
import zlib
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from io import BufferedIOBase, BufferedReader, RawIOBase
from os import PathLike
from pathlib import Path
from reprlib import repr as short_repr
from typing import TYPE_CHECKING

from ncclops.classify.line_ranks import rank_of_path
from ncclops.classify.loader import SignatureSet
from ncclops.classify.model import Report
from ncclops.classify.scanner import Scanner
from ncclops.errors import UsageError
from ncclops.given_path import given_path
from ncclops.record.regular_file import WithoutHoles, advice, open_regular
from ncclops.record.tree import walk

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

# Blocks that stay in the second-level cache are read three times as fast as larger ones.
_READ_BYTES = 1 << 18
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
# Read as text, such a file would hold "no known failure".
_NOT_UNPACKED = {b"\xfd7zXZ\x00": "xz", b"BZh91A": "bzip2", b"\x04\x22\x4d\x18": "lz4"}
# Logs shrink to a tenth, floods of one line to a two-hundredth; gzip itself goes down to a
# thousandth, zstd much further. Below the second figure any ratio is read.
_MOST_RATIO, _MOST_UNPACKED_BYTES = 200, 1 << 30
_STDIN = "-"
# In a directory: what holds a log, by its suffix. Records of ours that repeat the logs, and
# dumps, are left out by their names.
_SUFFIXES = {
    ".log", ".out", ".err", ".txt", ".stdout", ".stderr", "",
    ".gz", ".zst", ".zstd", ".xz", ".bz2", ".lz4",
}  # fmt: skip
_ERROR_FILES = {"error.json", "reply.json"}
_NOT_LOGS = {"README", "README.txt", "requirements.txt", "LICENSE"}
# What processes of ours note: an end that was asked for looks there as a fault of the job does.
_OUR_NOTES = {"agent.log", "worker.log", "nodes.log", "control/server.log"}
# Stacks and dumps taken after the failure: they quote code, not what happened.
_NOT_LOG_FOLDERS = {"incidents", "where"}
_ERROR_FILE_BYTES = 8 << 20
_MOST_FILES = 100_000  # each costs a kilobyte of memory and some 50 us


def classify(
    source: str | PathLike[str] | Iterable[str | bytes], signatures: SignatureSet | None = None
) -> Report:
    """The verdict on one path (a log, or a directory of per-rank logs), or on lines of one log.

    Lines may come with or without their ends. Raises ``UsageError`` for a path that does not exist,
    cannot be read, or holds no log. Any thread.
    """
    if isinstance(source, str) and "\n" in source:
        raise UsageError(
            "that is the text of a log, where a path or lines are wanted: give text.splitlines()"
        )
    if isinstance(source, str | PathLike):
        return classify_paths([Path(source)], signatures)
    given: object = source  # by a caller that no type checker may have seen
    if isinstance(given, bytes) or not isinstance(given, Iterable):
        raise UsageError(f"{short_repr(given)}: give a path, or the lines of a log")
    scanner = Scanner(signatures)
    for line in given:
        if not isinstance(line, str | bytes):
            raise UsageError(f"{short_repr(line)} is no line: give text or bytes")
        data = line if isinstance(line, bytes) else line.encode(errors="replace")
        scanner.feed(None, "<lines>", data if data.endswith(b"\n") else data + b"\n")
    return scanner.verdict()


def classify_paths(paths: Sequence[str | Path], signatures: SignatureSet | None = None) -> Report:
    """The verdict on files and directories, taken together as the logs of one job.

    Raises ``UsageError`` for what does not exist, cannot be read, or holds no log.
    """
    if isinstance(paths, str | bytes | PathLike) or not isinstance(paths, Sequence):
        raise UsageError(f"{short_repr(paths)}: give a list of paths, or call classify")
    scanner = Scanner(signatures)
    notes: list[str] = []
    for path in paths:
        notes += scan_path(scanner, given_path(path, "a log, or of a directory of logs"))
    return scanner.verdict(notes)


def classify_bytes(data: bytes, signatures: SignatureSet | None = None) -> Report:
    """The verdict on one log held in memory."""
    scanner = Scanner(signatures)
    scanner.feed(None, "<memory>", data)
    return scanner.verdict()


def scan_path(scanner: Scanner, path: str | Path) -> list[str]:
    """Read one path (``-`` is standard input); the notes returned say what was cut short."""
    if str(path) == _STDIN:
        return list(_scan_stream(scanner, _stdin(), _STDIN, None))
    path = Path(path)
    files = _logs_below(path) if path.is_dir() else [path]
    return [note for file in files for note in _scan_file(scanner, file, inside=path.is_dir())]


def _stdin() -> BufferedReader:
    # Text layers may have replaced sys.stdin; descriptor 0 is what the shell connected.
    return open(0, "rb", closefd=False)


def _logs_below(directory: Path) -> list[Path]:
    files = sorted(
        file
        for file in _all_below(directory)
        if not file.name.startswith(".")
        and (file.name in _ERROR_FILES or _is_log(file))
        and file.is_file()
    )
    if not files:
        raise UsageError(
            f"no logs below {directory}: expected *.log, *.out, *.err or *.txt files there, "
            "as a run directory or torchrun --log-dir has them"
        )
    return files


def _all_below(directory: Path) -> Iterator[Path]:
    count = 0
    for folder, folders, names in walk(directory):
        folders[:] = [name for name in folders if not _is_left_out(name)]
        count += len(folders) + len(names)
        if count > _MOST_FILES:
            raise UsageError(f"more than {_MOST_FILES:,} files below {directory}: name one run")
        yield from (folder / name for name in names)


def _is_left_out(folder: str) -> bool:
    return folder.startswith(".") or folder in _NOT_LOG_FOLDERS


def _is_log(file: Path) -> bool:
    names = {file.name, f"{file.parent.name}/{file.name}"}
    return file.suffix in _SUFFIXES and names.isdisjoint(_NOT_LOGS | _OUR_NOTES)


def _opened(file: Path) -> BufferedReader:
    return BufferedReader(WithoutHoles(open_regular(file)))


def _is_foreign(file: Path) -> bool:
    """Whether ``file`` is a link to a file of another user: who has made it may not be able to read
    what it leads to, and the reader is."""
    own = file.lstat()
    return stat.S_ISLNK(own.st_mode) and own.st_uid != file.stat().st_uid


def _scan_file(scanner: Scanner, file: Path, *, inside: bool) -> Iterator[str]:
    try:
        if inside and _is_foreign(file):
            yield f"{file} was left out: a link to a file of another user"
            return
        with _opened(file) as stream:
            if file.name in _ERROR_FILES and inside:
                _scan_error_file(scanner, stream, file)
            else:
                yield from _scan_stream(scanner, stream, str(file), rank_of_path(file.absolute()))
    except UsageError as error:  # packed in a way that is not read here
        if not inside:
            raise
        yield f"{error}: it was left out"
    except OSError as error:
        reason = error.strerror or str(error)
        if not inside:
            raise UsageError(
                f"cannot read {file}: {reason}{advice(error) or '; check the path and its mode'}"
            ) from error
        # One rank's file of thousands does not keep the others from being read.
        yield f"{file} was left out: {reason}"


def _scan_stream(
    scanner: Scanner, stream: BufferedReader, name: str, rank: int | None
) -> Iterator[str]:
    """Feed a stream to its end; what breaks off in the middle is read that far and noted."""
    scanner.feed(rank, name, b"")
    try:
        for chunk in _chunks(stream, name):
            scanner.feed(rank, name, chunk)
    except (EOFError, zlib.error, gzip.BadGzipFile, _TruncatedError) as error:
        yield f"{name} is cut short or damaged ({error}); read as far as it goes"


class _TruncatedError(Exception):
    """Compressed data that ends, or turns to nonsense, in the middle."""


def _chunks(stream: BufferedReader, name: str) -> Iterator[bytes]:
    magic = stream.peek(6)[:6]
    if magic[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        return _from_utf_16(_read_all(stream))
    if magic[:3] == codecs.BOM_UTF8:
        stream.read(3)
    packed = _Sized(stream)
    if magic[:2] == _GZIP:
        return _bounded(_read_all(gzip.GzipFile(fileobj=BufferedReader(packed))), packed)
    if magic[:4] == _ZSTD:
        return _bounded(_zstd_chunks(BufferedReader(packed), name), packed)
    for begins, program in _NOT_UNPACKED.items():
        if magic.startswith(begins):
            raise UsageError(
                f"{name} is compressed with {program}: pipe it through"
                f" `{program} -dc {name} | ncclops classify -`"
            )
    return _read_all(stream)


def _from_utf_16(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """As PowerShell writes what a program prints into a file."""
    decoder = codecs.getincrementaldecoder("utf-16")(errors="replace")
    for chunk in chunks:
        yield decoder.decode(chunk).encode(errors="replace")


class _Sized(RawIOBase):
    """``stream``, with its ``size`` in bytes: of a pipe, or a file that grows, what was read."""

    def __init__(self, stream: BufferedReader) -> None:
        self._stream = stream
        self.size = os.fstat(stream.fileno()).st_size
        self._read = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        count = self._stream.readinto1(buffer)
        self._read += count
        self.size = max(self.size, self._read)
        return count


def _bounded(chunks: Iterator[bytes], packed: _Sized) -> Iterator[bytes]:
    """``chunks`` of what ``packed`` expands to, up to a multiple of its size."""
    total = 0
    for chunk in chunks:
        total += len(chunk)
        if total > max(_MOST_UNPACKED_BYTES, _MOST_RATIO * packed.size):
            raise _TruncatedError(f"it expands to more than {_MOST_RATIO} times its size")
        yield chunk


def _read_all(stream: BufferedIOBase) -> Iterator[bytes]:
    # read1 returns what there is: a pipe that trickles is read as it comes.
    while chunk := stream.read1(_READ_BYTES):
        yield chunk


def _zstd_chunks(stream: BufferedReader, name: str) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError as error:
        raise UsageError(
            f"{name} is compressed with zstd and the zstandard package is not installed: "
            f"pip install zstandard, or pipe it through `zstd -dc {name} | ncclops classify -`"
        ) from error
    with zstandard.ZstdDecompressor().stream_reader(stream, read_across_frames=True) as reader:
        try:
            while chunk := reader.read(_READ_BYTES):
                yield chunk
        except zstandard.ZstdError as error:
            raise _TruncatedError(str(error)) from error


def _scan_error_file(scanner: Scanner, stream: BufferedReader, file: Path) -> None:
    line = _error_line(stream.read(_ERROR_FILE_BYTES))
    scanner.feed(rank_of_path(file.absolute()), str(file), f"{line}\n")


def _error_line(raw: bytes) -> str:
    """The exception of a worker's error file, dated; the raw text where it is no such file."""
    from ncclops.record.error_file import parse_error  # few inputs are such files

    error = parse_error(raw)
    if error is None:
        return raw.decode("utf-8", "replace")
    stamp = "" if error.at is None else f"{datetime.fromtimestamp(error.at):%Y-%m-%d %H:%M:%S} "
    # The call stack repeats the message at its end; one line is enough to prove it.
    return stamp + " ".join(error.message.split())
