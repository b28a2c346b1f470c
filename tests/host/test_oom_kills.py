"""Whether the OOM killer has ended a process of the memory cgroup, from files as the kernel's."""

from __future__ import annotations

from pathlib import Path

import pytest

from ncclops.host.oom_kills import OomKills

# the cgroup's line, its folder, the counter's file, the limit's
LAYOUTS = {
    "version 2": ("0::/job/step", "job/step", "memory.events", "memory.max"),
    "version 2, the path of a host": ("0::/pods/a/b", "", "memory.events", "memory.max"),
    "version 1": (
        "4:memory:/job/step", "memory/job/step", "memory.oom_control", "memory.limit_in_bytes"),
    "version 1, the path of a host": (
        "4:memory:/docker/abc", "memory", "memory.oom_control", "memory.limit_in_bytes"),
}  # fmt: skip


def put(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_counter_that_rises_is_told_once(tmp_path: Path, layout: str) -> None:
    line, folder, counter, limit = LAYOUTS[layout]
    place = tmp_path / "sys/fs/cgroup" / folder
    put(tmp_path / "proc/self/cgroup", f"9:name=systemd:/\n{line}\n")
    put(place / counter, "oom 3\noom_kill 2\n")
    put(place / limit, f"{3 * 2**29}\n")
    kills = OomKills(tmp_path)
    assert kills.risen() is None
    put(place / counter, "oom 4\noom_kill 3\noom_group_kill 0\n")
    told = "out of memory: oom_kill of its memory cgroup has risen, which allows 1.5 GiB"
    assert kills.risen() == told
    assert kills.risen() is None


@pytest.mark.parametrize("limit", ["max\n", "9223372036854771712\n", None])
def test_without_a_limit_none_is_told(tmp_path: Path, limit: str | None) -> None:
    place = tmp_path / "sys/fs/cgroup/job"
    put(tmp_path / "proc/self/cgroup", "0::/job\n")
    put(place / "memory.events", "oom_kill 0\n")
    if limit is not None:
        put(place / "memory.max", limit)
    kills = OomKills(tmp_path)
    put(place / "memory.events", "oom_kill 1\n")
    assert kills.risen() == "out of memory: oom_kill of its memory cgroup has risen"


def test_where_nothing_counts_nothing_is_told(tmp_path: Path) -> None:
    assert OomKills(tmp_path).risen() is None
    put(tmp_path / "proc/self/cgroup", "0::/\n")
    assert OomKills(tmp_path).risen() is None


def test_a_cgroup_that_goes_away_is_no_news(tmp_path: Path) -> None:
    put(tmp_path / "proc/self/cgroup", "0::/job\n")
    file = tmp_path / "sys/fs/cgroup/job/memory.events"
    put(file, "oom_kill 0\n")
    kills = OomKills(tmp_path)
    file.unlink()
    assert kills.risen() is None


@pytest.mark.parametrize(
    ("cgroup", "host", "ruled_out"),
    [
        (0, 0, True),
        (1, 1, False),
        (0, 1, False),
        (None, 0, True),
        (0, None, True),
        (None, None, False),
    ],
    ids=["none", "one", "one elsewhere", "by the host", "by the cgroup", "nothing counts"],
)
def test_it_is_ruled_out_where_no_counter_has_risen_in_the_attempt(
    tmp_path: Path, cgroup: int | None, host: int | None, ruled_out: bool
) -> None:
    def count(cgroup_kills: int, host_kills: int) -> None:
        if cgroup is not None:
            put(tmp_path / "sys/fs/cgroup/job/memory.events", f"oom_kill {cgroup_kills}\n")
        if host is not None:
            put(tmp_path / "proc/vmstat", f"pgfault 7\noom_kill {host_kills}\n")

    put(tmp_path / "proc/self/cgroup", "0::/job\n")
    count(2, 5)
    kills = OomKills(tmp_path)
    count(3, 6)
    assert not kills.are_ruled_out
    kills.attempt_begins()
    count(3 + (cgroup or 0), 6 + (host or 0))
    assert kills.are_ruled_out is ruled_out
