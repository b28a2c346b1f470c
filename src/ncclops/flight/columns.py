"""The entries of a dump as columns."""

from __future__ import annotations

import json
import marshal
from collections.abc import Iterable, Mapping
from typing import Any

from ncclops.flight.decode import Unreadable, brief
from ncclops.flight.model import P2P, Call, GroupName, OperationState, RankRecord, Track
from ncclops.stacks.frame import Frame
from ncclops.stacks.ownership import user_frames

_SHOWN_CHARS = 400
_MOST_TENSORS = 1 << 16
# By what an entry says of its state and of whether the recorder has done with it. Plain numbers:
# an enumeration's members are slow in a loop over millions.
_STATES = {
    (said, retired): int(
        OperationState.RETIRED if is_retired and state is not OperationState.COMPLETED else state
    )
    for said, state in (
        ("scheduled", OperationState.ENQUEUED),
        ("started", OperationState.STARTED),
        ("completed", OperationState.COMPLETED),
    )
    for retired, is_retired in (
        (True, True),
        ("true", True),
        (False, False),
        ("false", False),
        (None, False),
    )
}
# One algorithm under several names: calls that differ only in these do meet each other.
_SAME_OP = {
    "_all_gather_base": "all_gather",
    "all_gather_single": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "_broadcast_oop": "broadcast",
    "_reduce_oop": "reduce",
    "all_reduce_barrier": "barrier",
    "all_to_all_single": "all_to_all",
    "alltoall_base": "all_to_all",
    "alltoall": "all_to_all",
}


class _Building:
    """A track while entries are added to it, and which making of the group it is of."""

    __slots__ = ("made", "track")

    def __init__(self, group: GroupName, made: Any) -> None:
        self.track = Track(group)
        self.made = made

    def begin(self, made: Any) -> None:
        """Start anew: what the ring holds of an earlier making of the group is over."""
        self.track = Track(self.track.group, makings=self.track.makings + 1)
        self.made = made


class Columns:
    """Appends entries to the tracks of a record, with tables of what repeats.

    This is where the time goes that reading a thousand ranks takes: a few microseconds an entry.
    """

    def __init__(self, record: RankRecord) -> None:
        self._record = record
        self._building: dict[GroupName, _Building] = {}
        self._slots: dict[tuple[Any, Any, Any], tuple[_Building, str, bool]] = {}
        self._calls: dict[Any, int] = {}
        self._frames: dict[Any, int] = {}

    def add_all(self, entries: list[Any]) -> None:
        """Add a dump's entries, oldest first. Raises :class:`Unreadable`, naming the entry."""
        number = 0
        try:
            for number, entry in enumerate(entries):
                self._add(number, entry)
        except Unreadable:
            raise
        except (AttributeError, LookupError, TypeError, ValueError, OverflowError) as error:
            raise Unreadable(
                f"entry {number} is not as a recorder writes it ({brief(error)})"
            ) from None
        for group, building in self._building.items():
            self._record.tracks[group] = building.track

    def _add(self, number: int, entry: Mapping[str, Any]) -> None:
        group, desc = entry["process_group"]
        key = (entry["profiling_name"], group, desc)
        slot = self._slots.get(key) or self._new_slot(key, entry)
        building, op, transfers = slot
        # A group that was destroyed and made again counts from one again, under a new id.
        if building.made != entry.get("pg_id"):
            building.begin(entry.get("pg_id"))
        state = _STATES[entry["state"], entry.get("retired")]
        if transfers or entry.get("is_p2p") in (True, "true"):
            self._add_p2p(building.track, op, state, int(entry.get("record_id", number)), entry)
            return
        seq = int(entry["collective_seq_id"])
        track = building.track
        if track.seqs and seq <= track.seqs[-1]:
            if seq == track.seqs[-1]:
                self._merge(track, op, state, entry)
                return
            building.begin(building.made)
            track = building.track
        track.seqs.append(seq)
        track.calls.append(self._call(op, entry))
        track.frames.append(self._stack(entry.get("frames")))
        track.states.append(state)
        track.created_ns.append(int(entry.get("time_created_ns") or 0))
        track.order.append(int(entry.get("record_id", number)))
        if not track.timeout_ms:
            track.timeout_ms = int(entry.get("timeout_ms") or 0)

    def _new_slot(
        self, key: tuple[Any, Any, Any], entry: Mapping[str, Any]
    ) -> tuple[_Building, str, bool]:
        group, op = _names(*key)
        building = self._building.get(group)
        if building is None:
            building = self._building[group] = _Building(group, entry.get("pg_id"))
        slot = self._slots[key] = (building, op, op.startswith(("send", "recv")))
        return slot

    def _call(self, op: str, entry: Mapping[str, Any]) -> int:
        """The table's index of what ``entry`` asked for."""
        get = entry.get
        sizes_and_types = (
            get("input_sizes"),
            get("output_sizes"),
            get("input_dtypes"),
            get("output_dtypes"),
        )
        # The quickest way to something hashable; version 2 writes equal values alike.
        key = (op, marshal.dumps(sizes_and_types, 2))
        index = self._calls.get(key)
        if index is None:
            index = self._calls[key] = self._new_call(_call(op, entry))
        return index

    def _new_call(self, call: Call) -> int:
        index = self._calls.get(call)
        if index is None:
            index = self._calls[call] = len(self._record.calls)
            self._record.calls.append(call)
        return index

    def _merge(self, track: Track, op: str, state: int, entry: Mapping[str, Any]) -> None:
        """Operations issued as one share a number; ``coalesced`` only marks their end."""
        before = self._record.calls[track.calls[-1]]
        track.states[-1] = min(track.states[-1], state)
        if op == "coalesced":
            return
        more = _call(op, entry)
        whole = Call(
            op if before.op == "coalesced" else before.op,
            before.inputs + more.inputs,
            before.outputs + more.outputs,
            before.input_types + more.input_types,
            before.output_types + more.output_types,
        )
        if len(whole.inputs) > _MOST_TENSORS:
            raise Unreadable("more tensors in one operation than any recorder writes")
        track.calls[-1] = self._new_call(whole)

    def _add_p2p(
        self, track: Track, op: str, state: int, order: int, entry: Mapping[str, Any]
    ) -> None:
        """Of transfers between two ranks only those that are pending matter later."""
        if state >= OperationState.COMPLETED:
            return
        word, _, peers = op.partition(" ")
        left, _, right = peers.replace("->", " ").replace("<-", " ").partition(" ")
        stack = self._stack(entry.get("frames"))
        track.pending_p2p.append(
            P2P(
                sends=word == "send",
                me=int(left),
                peer=int(right),
                started=state == OperationState.STARTED,
                order=order,
                created_ns=int(entry.get("time_created_ns") or 0),
                frames=self._record.frames[stack] if stack >= 0 else (),
            )
        )

    def _stack(self, frames: Any) -> int:
        """The table's index of the user's frames among ``frames``; -1 where there are none."""
        if not frames:
            return -1
        # torch's pickles share the dictionaries of equal frames: identity finds most of them.
        key = tuple(map(id, frames))
        index = self._frames.get(key)
        if index is None:
            index = self._frames[key] = self._new_stack(frames)
        return index

    def _new_stack(self, frames: Iterable[Mapping[str, Any]]) -> int:
        found = user_frames(
            Frame(text(f["filename"]), int(f["line"]), text(f["name"])) for f in frames
        )
        if not found:
            return -1
        index = self._frames.get(found)
        if index is None:
            index = self._frames[found] = len(self._record.frames)
            self._record.frames.append(found)
        return index


def _names(profiling_name: Any, group: Any, desc: Any) -> tuple[GroupName, str]:
    backend, colon, op = text(profiling_name).partition(":")
    if not colon:
        backend, op = "", backend
    return GroupName(backend, text(group), text(desc)), _SAME_OP.get(op, op)


def _call(op: str, entry: Mapping[str, Any]) -> Call:
    return Call(
        op,
        _shapes(entry.get("input_sizes")),
        _shapes(entry.get("output_sizes")),
        _types(entry.get("input_dtypes")),
        _types(entry.get("output_dtypes")),
    )


def _shapes(value: Any) -> tuple[tuple[int, ...], ...]:
    if not value:
        return ()
    if isinstance(value, str):
        value = json.loads(value)
    return tuple([tuple(map(int, shape)) for shape in value])


def _types(value: Any) -> tuple[str, ...]:
    if not value:
        return ()
    if isinstance(value, str):
        value = json.loads(value)
    return tuple(map(text, value))


def text(value: Any) -> str:
    """``value`` as text of a length that can be shown. Raises ``TypeError`` for containers."""
    if not isinstance(value, str | int | float):
        raise TypeError(f"{type(value).__name__} where text was expected")
    return str(value)[:_SHOWN_CHARS]
