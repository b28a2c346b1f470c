"""Whether the kernel's OOM killer has ended a process of the memory cgroup that this one is in.

The kernel counts that for each memory cgroup, and for the whole host, before it sends the signal,
and tells it nowhere else that needs no privileges. It counts processes, and names none.
"""

from __future__ import annotations

from pathlib import Path

from ncclops.host.memory_cgroup import counter, memory_cgroups

RULED_OUT = "killed from outside: no counter of the kernel for that has risen"


class OomKills:
    """The counter of this process's memory cgroup, from now on. ``root`` is for tests."""

    def __init__(self, root: Path = Path("/")) -> None:
        counting = (each for each in memory_cgroups(root) if each.oom_kills() is not None)
        self._cgroup = next(counting, None)
        self._seen = self._count()
        self._host = root / "proc/vmstat"
        self._begun = self._counts()

    def attempt_begins(self) -> None:
        """What has ended before is of another attempt."""
        self._begun = self._counts()

    @property
    def are_ruled_out(self) -> bool:
        """Whether none can have been of the attempt: no counter has risen since it began. False
        where none can be read."""
        return any(each is not None for each in self._begun) and self._begun == self._counts()

    def risen(self) -> str | None:
        """What the counter shows, in words, if it has risen since the last call; None otherwise."""
        before, self._seen = self._seen, self._count()
        if self._cgroup is None or before is None or self._seen is None or self._seen <= before:
            return None
        limit = self._cgroup.limit()
        allows = "" if limit is None else f", which allows {limit / 2**30:.3g} GiB"
        return f"out of memory: oom_kill of its memory cgroup has risen{allows}"

    def _counts(self) -> tuple[int | None, int | None]:
        return self._count(), counter(self._host, "oom_kill")

    def _count(self) -> int | None:
        return None if self._cgroup is None else self._cgroup.oom_kills()
