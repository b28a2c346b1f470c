"""Whether the kernel's OOM killer has ended a process of the memory cgroup that this one is in.

The kernel counts that for each memory cgroup, in ``memory.events`` (version 2) or
``memory.oom_control`` (version 1), and tells it nowhere else that needs no privileges. It counts
processes, and names none.
"""

from __future__ import annotations

from pathlib import Path

_COUNTER = "oom_kill"
# Version 1 has this, less than a page, where there is no limit.
_NO_LIMIT = 2**62


class OomKills:
    """The counter of this process's memory cgroup, from now on. ``root`` is for tests."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._files = _files(root)
        self._seen = self._count()

    def risen(self) -> str | None:
        """What the counter shows, in words, if it has risen since the last call; None otherwise."""
        before, self._seen = self._seen, self._count()
        if self._seen is None or before is None or self._seen <= before:
            return None
        limit = _number(self._files[1]) if self._files else None
        allows = ""
        if limit is not None and limit < _NO_LIMIT:
            allows = f", which allows {limit / 2**30:.3g} GiB"
        return f"out of memory: oom_kill of its memory cgroup has risen{allows}"

    def _count(self) -> int | None:
        try:
            lines = self._files[0].read_text().splitlines() if self._files else []
        except OSError:
            return None
        values = (line.split() for line in lines)
        return next((int(each[1]) for each in values if each[:1] == [_COUNTER]), None)


def _files(root: Path) -> tuple[Path, Path] | None:
    """The counter's file and the limit's; None where there are none, as in the top cgroup."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    entries = [line.split(":", 2) for line in lines if line.count(":") >= 2]
    own = {kinds: path.lstrip("/") for _, kinds, path in entries}
    top = root / "sys/fs/cgroup"
    # In a container the path may be the host's, and the cgroup lies at the top.
    places = [(top / own.get("", ""), 2), (top, 2)]
    if "memory" in own:
        places = [(top / "memory" / own["memory"], 1), (top / "memory", 1), *places]
    names = {1: ("memory.oom_control", "memory.limit_in_bytes"), 2: ("memory.events", "memory.max")}
    for place, version in places:
        counter, limit = (place / name for name in names[version])
        if counter.is_file():
            return counter, limit
    return None


def _number(file: Path) -> int | None:
    """None for ``max``, which is no limit."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None
