"""What a path holds: a run, one of its incidents, a folder of dumps, or one dump.

<run>/incidents/<n>/rank<r>/    flight.json and those of more recorders, stacks.txt,
<run>/where/<n>/rank<r>/        groups.json, process.json, missing.json; each may be absent
any other folder                dumps as torch names them: <prefix><rank>, with or without a suffix;
                                stacks beside them if their name has "stack" or "spy" in it
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ncclops.errors import UsageError
from ncclops.flight import rank_files
from ncclops.flight.model import FlightEvidence, RankEvidence, RankRecord
from ncclops.flight.reader import Result, read_files
from ncclops.record.paths import INCIDENTS, WHERE, RunPaths
from ncclops.record.regular_file import open_regular
from ncclops.record.snapshot_files import FLIGHTS
from ncclops.record.tree import walk

_SNAPSHOTS = (INCIDENTS, WHERE)
_RANK_DIR = re.compile(r"^rank[_-]?(\d+)$")
_RANK_IN_NAME = re.compile(r"rank[_.-]?(\d+)", re.IGNORECASE)
_NUMBER = re.compile(r"\d+")
_DUMP_NAME = re.compile(r"trace|flight|rank|dump|(?:^|_)fr_", re.IGNORECASE)
_STACK_NAME = re.compile(r"stack|py-?spy|faulthandler", re.IGNORECASE)
_SUFFIXES = (".gz", ".json", ".pkl", ".pickle", ".bin", ".dump", ".txt", ".log", ".pt")
_NEVER_DUMPS = {
    ".py", ".md", ".txt", ".log", ".out", ".err", ".toml", ".yaml", ".yml", ".jsonl", ".html",
    ".png", ".svg", ".csv", ".sh", ".partial", ".tmp", ".pt", ".pth", ".safetensors", ".so",
}  # fmt: skip
_MOST_FILES = 100_000
# What a run writes itself, by its path there.
_RECORDS = re.compile(
    r"(?:nodes/[^/]+/)?(?:(?:run|verdict)\.json|control/.*"
    r"|ranks/\d+/(?:environment|snapshot-server|error-\d+)\.json)"
)


def gather(path: Path) -> FlightEvidence:
    """Everything that ``path`` says about ranks.

    Blocks while files are read, in separate processes. What cannot be read of a folder is
    noted and left out; ``UsageError`` if nothing can, or nothing is there.
    """
    if not path.exists():
        raise UsageError(f"there is no {path}: name a run, an incident, or a folder of dumps")
    if path.is_file():
        return _dumps_only(path, [path])
    snapshots, note = _snapshots_in(path)
    evidence = _from_snapshots(snapshots) if snapshots is not None else _from_folder(path)
    if note:
        evidence.notes.append(note)
    return evidence


def _snapshots_in(path: Path) -> tuple[Path | None, str]:
    """The incident to read: ``path`` itself, or one of a run; None for other folders.

    Of a run the newest with a dump: the last incident of a job that is given up is its leaving.
    """
    if any(_rank_dirs(path)):
        return path, ""
    for kind in _SNAPSHOTS:
        numbered = sorted(_subdirectories(path / kind), key=_number)
        snapshots = [entry for entry in numbered if any(_rank_dirs(entry))]
        with_dumps = [entry for entry in snapshots if any(entry.glob("rank*/flight*.json"))]
        if snapshots:
            chosen = (with_dumps or snapshots)[-1]
            what = "the newest with dumps" if with_dumps else "the newest"
            return chosen, f"read {kind}/{chosen.name}, {what} of {len(snapshots)}"
    return None, ""


def _subdirectories(path: Path) -> list[Path]:
    try:
        return [entry for entry in path.iterdir() if entry.is_dir()]
    except OSError:
        return []


def _number(path: Path) -> tuple[int, str]:
    return (int(path.name) if path.name.isdecimal() else -1, path.name)


def _rank_dirs(path: Path) -> Iterator[tuple[int, Path]]:
    """Directories of ranks with a snapshot in them, and not merely dumps of their own naming."""
    for entry in _subdirectories(path):
        found = _RANK_DIR.match(entry.name)
        if found and any((entry / name).exists() for name in rank_files.ALL):
            yield int(found.group(1)), entry


def _from_snapshots(directory: Path) -> FlightEvidence:
    evidence = FlightEvidence(str(directory), lists_all=True)
    dumps: list[tuple[Path, int | None]] = []
    for rank, folder in sorted(_rank_dirs(directory)):
        rank_files.read(evidence, evidence.rank(rank), folder)
        dumps += [(folder / name, rank) for name in FLIGHTS if (folder / name).is_file()]
    rank_files.read_incident(evidence, directory)
    for result in read_files(dumps):
        _take(evidence, result)
    rank_files.renumber(evidence)
    if directory.parent.name in _SNAPSHOTS:
        rank_files.read_last_words(evidence, directory.parent.parent)
    if not any(_says_something(rank) for rank in evidence.ranks.values()):
        raise _nothing_readable(directory, evidence)
    return evidence


def _says_something(rank: RankEvidence) -> bool:
    return rank.record is not None or rank.place is not None or bool(rank.groups)


def _from_folder(directory: Path) -> FlightEvidence:
    dumps, stacks = [], []
    is_run = RunPaths(directory).holds_run()
    for path in _files_below(directory):
        if is_run and _RECORDS.fullmatch(path.relative_to(directory).as_posix()):
            continue
        near = path.name if path.parent == directory else f"{path.parent.name}/{path.name}"
        if _STACK_NAME.search(near) and not _looks_like_dump(path):
            stacks.append(path)
        elif path.suffix.lower() not in _NEVER_DUMPS and (
            _looks_like_dump(path) or _DUMP_NAME.search(path.name)
        ):
            dumps.append(path)
    if not dumps and not stacks:
        raise UsageError(
            f"no dumps of a flight recorder below {directory}: expected files such as "
            "nccl_trace_rank_0, or a run with incidents/"
        )
    evidence = _dumps_only(directory, dumps, needed=not stacks)
    for path in stacks:
        rank = rank_of(path)
        if rank is not None:
            rank_files.read_stacks(evidence.rank(rank), path)
    return evidence


def _files_below(directory: Path) -> Iterator[Path]:
    count = 0
    for folder, subfolders, names in walk(directory):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        for name in sorted(names):
            count += 1
            if count > _MOST_FILES:
                raise UsageError(f"more than {_MOST_FILES:,} files below {directory}: name one run")
            path = folder / name
            if not name.startswith(".") and path.is_file():
                yield path


def _looks_like_dump(path: Path) -> bool:
    try:
        with open_regular(path) as stream:
            head = stream.read(16)
    except OSError:
        return False
    return head.startswith((b"\x80", b"\x1f\x8b")) or head.lstrip().startswith(b"{")


def _dumps_only(source: Path, paths: list[Path], *, needed: bool = True) -> FlightEvidence:
    evidence = FlightEvidence(str(source))
    results = read_files([(path, rank_of(path)) for path in paths])
    for result in results:
        _take(evidence, result, explicit=source.is_file())
    if needed and not any(rank.record is not None for rank in evidence.ranks.values()):
        raise _nothing_readable(source, evidence)
    return evidence


def rank_of(path: Path) -> int | None:
    """The rank that a path names: after the word, else its last number; else its folder's."""
    stem = path.name
    while (suffix := Path(stem).suffix.lower()) in _SUFFIXES:
        stem = stem[: -len(suffix)]
    numbers = _RANK_IN_NAME.findall(stem) or _NUMBER.findall(stem)
    if not numbers:
        numbers = _RANK_IN_NAME.findall(path.parent.name)
    return int(numbers[-1]) if numbers and len(numbers[-1]) < 8 else None


def _take(evidence: FlightEvidence, result: Result, *, explicit: bool = False) -> None:
    record = result.record
    if record is None:
        if explicit or not result.is_other:
            evidence.skipped.append((str(result.path), result.reason))
            if (number := rank_of(result.path)) is not None:
                about = evidence.rank(number)
                about.missing = about.missing or f"its dump cannot be read ({result.reason})"
        return
    if record.taken_at is None:
        with suppress(OSError):  # gone since it was read
            record.taken_at = result.path.stat().st_mtime
    ours = evidence.rank(record.rank)
    ours.record = record if ours.record is None else _merged(ours.record, record, evidence)


def _merged(one: RankRecord, other: RankRecord, evidence: FlightEvidence) -> RankRecord:
    """Both, where they are of different groups; of the same group the one that goes further."""
    newer, older = (one, other) if (one.taken_at or 0) >= (other.taken_at or 0) else (other, one)
    both = [name for name in older.tracks if name in newer.tracks]
    if both:
        evidence.notes.append(
            f"rank {one.rank} has several dumps; {Path(newer.file).name} is the newest"
        )
    for name, track in older.tracks.items():
        if name not in newer.tracks:
            calls, frames = len(newer.calls), len(newer.frames)
            newer.calls += older.calls
            newer.frames += older.frames
            track.calls = type(track.calls)("i", (index + calls for index in track.calls))
            track.frames = type(track.frames)(
                "i", (index + frames if index >= 0 else -1 for index in track.frames)
            )
            newer.tracks[name] = track
    for group, ranks in older.ranks_of.items():
        newer.ranks_of.setdefault(group, ranks)
    newer.entries += older.entries
    return newer


def _nothing_readable(source: Path, evidence: FlightEvidence) -> UsageError:
    if not evidence.skipped:
        return UsageError(f"no dumps of a flight recorder in {source}: nothing to analyse")
    file, reason = evidence.skipped[0]
    more = len(evidence.skipped) - 1
    others = f" (and {more} more like it)" if more else ""
    return UsageError(f"cannot read {file}: {reason}{others}")
