"""Plain values: what was recorded on each rank, and what the analysis makes of it.

A recorder's entries are kept as columns (a few machine words an entry) beside a table of the
distinct calls, so that a thousand ranks with thousands of entries each fit into memory.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from ncclops.stacks.frame import Frame


class OperationState(IntEnum):
    """How far one rank got with one operation, as its recorder knows.

    A recorder that never learns of completion (Gloo's) leaves entries ``ENQUEUED``; ``RETIRED``
    then only says that the operation ended somehow, by a time-out too.
    """

    ENQUEUED = 0
    STARTED = 1
    COMPLETED = 2
    RETIRED = 3


@dataclass(frozen=True, slots=True)
class Call:
    """A rank's call: all of it has to agree on every rank, as far as the operation requires.

    ``op`` is the name without the backend (``all_reduce``). Sizes are shapes of tensors.
    """

    op: str
    inputs: tuple[tuple[int, ...], ...] = ()
    outputs: tuple[tuple[int, ...], ...] = ()
    input_types: tuple[str, ...] = ()
    output_types: tuple[str, ...] = ()

    def __str__(self) -> str:
        shown = self.inputs or self.outputs
        types = self.input_types or self.output_types
        sizes = " ".join(str(list(shape)) for shape in shown[:3])
        more = f" and {len(shown) - 3} more" if len(shown) > 3 else ""
        return " ".join(filter(None, [self.op, sizes + more, "/".join(dict.fromkeys(types))]))

    def to_json(self) -> dict[str, Any]:
        return {
            "op": self.op,
            "input_sizes": [list(shape) for shape in self.inputs],
            "output_sizes": [list(shape) for shape in self.outputs],
            "input_dtypes": list(self.input_types),
            "output_dtypes": list(self.output_types),
        }


# The description of a group that was given none.
_NO_WORD = ("", "undefined")


@dataclass(frozen=True, slots=True)
class GroupName:
    """What a rank calls a process group. The same group has the same name on all its ranks,
    but one name may stand for several groups with different ranks (split groups)."""

    backend: str
    name: str
    desc: str

    def __str__(self) -> str:
        return self.desc if self.desc not in _NO_WORD else self.name or "?"


def is_default_group(name: str, desc: str) -> bool:
    """Whether torch calls the group of all ranks so; older releases describe it by no word."""
    return desc == "default_pg" or (name == "0" and desc in _NO_WORD)


@dataclass(frozen=True, slots=True)
class P2P:
    """A send or receive that is pending; ``me`` and ``peer`` are ranks within the group."""

    sends: bool
    me: int
    peer: int
    started: bool
    order: int
    created_ns: int
    frames: tuple[Frame, ...] = ()


@dataclass(slots=True)
class Track:
    """The collectives one rank recorded in one group since the group was made, oldest first.

    ``seqs`` strictly rises; gaps are operations that are not recorded. ``calls`` and ``frames``
    point into the tables of the :class:`RankRecord`; a frame of -1 is unknown. ``order`` is
    the recorder's own number of each entry, which orders entries of different groups.
    ``makings`` counts how often the group was made, as far as the ring goes back.
    """

    group: GroupName
    seqs: array[int] = field(default_factory=lambda: array("q"))
    calls: array[int] = field(default_factory=lambda: array("i"))
    frames: array[int] = field(default_factory=lambda: array("i"))
    states: bytearray = field(default_factory=bytearray)
    created_ns: array[int] = field(default_factory=lambda: array("q"))
    order: array[int] = field(default_factory=lambda: array("q"))
    timeout_ms: int = 0
    pending_p2p: list[P2P] = field(default_factory=list)
    makings: int = 1

    @property
    def last(self) -> int:
        """The sequence number enqueued last."""
        return self.seqs[-1] if self.seqs else 0

    def index(self, seq: int) -> int | None:
        """Where ``seq`` is in the columns; None if it was not recorded or is no longer."""
        found = bisect_left(self.seqs, seq)
        return found if found < len(self.seqs) and self.seqs[found] == seq else None


@dataclass(slots=True)
class RankRecord:
    """The contents of one rank's recorder, whichever file they came from.

    ``tracks`` are of the newest making of each group. ``ranks_of`` has the members of groups, where
    the recorder knows them, and ``others`` ranks that it names without a group. ``taken_at`` is in
    seconds since the epoch; ``taken_exactly`` is False if it is only a file's time of modification.
    """

    rank: int
    file: str
    version: str
    comm_lib: str = ""
    host: str | None = None
    pid: int | None = None
    taken_at: float | None = None
    taken_exactly: bool = False
    tracks: dict[GroupName, Track] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    frames: list[tuple[Frame, ...]] = field(default_factory=list)
    ranks_of: dict[tuple[str, str], tuple[int, ...]] = field(default_factory=dict)
    others: tuple[int, ...] = ()
    entries: int = 0


# What ``RankPlace.inside`` is where the function is not known: some collective (DDP, FSDP), or a
# wait in C for one that was started before.
SOME_COLLECTIVE, SOME_WAIT = "a collective", "wait"
# What ``RankPlace.what`` says of frames in torch's data loader.
DATA_LOADER = "its data loader"


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where a rank's main thread is: the user's innermost frame, and what was found below it.

    ``inside`` is the torch.distributed function it is in (``all_reduce``, ``recv``, ``wait``), or
    None. ``what`` says in words what the frames below the user's are about ("its data loader").
    ``left`` is the exception by which the rank has left the user's code; the frames are then of
    where it was raised.
    """

    frame: Frame | None
    inside: str | None = None
    what: str | None = None
    frames: tuple[Frame, ...] = ()
    left: str | None = None

    @property
    def in_data_loader(self) -> bool:
        """Whether the user's code waits for its data loader."""
        return self.what == DATA_LOADER


@dataclass(frozen=True, slots=True)
class GroupState:
    """A process group as a rank itself described it; numbers are -1 where it did not know."""

    name: str
    desc: str
    ranks: tuple[int, ...]
    backend: str = ""
    last_enqueued: int = -1
    last_completed: int = -1


@dataclass(slots=True)
class RankEvidence:
    """All there is about one rank. ``ended`` says how its process ended, if it is known to have,
    ``ended_signal`` by which signal (``SIGABRT``), and ``stopped`` that one has stopped it;
    ``missing`` why it could not say more. ``overrun``: it received so many bytes into a buffer of
    so many, which is how Gloo ends a process whose call does not fit its peer's. ``silent``: it
    did not answer while it ran, and was ended for that. ``no_python_s``: for so long no Python
    had run in it when it was looked at."""

    rank: int
    record: RankRecord | None = None
    place: RankPlace | None = None
    groups: tuple[GroupState, ...] = ()
    ended: str | None = None
    ended_well: bool = False
    ended_signal: str | None = None
    stopped: bool = False
    missing: str | None = None
    overrun: tuple[int, int] | None = None
    silent: bool = False
    no_python_s: float | None = None


@dataclass(slots=True)
class FlightEvidence:
    """What a folder holds: each rank's evidence, and what could not be read and why.

    ``lists_all`` says that each rank of the job has its place in the folder, with or without a
    dump. ``faults`` are the ranks that faulted, and what each reported itself (empty: others did).
    """

    source: str
    lists_all: bool = False
    ranks: dict[int, RankEvidence] = field(default_factory=dict)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    faults: Mapping[int, str] = field(default_factory=dict)

    def rank(self, number: int) -> RankEvidence:
        return self.ranks.setdefault(number, RankEvidence(number))
