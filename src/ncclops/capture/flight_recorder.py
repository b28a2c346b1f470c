"""torch's flight recorder, read through its API. Looks at torch only where it is loaded.

The API and not torch's own dumps on timeouts: those cover the first process group of a process
only, and stop after a restart in place.

There are up to three recorders (:mod:`ncclops.flight_recorders`). Both numbers of groups and
sequence numbers start anew with each iteration, while the ring goes on: entries of before the
iteration began are left out.

A dump takes some 10 to 20 us an entry and holds the GIL. It need not be taken before an abort where
all groups are Gloo's: the ring outlives them, and what an abort changes of their entries, whether
one was pending, follows from a :class:`RecorderMark`, which costs nothing. NCCL's entries ask CUDA
how far they are and hold on to events of their group, so that they have to be read before.
"""

from __future__ import annotations

import gc
import os
import pickle
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ncclops import flight_recorders
from ncclops.flight_recorders import GLOO, NCCL, SECOND_OF_NCCL
from ncclops.restart.compiler_import import naming_frames
from ncclops.whole_numbers import whole_number

# Written at most, of a ring that may be larger; the newest show what a hang is about.
_MOST_ENTRIES = 10_000
# Frames are ten times the rest of an entry; wanted are those of the last operations of a group,
# and of those that have not ended.
_FRAMES_PER_GROUP = 32
_MOST_WITH_FRAMES = 1000
_MOST_FRAMES = 24
# As torch reads them; the first that is set counts.
_RING_SIZE = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_RING_SIZE_OF_TORCH = 2000

# What of torch's API a dump is from, by its recorder.
SOURCES = {
    NCCL: "_dump_nccl_trace",
    SECOND_OF_NCCL: '_dump_fr_trace(backend="nccl2")',
    GLOO: "_dump_fr_trace",
}


# torch's, by the recorder's own numbers of the groups.
Status = Mapping[str, Mapping[str, int]]


@dataclass(frozen=True)
class RecorderMark:
    """How far each group of Gloo's recorder had come at ``at_ns`` (wall time)."""

    at_ns: int
    status: Status

    @property
    def recorded(self) -> int:
        """The operations so far, in all groups that there have been: the ring has no more."""
        return sum(max(0, each["last_enqueued_collective"]) for each in self.status.values())

    @property
    def is_ambiguous(self) -> bool:
        """Whether a group has several operations that may be pending: the entries have to show it.

        Gloo has two threads for the operations of a group, and the one that comes last to report
        its own done stands in the status: it need not be the last operation.
        """
        return any(
            each["last_enqueued_collective"] - max(0, each["last_completed_collective"]) > 1
            for each in self.status.values()  # -1: none so far, and they count from 1
        )

    def was_pending(self, group: str, seq: int, after: Status) -> bool:
        """Whether operation ``seq`` of ``group`` was; ``after`` is the status after the abort.

        An abort ends what is pending, which is reported as done then: where nothing was reported,
        nothing was pending, whatever the status said.
        """
        done, reported = _last_done(self.status, group), _last_done(after, group)
        return reported != done and (seq > done or seq == reported)


@dataclass(frozen=True)
class RawDump:
    """What ``recorder`` returned, unread: the reading can wait until the groups are aborted.

    With ``mark`` it was taken after that, and is read as of the moment of the mark.
    """

    recorder: str
    pickled: bytes
    mark: RecorderMark | None = None

    def read(self, since_ns: int) -> dict[str, Any]:
        """The dump as JSON takes it, without entries of before ``since_ns`` (wall time)."""
        with _without_collection():
            dump = pickle.loads(self.pickled)
            if self.mark is not None:
                dump = _as_of(self.mark, dump, self.recorder)
            if self.recorder == SECOND_OF_NCCL:
                dump["pg_status"] = _status_of_second_engine(dump)
            return _current_part(dump, since_ns)


def dump(mark: RecorderMark | None = None) -> list[RawDump]:
    """What the recorders that are there hold, NCCL's first; with ``mark``, held at that moment.

    Raises what torch raises.
    """
    found = flight_recorders.dumps()
    return [RawDump(recorder, _with_frames(api), mark) for recorder, api in found.items()]


def mark() -> RecorderMark | None:
    """How far the groups are; None without Gloo's recorder. Raises what torch raises."""
    api = flight_recorders.dumps().get(GLOO)
    if api is None:
        return None
    status = _status(pickle.loads(api(False, False, False)))
    return RecorderMark(time.time_ns(), status)


def ring_size() -> int:
    """How many entries the recorder holds at most."""
    setting = next((os.environ[name] for name in _RING_SIZE if name in os.environ), "")
    number = whole_number(setting)
    return _RING_SIZE_OF_TORCH if number is None else number


def _with_frames(api: Callable[..., bytes]) -> bytes:
    with naming_frames():
        return api(True, True, False)  # collectives, stack traces, not only active ones


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


def _as_of(mark: RecorderMark, dump: dict[str, Any], recorder: str) -> dict[str, Any]:
    """Without what came after ``mark``, and with what was pending then as pending."""
    entries = [each for each in dump.get("entries", []) if _created(each, 0) <= mark.at_ns]
    if recorder != GLOO:
        return dump | {"entries": entries}
    after = _status(dump)
    status = {group: dict(each) for group, each in mark.status.items()}
    for entry in entries:
        group, seq = str(entry["pg_id"]), int(entry["collective_seq_id"])
        pending = not entry.get("retired") or mark.was_pending(group, seq, after)
        entry["retired"] = not pending
        if not pending and seq > _last_done(status, group):
            status.setdefault(group, {})["last_completed_collective"] = seq
    return dump | {"entries": entries, "pg_status": status}


def _status(dump: dict[str, Any]) -> Status:
    return {str(group): each for group, each in dump.get("pg_status", {}).items()}


def _status_of_second_engine(dump: dict[str, Any]) -> Status:
    """The status of its groups in the numbers of collectives, as other recorders have it.

    Its own counts messages as well, from 0 on, and takes those of a batch for done at once, and
    with them what was begun before: the entries tell it.
    """
    unknown = {f"last_{what}_collective": -1 for what in ("enqueued", "started", "completed")}
    status = {group: dict(unknown) for group in _status(dump)}
    for entry in dump.get("entries", []):
        of_group = status.setdefault(str(entry["pg_id"]), dict(unknown))
        seq = int(entry["collective_seq_id"])
        of_group["last_enqueued_collective"] = max(seq, of_group["last_enqueued_collective"])
        if entry.get("retired") and not entry.get("is_p2p"):
            of_group["last_completed_collective"] = max(seq, of_group["last_completed_collective"])
    return status


def _last_done(status: Status, group: str) -> int:
    return int(status.get(group, {}).get("last_completed_collective", -1))


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
