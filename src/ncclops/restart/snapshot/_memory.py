"""What a process keeps over the iterations of a wrapped function: snapshots, and copies for others.

One ``Memory`` belongs to one call of a wrapped function. Each unit has two buffers: while one is
being written, the other one has the last complete snapshot. It is the same for the copies that this
rank keeps for another one.

What the main thread changes is changed by single assignments: it may be interrupted anywhere.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Protocol

from ncclops.restart import _calls
from ncclops.restart._interrupt.delicate import is_delicate
from ncclops.restart.snapshot._blobs import Blob
from ncclops.restart.snapshot._planning import Holding, Label, Moment
from ncclops.restart.snapshot._room import available_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from ncclops.restart.snapshot._background import Background
    from ncclops.restart.snapshot._copying import Copier
    from ncclops.restart.snapshot._wire import Address


class Listening(Protocol):
    """What answers other ranks: ``_server``, which imports this module."""

    @property
    def address(self) -> Address:
        """Where."""

    def close(self) -> None:
        """Answer no more."""


class Memory:
    """The snapshots of one rank in this process. ``most_copied``: bytes for other ranks' copies;
    ``None``: half of what the host has left when the first one comes.
    """

    def __init__(self) -> None:
        self.most_copied: int | None = None
        self.server: Listening | None = None
        self.background: Background | None = None  # of the latest iteration
        self.copier: Copier | None = None  # likewise
        self.interval = 0  # the last one that all ranks have agreed on
        self.restored_in = ""  # the prefix of the last restore in a wrapped function
        self.restored: tuple[int, int | None] | None = None  # its iteration, and the step
        self.modes: dict[str, list[bool]] = {}  # of modules, at the latest snapshot
        self._own: dict[str, tuple[Blob, ...]] = {}  # the newest first
        self._copies: dict[tuple[int, str], tuple[Blob, ...]] = {}  # by seat and unit
        self._receiving: dict[tuple[int, str], int] = {}  # bytes on their way
        self._lock = threading.Lock()  # of the copies; the main thread takes it between iterations

    # --- this rank's own ------------------------------------------------------------------------

    def buffer_for(self, unit: str, nbytes: int) -> Tensor | None:
        """The buffer of the older snapshot of ``unit``, which is given up, if it has this size."""
        kept = self._own.get(unit, ())
        if len(kept) < 2:
            return None
        self._own[unit] = kept[:1]
        return kept[1].buffer if kept[1].nbytes == nbytes and kept[1].is_copied else None

    def keep(self, unit: str, blob: Blob) -> None:
        """``blob`` is the newest snapshot of ``unit``; of the others only the newest stays."""
        self._own[unit] = (blob, *self._own.get(unit, ())[:1])

    def keep_only(self, unit: str, blob: Blob | None) -> None:
        """After a restore: ``blob`` is what this rank has, and nothing else is."""
        self._own[unit] = () if blob is None else (blob,)

    def drop_incomplete(self) -> None:
        """What was not completely copied when an iteration ended is nothing to go on from."""
        for unit, blobs in list(self._own.items()):
            self._own[unit] = tuple(each for each in blobs if each.is_copied)

    def own(self) -> list[Blob]:
        """All complete snapshots of this rank."""
        return [each for blobs in list(self._own.values()) for each in blobs if each.is_copied]

    # --- for others -----------------------------------------------------------------------------

    def room_for_copy(self, label: Label) -> Tensor:
        """A buffer for a copy. Raises ``MemoryError`` where this rank keeps no more."""
        import torch

        key = label.seat, label.unit
        with self._lock:
            kept = self._copies.get(key, ())
            if len(kept) > 1:
                self._copies[key] = kept[:1]
                if kept[1].nbytes == label.nbytes:
                    self._receiving[key] = label.nbytes
                    return kept[1].buffer
            limit = self._limit()
            used = sum(each.nbytes for each in self._all_copies())
            used += sum(size for other, size in self._receiving.items() if other != key)
            if used + label.nbytes > limit:
                raise MemoryError(
                    f"a copy of {label.nbytes} bytes for seat {label.seat} does not fit: {used} of "
                    f"{limit} bytes for copies are in use on this rank"
                )
            self._receiving[key] = label.nbytes
        try:
            return torch.empty(label.nbytes, dtype=torch.uint8)
        except RuntimeError as error:
            raise MemoryError(str(error)) from error

    def is_received(self, label: Label) -> None:
        """What ``room_for_copy`` has made room for is there, or does not come."""
        with self._lock:
            self._receiving.pop((label.seat, label.unit), None)

    def keep_copy(self, blob: Blob) -> None:
        """A copy for another rank has arrived in whole."""
        assert blob.label is not None
        key = blob.label.seat, blob.label.unit
        with self._lock:
            self._copies[key] = (blob, *self._copies.get(key, ())[:1])

    @is_delicate  # holds a lock
    def keep_copies_of(self, moment: Moment, taken: Collection[Blob]) -> None:
        """After a restore: copies of another moment are of a future that was given up, or old.

        ``taken`` are now this rank's own: their buffers will be written to.
        """
        with self._lock:
            kept = {
                key: tuple(b for b in blobs if _moment(b) == moment and b not in taken)
                for key, blobs in self._copies.items()
            }
            self._copies = {key: blobs for key, blobs in kept.items() if blobs}

    @is_delicate  # holds a lock
    def drop_copies_before(self, epoch: int) -> None:
        """All ranks have given their state to their present partners: older copies may go."""
        with self._lock:
            newest = {
                key: max(_moment(b).epoch for b in blobs) for key, blobs in self._copies.items()
            }
            self._copies = {k: v for k, v in self._copies.items() if newest[k] >= epoch}

    def _all_copies(self) -> Iterator[Blob]:
        return (each for blobs in self._copies.values() for each in blobs)

    def _limit(self) -> int:
        if self.most_copied is None:
            self.most_copied = available_bytes() // 2
        return self.most_copied

    # --- both -----------------------------------------------------------------------------------

    @is_delicate  # holds a lock
    def find(self, label: Label) -> Blob | None:
        """The snapshot or copy with exactly this label. Any thread."""
        with self._lock:
            copies = list(self._all_copies())
        return next((each for each in [*self.own(), *copies] if each.label == label), None)

    @is_delicate  # holds a lock
    def holdings(self) -> list[tuple[Holding, Blob]]:
        """Everything complete that this rank could restore or hand out."""
        with self._lock:
            copies = list(self._all_copies())
        found = [(Holding(each.label), each) for each in self.own() if each.label is not None]
        return found + [(Holding(each.label, True), each) for each in copies if each.label]

    @property
    @is_delicate  # holds a lock
    def nbytes(self) -> tuple[int, int]:
        """In use for this rank's own snapshots, and for copies."""
        with self._lock:
            copies = sum(each.nbytes for each in self._all_copies())
        return sum(each.nbytes for blobs in list(self._own.values()) for each in blobs), copies

    def end_iteration(self) -> None:
        """What the last iteration has left is complete, or dropped."""
        if self.copier is not None:
            self.copier.close()
        if self.background is not None:
            self.background.close()
        self.drop_incomplete()

    def close(self) -> None:
        """The call has ended: give everything back."""
        self.end_iteration()
        if self.server is not None:
            self.server.close()
        self._own = {}
        with self._lock:
            self._copies = {}


def _moment(blob: Blob) -> Moment:
    assert blob.label is not None
    return blob.label.moment


_memories: dict[tuple[int, int, str], Memory] = {}  # by process, call and name


def memory_of(call: _calls.Call | None, name: str) -> Memory:
    """The memory of ``call`` (or of the process, without one) that goes by ``name``."""
    key = os.getpid(), id(call), name
    if key not in _memories:
        _memories[key] = Memory()
        if call is not None:
            call.at_end.append(lambda: _memories.pop(key).close())
    return _memories[key]


def restored_beside(call: _calls.Call, name: str) -> dict[str, tuple[int, int | None]]:
    """What the other ``Snapshots`` of ``call`` have restored last, by their names."""
    here = os.getpid(), id(call)
    return {
        other: memory.restored
        for (*of, other), memory in _memories.items()
        if tuple(of) == here and other != name and memory.restored is not None
    }
