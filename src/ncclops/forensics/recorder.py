"""torch's flight recorder, read through its API. Looks at torch only where it is loaded.

The API and not torch's own dumps on timeouts: those serve the first process group of a process
and go silent after a restart in place.

There are two recorders. NCCL's exists in CUDA builds; the generic one, from torch 2.8 on, has
Gloo. Both numbers of groups and sequence numbers start anew with each iteration, while the ring
goes on: entries of before the iteration began are left out.
"""

from __future__ import annotations

import gc
import pickle
import sys
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

# Written at most, of a ring that may be larger; the newest tell what a hang is about.
_MOST_ENTRIES = 10_000
# Frames are ten times the rest of an entry; wanted are those of the last operations of a group,
# and of those that have not ended.
_FRAMES_PER_GROUP = 32
_MOST_WITH_FRAMES = 1000
_MOST_FRAMES = 24


@dataclass(frozen=True)
class RawDump:
    """What a recorder returned, unread: the reading can wait until the groups are aborted."""

    source: str
    pickled: bytes

    def read(self, since_ns: int) -> dict[str, Any]:
        """The dump as JSON takes it, without entries of before ``since_ns`` (wall time)."""
        with _without_collection():
            return _current_part(pickle.loads(self.pickled), since_ns)


def dump() -> list[RawDump]:
    """What the recorders that are there hold, NCCL's first. Raises what torch raises."""
    c10d = sys.modules.get("torch._C._distributed_c10d")
    if c10d is None:
        return []
    found = []
    for source in ("_dump_nccl_trace", "_dump_fr_trace"):
        api: Callable[..., bytes] | None = getattr(c10d, source, None)
        if api is not None:
            found.append(RawDump(source, _with_frames(api)))
    return found


def _with_frames(api: Callable[..., bytes]) -> bytes:
    with _without_importing_inductor():
        return api(True, True, False)  # collectives, stack traces, not only active ones


@contextmanager
def _without_importing_inductor() -> Iterator[None]:
    """Keep torch from importing its compiler (a second, 800 modules) to name frames.

    It asks ``hasattr(torch, "_inductor")``, which is an import; that it is not loaded is all it
    has to know.
    """
    torch = sys.modules["torch"]
    if "torch._inductor" in sys.modules:
        yield
        return
    stand_in = _Inductor(threading.get_ident())
    torch.__dict__["_inductor"] = stand_in
    try:
        yield
    finally:
        if torch.__dict__.get("_inductor") is stand_in:
            del torch.__dict__["_inductor"]


class _Inductor(types.ModuleType):
    """Has nothing for the thread that dumps, and is the real module for all others."""

    def __init__(self, dumping_thread: int) -> None:
        super().__init__("torch._inductor")
        self.__dict__["_dumping_thread"] = dumping_thread

    def __getattr__(self, name: str) -> Any:
        if threading.get_ident() == self.__dict__["_dumping_thread"]:
            raise AttributeError(name)
        import importlib

        return getattr(importlib.import_module("torch._inductor"), name)


@contextmanager
def _without_collection() -> Iterator[None]:
    """No cyclic collection over all that a training holds, for thousands of small new objects."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _current_part(dump: dict[str, Any], since_ns: int) -> dict[str, Any]:
    entries = dump.get("entries", [])
    current = [entry for entry in entries if _created(entry, since_ns) >= since_ns]
    past = (entry["pg_id"] for entry in entries if _created(entry, since_ns) < since_ns)
    newest_past = max(past, default=-1)
    dropped = max(0, len(current) - _MOST_ENTRIES)
    current = current[dropped:]
    _thin_out_frames(current)
    ids = {str(entry.get("pg_id")) for entry in current}
    status = dump.get("pg_status", {})
    kept = {
        key: value
        for key, value in status.items()
        if str(key) in ids or (str(key).isdecimal() and int(key) > newest_past)
    }
    return dump | {"entries": current, "pg_status": kept, "entries_dropped": dropped}


def _created(entry: dict[str, Any], otherwise: int) -> int:
    return int(entry.get("time_created_ns") or otherwise)


def _thin_out_frames(entries: list[dict[str, Any]]) -> None:
    seen: Counter[Any] = Counter()
    kept = 0
    for entry in reversed(entries):
        group = entry.get("pg_id")
        wanted = seen[group] < _FRAMES_PER_GROUP or not entry.get("retired", True)
        seen[group] += 1
        if wanted and kept < _MOST_WITH_FRAMES:
            kept += 1
            entry["frames"] = entry.get("frames", [])[:_MOST_FRAMES]
        else:
            entry.pop("frames", None)
