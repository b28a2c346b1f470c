"""Which rank waits for which: a graph from the pending operations, its roots and its cycles.

A rank waits in its *head*, the first operation it has enqueued that is not complete. It waits for
the members that have not entered that operation, and for those that will come to it only after
a head of their own. A rank that is waited for and waits in nothing is a root of the hang; ranks
that wait for each other in a circle are a deadlock; a head that all have entered is a stalled
transfer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ncclops.flight.groups import Group
from ncclops.flight.model import (
    SOME_COLLECTIVE,
    SOME_WAIT,
    FlightEvidence,
    OperationState,
    RankPlace,
    Track,
)
from ncclops.flight_recorders import SECOND_OF_NCCL

# Snapshots of the ranks of a running job are not taken at one instant, and Gloo's recorder learns
# late that an operation has ended: what is not older than this is in flight and not stuck.
IN_FLIGHT_S = 0.5
# torch's second engine of NCCL looks once a second for what has ended.
_ENDS_LATE_S = {SECOND_OF_NCCL: 1.0}
# A recorder without a completion in so many operations does not record completions.
_UNTOLD = 64
# After everything that has a place in a recorder's order.
_UNORDERED = 1 << 62
# Waiting in C below one of these looks like being elsewhere.
_MAY_WAIT = {"the backward pass", "a lock or another thread"}


@dataclass(frozen=True, slots=True)
class Op:
    """One collective (``peer`` None), or a transfer with the rank ``peer``, of a group.

    Groups are given by their index in the list of all.
    """

    group: int
    seq: int
    peer: int | None = None
    sends: bool = False


@dataclass(slots=True)
class Waits:
    """``heads`` by rank; ``edges`` from a waiting rank to those it waits for.

    ``late`` are ranks that had not entered an operation when they were looked at, and may have an
    instant later, by seconds.
    """

    heads: dict[int, Op] = field(default_factory=dict)
    edges: dict[int, set[int]] = field(default_factory=dict)
    late: dict[int, float] = field(default_factory=dict)


def find_waits(evidence: FlightEvidence, groups: list[Group]) -> Waits:
    """The graph of which rank waits for which."""
    waits = Waits()
    pending = {rank: ops for rank in evidence.ranks if (ops := _pending(groups, rank))}
    for rank, ops in pending.items():
        if not _is_elsewhere(evidence, rank):
            waits.heads[rank] = min(ops, key=lambda item: item[0])[1]
    _add_ended_waits(evidence, groups, waits)
    entered = {rank: {op for _, op in ops} for rank, ops in pending.items()}
    for rank, op in waits.heads.items():
        waits.edges[rank] = _waited_for(evidence, groups, waits, entered, rank, op)
    return waits


def in_flight_s(group: Group) -> float:
    """How old an operation of ``group`` may be that has ended unknown to the recorder."""
    return IN_FLIGHT_S + _ENDS_LATE_S.get(group.name.backend, 0.0)


def is_elsewhere(place: RankPlace | None) -> bool:
    """Whether a rank is known not to be waiting for others."""
    return place is not None and place.inside is None and place.what not in _MAY_WAIT


def _is_elsewhere(evidence: FlightEvidence, rank: int) -> bool:
    # A GPU's operations are pending whatever its program does meanwhile.
    about = evidence.ranks[rank]
    on_cpu = about.record is not None and all(
        name.backend == "gloo" for name in about.record.tracks
    )
    return on_cpu and is_elsewhere(about.place)


def _pending(groups: list[Group], rank: int) -> list[tuple[int, Op]]:
    """What ``rank`` has enqueued and not completed, with the recorder's order."""
    found = []
    for number, group in enumerate(groups):
        track = group.tracks.get(rank)
        if track is None:
            if 0 <= group.completed.get(rank, -1) < group.last.get(rank, 0):
                found.append((_UNORDERED, Op(number, group.completed[rank] + 1)))
            continue
        for index in open_entries(group, rank, track):
            found.append((track.order[index], Op(number, track.seqs[index])))
        for transfer in track.pending_p2p:
            if 0 <= transfer.peer < len(group.members):
                peer = group.members[transfer.peer]
                found.append((transfer.order, Op(number, -1, peer, transfer.sends)))
    return found


def open_entries(group: Group, rank: int, track: Track) -> range:
    """The entries of a rank's ``track`` that have not ended: those after the last that has."""
    states, completed = track.states, group.completed.get(rank, -1)
    first = len(states)
    while (
        first and states[first - 1] < OperationState.COMPLETED and track.seqs[first - 1] > completed
    ):
        first -= 1
    if first == 0 and len(states) > _UNTOLD:
        # Only the last may be open, and that neither if all have come and some have gone on.
        went_on = min(group.last.values()) >= track.last < max(group.last.values())
        first = len(states) - (not went_on)
    return range(first, len(states))


def _add_ended_waits(evidence: FlightEvidence, groups: list[Group], waits: Waits) -> None:
    """Operations that ended on some ranks and were never entered by others: they timed out.

    Gloo's recorder does not distinguish the two kinds of ends.
    """
    for number, group in enumerate(groups):
        newest = max(group.last.values(), default=0)
        if newest == 0 or min(group.last.values()) == newest:
            continue
        for rank, last in group.last.items():
            track = group.tracks.get(rank)
            if last != newest or rank in waits.heads:
                continue
            if track is None or not track.states:
                # Only a count, by which it is ahead of others.
                if rank not in group.completed:
                    waits.heads[rank] = Op(number, newest)
            elif track.states[-1] == OperationState.RETIRED and not _ended_in_time(
                evidence, group, rank
            ):
                waits.heads[rank] = Op(number, newest)


def _ended_in_time(evidence: FlightEvidence, group: Group, rank: int) -> bool:
    """Whether the last operation of ``rank`` may have completed after others were looked at."""
    mine = evidence.ranks[rank].record
    assert mine is not None
    behind = [r for r, last in group.last.items() if last < group.last[rank]]
    for other in behind:
        record = evidence.ranks[other].record
        if record is None or record.taken_at is None or mine.taken_at is None:
            return False
        if _late_s(evidence, group, other, group.last[rank]) > IN_FLIGHT_S:
            return False
    return True


def _waited_for(
    evidence: FlightEvidence,
    groups: list[Group],
    waits: Waits,
    entered: Mapping[int, set[Op]],
    rank: int,
    op: Op,
) -> set[int]:
    if op.peer is not None:
        answer = Op(op.group, -1, rank, not op.sends)
        return set() if answer in entered.get(op.peer, ()) else {op.peer}
    group, found = groups[op.group], set()
    for member in group.members:
        if member == rank:
            continue
        last = group.last.get(member)
        if last is None:
            if not _may_be_inside(evidence, group, member, rank, op.seq):
                found.add(member)
        elif last < op.seq:
            late = _late_s(evidence, group, member, op.seq)
            if late > IN_FLIGHT_S or evidence.faults or member in waits.heads:
                found.add(member)
            else:
                waits.late[member] = max(late, waits.late.get(member, 0.0))
        elif waits.heads.get(member, op) != op and op in entered.get(member, ()):
            found.add(member)  # it has enqueued this one behind another that does not end
    return found


def _late_s(evidence: FlightEvidence, group: Group, member: int, seq: int) -> float:
    """How long after the first rank entered ``seq`` ``member`` was seen outside of it."""
    record = evidence.ranks[member].record if member in evidence.ranks else None
    entered = group.entered_s(seq)
    if record is None or record.taken_at is None or entered is None:
        return float("inf")
    return record.taken_at - entered


def _may_be_inside(
    evidence: FlightEvidence, group: Group, member: int, waiting: int, seq: int
) -> bool:
    """Whether a rank of which no record exists stands in what the others wait in."""
    about = evidence.ranks.get(member)
    if about is None or about.place is None or about.place.inside is None or about.ended:
        return False
    call = group.call(evidence, waiting, seq)
    return call is None or about.place.inside in (call.op, SOME_COLLECTIVE, SOME_WAIT)


def roots(waits: Waits) -> set[int]:
    """Ranks that are waited for and wait for no other rank."""
    targets = set().union(*waits.edges.values()) if waits.edges else set()
    return {rank for rank in targets if rank not in waits.heads}


def circles(waits: Waits) -> list[tuple[int, ...]]:
    """The ranks of each deadlock: strongly connected parts of the graph (Tarjan's, iterative)."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    found: list[tuple[int, ...]] = []
    for start in waits.edges:
        if start in index:
            continue
        work: list[tuple[int, Iterable[int]]] = []

        def enter(node: int, work: list[tuple[int, Iterable[int]]] = work) -> None:
            index[node] = low[node] = len(index)
            stack.append(node)
            on_stack.add(node)
            work.append((node, iter(sorted(waits.edges.get(node, ())))))

        enter(start)
        while work:
            node, rest = work[-1]
            following = next(iter(rest), None)
            if following is None:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    part = _pop_part(stack, on_stack, node)
                    if len(part) > 1:
                        found.append(part)
            elif following not in index:
                enter(following)
            elif following in on_stack:
                low[node] = min(low[node], index[following])
    return found


def _pop_part(stack: list[int], on_stack: set[int], node: int) -> tuple[int, ...]:
    part = []
    while True:
        top = stack.pop()
        on_stack.discard(top)
        part.append(top)
        if top == node:
            return tuple(sorted(part))


def a_circle(waits: Waits, part: tuple[int, ...]) -> tuple[int, ...]:
    """One shortest way round within a deadlock, as an example."""
    best: tuple[int, ...] = ()
    inside = set(part)
    for start in part[:16]:
        before: dict[int, int] = {}
        level = [start]
        while level and start not in before:
            after = []
            for node in level:
                for target in sorted(waits.edges.get(node, set()) & inside):
                    if target not in before:
                        before[target] = node
                        after.append(target)
            level = after
        if start not in before:
            continue
        way = [start]
        while before[way[-1]] != start:
            way.append(before[way[-1]])
        way = [start, *way[:0:-1]]
        if not best or len(way) < len(best):
            best = tuple(way)
    return best
