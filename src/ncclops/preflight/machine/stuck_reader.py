"""Programs that wait in the kernel and cannot be interrupted: looked at twice, as each disk access
is such a wait, and only one that goes on is a fault.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from ncclops.preflight.machine import files
from ncclops.preflight.readings import Process, Stuck

_PAUSE_S = 1.0
_KERNEL_THREAD = 0x00200000  # PF_KTHREAD of linux/sched.h: idle ones may wait so, by design
_FLAGS = 6  # place of the flags of proc_pid_stat(5), counted from the state
_MOST_FILES = 4096
_SWITCHES = re.compile(r"^(?:non)?voluntary_ctxt_switches:\s+(\d+)", re.MULTILINE)
_GPU = re.compile(r"/dev/nvidia\d+")


def read_stuck(root: Path, processes: Iterable[Process]) -> tuple[Stuck, ...]:
    """Those of ``processes`` of which a thread waits now and a second later; at once if none does.

    Of one that was killed the first thread may have ended, and another one waits.
    """
    first = {each: _waiting(root, each.pid) for each in processes if each.state in ("D", "Z")}
    first = {process: waits for process, waits in first.items() if waits}
    if not first:
        return ()
    uptime = files.read_text(root, "proc/uptime")
    time.sleep(_PAUSE_S)  # a state of processes of others, which announces no change
    # Below another root the files may be a copy, in which nothing goes on.
    is_live = uptime is not None and files.read_text(root, "proc/uptime") != uptime
    found = []
    for process, before in first.items():
        now = _waiting(root, process.pid)
        if still := [place for place in before if place in now]:
            stuck = _stuck(root, process, still, before, now)
            found.append(stuck if is_live else msgspec.structs.replace(stuck, moved=None))
    return tuple(found)


def _waiting(root: Path, pid: int) -> dict[str, int | None]:
    """The threads that wait, as directories below the root; how often each was switched so far."""
    top = f"proc/{pid}"
    places = [f"{top}/task/{name}" for name in files.names(root, f"{top}/task")] or [top]
    return {place: _switches(root, place) for place in places if _waits(root, place)}


def _waits(root: Path, place: str) -> bool:
    words = (files.read_text(root, f"{place}/stat", 4096) or "").rpartition(")")[2].split()
    flags = words[_FLAGS] if len(words) > _FLAGS else ""
    is_kernel = flags.isdecimal() and int(flags) & _KERNEL_THREAD
    return words[:1] == ["D"] and not is_kernel


def _switches(root: Path, place: str) -> int | None:
    counts = _SWITCHES.findall(files.read_text(root, f"{place}/status", 8192) or "")
    return sum(map(int, counts)) if counts else None


def _stuck(
    root: Path,
    process: Process,
    still: list[str],
    before: Mapping[str, int | None],
    now: Mapping[str, int | None],
) -> Stuck:
    known = [place for place in still if None not in (before[place], now[place])]
    moved = None
    if known:
        moved = all(before[place] != now[place] for place in known)
    where = files.read_text(root, f"{still[0]}/wchan", 256) or ""
    return Stuck(
        pid=process.pid,
        name=process.name,
        moved=moved,
        gpus=tuple(sorted(set(_gpus(root, process.pid)))),
        place="" if where == "0" else where,
    )


def _gpus(root: Path, pid: int) -> Iterator[str]:
    directory = f"proc/{pid}/fd"
    for name in files.names(root, directory)[:_MOST_FILES]:
        try:
            target = os.readlink(root / directory / name)  # noqa: PTH115 - text
        except OSError:  # closed meanwhile, or not ours to see
            continue
        if _GPU.fullmatch(target):
            yield target
