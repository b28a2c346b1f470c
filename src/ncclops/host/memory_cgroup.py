"""The memory cgroups that this process is in, of version 1 or 2: what they allow, what is used."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

# Version 1 has this, less than a page, where there is no limit.
_NO_LIMIT = 2**62


@dataclass(frozen=True)
class _Files:
    limit: str
    used: str
    inactive: str  # the line of memory.stat: files' pages that the kernel takes back
    events: str  # the file that counts what the OOM killer has ended


_FILES = {
    1: _Files(
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
        "memory.oom_control",
    ),
    2: _Files("memory.max", "memory.current", "inactive_file", "memory.events"),
}


@dataclass(frozen=True)
class MemoryCgroup:
    """One of them, by its directory. Everything is None where the kernel does not say it."""

    directory: Path
    version: int

    def limit(self) -> int | None:
        """In bytes; None where there is none."""
        limit = _number(self.directory / self._files.limit)
        return limit if limit is not None and limit < _NO_LIMIT else None

    def left(self) -> int | None:
        """The bytes up to the limit.

        Of what is used, pages of files that nobody has open for long are not counted: the kernel
        takes those back.
        """
        limit, used = self.limit(), _number(self.directory / self._files.used)
        if limit is None or used is None:
            return None
        return limit - used + (counter(self.directory / "memory.stat", self._files.inactive) or 0)

    def oom_kills(self) -> int | None:
        """How many processes of it the kernel's OOM killer has ended."""
        return counter(self.directory / self._files.events, "oom_kill")

    @property
    def _files(self) -> _Files:
        return _FILES[self.version]


def memory_cgroups(root: Path = Path("/")) -> list[MemoryCgroup]:
    """The one of this process first, then those that it lies in. ``root`` is for tests.

    In a container the path may be the host's, and the cgroup lies at the top.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    entries = [line.split(":", 2) for line in lines if line.count(":") >= 2]
    own = {kind: path.lstrip("/") for _, kinds, path in entries for kind in kinds.split(",")}
    version = 1 if "memory" in own else 2
    top = root / "sys/fs/cgroup" / ("memory" if version == 1 else "")
    below = Path(own.get("memory" if version == 1 else "", ""))
    places = [top / below, *(top / parent for parent in below.parents)]
    return [MemoryCgroup(each, version) for each in places if each.is_dir()]


def _number(file: Path) -> int | None:
    """None for ``max``, which is no limit."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def counter(file: Path, name: str) -> int | None:
    """The number after ``name`` in a file with one such pair on each line."""
    try:
        pairs = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return None
    return next((int(value) for key, value in filter(_is_pair, pairs) if key == name), None)


def _is_pair(words: list[str]) -> bool:
    return len(words) == 2 and words[1].isdecimal()
