"""Where members of a group made different calls under the same sequence number."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from ncclops.flight.groups import Group
from ncclops.flight.model import Call, FlightEvidence
from ncclops.stacks.frame import Frame
from ncclops.stacks.ownership import user_frames

# Each rank's share may differ by design; only how they are typed has to agree.
_UNEVEN = ("all_to_all", "all_gather_v", "reduce_scatter_v", "send", "recv")
_LOOK_AHEAD = 3


@dataclass(frozen=True)
class Mismatch:
    """Ranks that disagree under ``seq``, by the call they made; the usual call first.

    ``odd`` are the ranks that differ from the usual; all of them if nothing shows which is usual.
    ``kind`` is order, op, shape or dtype. ``live`` is False if they agreed again later, so that
    no hang comes from it.
    """

    group: Group
    seq: int
    kind: str
    sides: tuple[tuple[Call, tuple[int, ...]], ...]
    odd: tuple[int, ...]
    clear: bool
    live: bool


class CallComparison:
    """Compares calls by what has to agree of them. Keeps one table for all groups of a job."""

    def __init__(self, evidence: FlightEvidence) -> None:
        self._evidence = evidence
        self._ids: dict[tuple[object, ...], int] = {}
        self._tables: dict[int, list[int]] = {}

    def first_mismatch(self, group: Group) -> Mismatch | None:
        """The first disagreement of ``group`` in what all compared ranks still remember."""
        columns = {rank: self._column(rank, group) for rank in group.tracks}
        columns = {rank: column for rank, column in columns.items() if len(column)}
        if len(columns) < 2:
            return None
        seq = self._first_difference(group, columns)
        return None if seq is None else self._describe(group, columns, seq)

    def _column(self, rank: int, group: Group) -> array[int]:
        return array("i", map(self._table(rank).__getitem__, group.tracks[rank].calls))

    def _table(self, rank: int) -> list[int]:
        """For each call in the rank's own table, its number in the one of all ranks."""
        table = self._tables.get(rank)
        if table is None:
            record = self._evidence.ranks[rank].record
            table = [self._id(call) for call in record.calls] if record is not None else []
            self._tables[rank] = table
        return table

    def _id(self, call: Call) -> int:
        return self._ids.setdefault(must_agree(call), len(self._ids))

    def _first_difference(self, group: Group, columns: Mapping[int, array[int]]) -> int | None:
        # Against the one that remembers most; that decides where, not who is odd.
        reference = max(columns, key=lambda rank: (len(columns[rank]), -rank))
        whole = group.tracks[reference].seqs
        first: int | None = None
        for rank, column in columns.items():
            seqs = group.tracks[rank].seqs
            start = max(seqs[0], whole[0])
            stop = min(seqs[-1], whole[-1]) + 1
            if first is not None:
                stop = min(stop, first)
            a, b = bisect_left(seqs, start), bisect_left(seqs, stop)
            c, d = bisect_left(whole, start), bisect_left(whole, stop)
            if seqs[a:b] == whole[c:d] and column[a:b] == columns[reference][c:d]:
                continue
            mine = dict(zip(seqs[a:b], column[a:b], strict=True))
            theirs = zip(whole[c:d], columns[reference][c:d], strict=True)
            different = (seq for seq, call in theirs if mine.get(seq, call) != call)
            first = next(different, first)
        return first

    def _describe(self, group: Group, columns: Mapping[int, array[int]], seq: int) -> Mismatch:
        at: dict[int, int] = {}
        for rank in columns:
            if (index := group.tracks[rank].index(seq)) is not None:
                at[rank] = columns[rank][index]
        by_call: dict[int, list[int]] = {}
        for rank in sorted(at):
            by_call.setdefault(at[rank], []).append(rank)
        usual = self._habits(group, columns, seq, by_call)
        order = sorted(by_call, key=lambda id_: (-len(by_call[id_]), -usual[id_], id_))
        most, second = order[0], order[1]
        clear = (len(by_call[most]), usual[most]) != (len(by_call[second]), usual[second])
        odd = [rank for rank in sorted(at) if not clear or at[rank] != most]
        sides = tuple(
            (self._call(group, by_call[id_][0], seq), tuple(by_call[id_])) for id_ in order
        )
        return Mismatch(
            group,
            seq,
            kind=self._kind(group, columns, seq, (most, second), by_call),
            sides=sides,
            odd=tuple(odd),
            clear=clear,
            live=not self._agreed_later(group, columns, seq),
        )

    def _call(self, group: Group, rank: int, seq: int) -> Call:
        call = group.call(self._evidence, rank, seq)
        assert call is not None
        return call

    def _earlier(self, group: Group, columns: Mapping[int, array[int]], seq: int) -> Counter[int]:
        """How often each call was made before ``seq``, in the group's longest memory of it."""
        longest = max(columns, key=lambda rank: (len(columns[rank]), -rank))
        return Counter(columns[longest][: bisect_left(group.tracks[longest].seqs, seq)])

    def _habits(
        self,
        group: Group,
        columns: Mapping[int, array[int]],
        seq: int,
        by_call: Mapping[int, list[int]],
    ) -> Counter[int]:
        """How usual each call is: in the group before ``seq``, else anywhere in the job."""
        earlier = self._earlier(group, columns, seq)
        counts = sorted((len(ranks), earlier[id_]) for id_, ranks in by_call.items())
        if counts[-1] != counts[-2]:
            return earlier
        anywhere: Counter[int] = Counter()
        for about in self._evidence.ranks.values():
            for track in about.record.tracks.values() if about.record else ():
                table = self._table(about.rank)
                anywhere.update(map(table.__getitem__, track.calls))
        for id_, ranks in by_call.items():
            anywhere[id_] -= len(ranks)
        return anywhere

    def _agreed_later(self, group: Group, columns: Mapping[int, array[int]], seq: int) -> bool:
        stop = min(group.tracks[rank].last for rank in columns)
        for later in range(stop, max(seq, stop - 64), -1):
            found = {
                columns[rank][index]
                for rank in columns
                if (index := group.tracks[rank].index(later)) is not None
            }
            if len(found) == 1:
                return True
            if found:
                return False
        return False

    def _kind(
        self,
        group: Group,
        columns: Mapping[int, array[int]],
        seq: int,
        ids: tuple[int, int],
        by_call: Mapping[int, list[int]],
    ) -> str:
        ranks = (by_call[ids[0]][0], by_call[ids[1]][0])
        usual, odd = (self._call(group, rank, seq) for rank in ranks)
        differs = _difference(usual, odd)
        lines = [frame_at(self._evidence, group, rank, seq) for rank in ranks]
        if lines[0] is not None and lines[0] == lines[1]:
            return differs
        # Two calls that have nothing in common are two steps of a program; a barrier carries
        # nothing to compare.
        both_carry = usual.op != "barrier" != odd.op
        if differs == "op" and both_carry and _payload(usual) != _payload(odd):
            return "order"
        known = self._earlier(group, columns, seq)
        if known[ids[1]] or self._follows(group, columns, seq, ids, ranks):
            return "order"
        return differs

    def _follows(
        self,
        group: Group,
        columns: Mapping[int, array[int]],
        seq: int,
        ids: tuple[int, int],
        ranks: tuple[int, int],
    ) -> bool:
        """Whether either side made the call soon after that the other made here."""
        for rank, other in ((ranks[0], ids[1]), (ranks[1], ids[0])):
            start = bisect_left(group.tracks[rank].seqs, seq + 1)
            if other in columns[rank][start : start + _LOOK_AHEAD]:
                return True
        return False


def frame_at(evidence: FlightEvidence, group: Group, rank: int, seq: int) -> Frame | None:
    """The user's line that enqueued ``seq`` on ``rank``, where it was recorded."""
    frames = frames_at(evidence, group, rank, seq)
    return frames[0] if frames else None


def frames_at(evidence: FlightEvidence, group: Group, rank: int, seq: int) -> tuple[Frame, ...]:
    """The user's frames that enqueued ``seq`` on ``rank``, innermost first.

    Where the recorder kept none: where the rank stands, if it is still in its last operation. One
    that waits for a communicator of NCCL to come up is counted, and not recorded.
    """
    track, about = group.tracks.get(rank), evidence.ranks.get(rank)
    index = track.index(seq) if track is not None else None
    if about is None:
        return ()
    if track is not None and about.record is not None and index is not None:
        stack = track.frames[index]
        if stack >= 0:
            return about.record.frames[stack]
    if seq == group.last.get(rank) and about.place is not None and about.place.inside:
        return user_frames(about.place.frames)
    return ()


def must_agree(call: Call) -> tuple[object, ...]:
    """What of ``call`` has to be the same on all ranks for the operation to come about."""
    if call.op.startswith(_UNEVEN) or len({prod(shape) for shape in call.outputs}) > 1:
        return call.op, call.input_types or call.output_types
    return call.op, *_payload(call)


def _payload(call: Call) -> tuple[object, ...]:
    """Elements and types: of what is received in a scatter, of what is given in all others."""
    given = (call.inputs, call.input_types)
    taken = (call.outputs, call.output_types)
    shapes, types = taken if call.op == "scatter" or not call.inputs else given
    return tuple(prod(shape) for shape in shapes), types


def _difference(one: Call, other: Call) -> str:
    if one.op != other.op:
        return "op"
    return "shape" if _payload(one)[0] != _payload(other)[0] else "dtype"
