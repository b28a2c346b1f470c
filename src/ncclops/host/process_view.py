"""A process as the kernel shows it: states, wait channels, CPU time. Standard library only."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ncclops.process_ends import exit_status, signal_name

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# A training process may have hundreds; the first ones are the main thread and what started early.
_MOST_THREADS = 128
# Of a process that is ending, in Linux's include/linux/sched.h: its files close one by one.
_PF_EXITING = 0x4
_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "uninterruptible (disk or driver)",
    "T": "stopped",
    "t": "traced",
    "Z": "ended",
    "X": "ended",
    "I": "idle",
}


@dataclass(frozen=True)
class Stat:
    """A line of ``/proc/<pid>/stat``; CPU times in seconds, ``started_ticks`` since boot.

    ``is_ending``: it has begun to, or has ended. ``wait_status`` is how a process that has ended
    did so, while it has not been reaped.
    """

    name: str
    state: str
    is_ending: bool
    user_s: float
    system_s: float
    started_ticks: int
    rss_bytes: int
    wait_status: int | None


def read_stat(path: Path) -> Stat | None:
    """The process or thread with ``path`` (``/proc/<pid>`` or below); None if there is none."""
    text = _read(path / "stat")
    if not text:
        return None
    head, _, tail = text.rpartition(")")
    fields = tail.split()  # from field 3 of proc(5) on
    return Stat(
        name=head.partition("(")[2],
        state=fields[0],
        is_ending=bool(int(fields[6]) & _PF_EXITING),
        user_s=int(fields[11]) / _TICKS_PER_S,
        system_s=int(fields[12]) / _TICKS_PER_S,
        started_ticks=int(fields[19]),
        rss_bytes=int(fields[21]) * _PAGE_BYTES,
        wait_status=int(fields[49]) if len(fields) > 49 else None,
    )


def is_in_foreground(pid: int) -> bool:
    """Whether ``pid`` has a terminal that its shell has given to it, and not to another command."""
    fields = _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    # Of proc(5): the process group, and that in the foreground of the terminal (-1: no terminal).
    return len(fields) > 5 and fields[2] == fields[5]


def is_same_process(pid: int, started_ticks: int) -> bool:
    """Whether ``pid`` still is the process that started then, and has not ended."""
    stat = read_stat(Path(f"/proc/{pid}"))
    return stat is not None and stat.started_ticks == started_ticks and stat.state not in "ZX"


def children(pid: int) -> list[int]:
    """The processes that the main thread of ``pid`` has started; none where that is not seen."""
    listed = _read(Path(f"/proc/{pid}/task/{pid}/children"))
    return [int(child) for child in listed.split()]


def boot_id() -> str:
    """Of this start of the machine. Raises ``OSError`` where ``/proc`` is not there."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def view(pid: int) -> dict[str, Any] | None:
    """What process.json holds of ``pid``; None if there is no such process.

    Seconds are CPU time so far. A wait channel is the kernel function that a thread sleeps in,
    absent where the kernel does not show them.
    """
    root = Path(f"/proc/{pid}")
    stat = read_stat(root)
    if stat is None:
        return None
    seen: dict[str, Any] = {
        "pid": pid,
        "name": stat.name,
        "state": stat.state,
        "state_name": _STATES.get(stat.state, "unknown"),
        "wchan": _wait_channel(root),
        "cpu_user_s": stat.user_s,
        "cpu_system_s": stat.system_s,
        "rss_bytes": stat.rss_bytes,
    }
    if stat.state == "Z" and stat.wait_status is not None:
        seen["ended_by"] = describe_end(stat.wait_status)
        seen["ended_well"] = stat.wait_status == 0
        seen["ended_signal"] = ending_signal(stat.wait_status)
    return seen | {"threads": _threads(root)}


def describe_end(wait_status: int) -> str:
    """A wait status in words: ``SIGKILL`` or ``exit code 1``."""
    return exit_status(os.waitstatus_to_exitcode(wait_status), ending_signal(wait_status))


def ending_signal(wait_status: int) -> str | None:
    """The name of the signal that ended a process; None if it exited."""
    code = os.waitstatus_to_exitcode(wait_status)
    return signal_name(-code) if code < 0 else None


def _threads(root: Path) -> list[dict[str, Any]]:
    try:
        ids = sorted(int(entry) for entry in os.listdir(root / "task"))  # noqa: PTH208
    except OSError:
        return []
    threads = []
    for thread_id in ids[:_MOST_THREADS]:
        task = root / "task" / str(thread_id)
        stat = read_stat(task)
        if stat is not None:
            threads.append(
                {
                    "tid": thread_id,
                    "name": stat.name,
                    "state": stat.state,
                    "wchan": _wait_channel(task),
                    "cpu_s": round(stat.user_s + stat.system_s, 2),
                }
            )
    return threads


def _wait_channel(path: Path) -> str | None:
    channel = _read(path / "wchan").strip("\0\n ")
    return channel if channel not in ("", "0") else None


def signal_sets(pid: int, tid: int) -> tuple[int, int, int]:
    """The signals pending for a thread, blocked by it, and caught by the process, as bit masks.

    Zeros if there is no such thread.
    """
    names = {"SigPnd": 0, "SigBlk": 0, "SigCgt": 0}
    for line in _read(Path(f"/proc/{pid}/task/{tid}/status")).splitlines():
        key, _, value = line.partition(":")
        if key in names:
            names[key] = int(value, 16)
    return names["SigPnd"], names["SigBlk"], names["SigCgt"]


def _read(path: Path) -> str:
    """The text; empty where there is none."""
    try:
        return path.read_text(errors="replace")
    except OSError:  # gone, or not ours to see
        return ""
