"""Each rank's tracks put side by side: one :class:`Group` per process group of the job.

Members come from the recorder (NCCL's knows them) or from the ranks' own descriptions of their
groups. Gloo's recorder does not know; then they are the ranks that recorded something in it, and
for the default group all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ncclops.flight.model import (
    Call,
    FlightEvidence,
    GroupName,
    GroupState,
    OperationState,
    RankEvidence,
    RankRecord,
    Track,
    is_default_group,
)
from ncclops.flight_recorders import SECOND_OF_NCCL
from ncclops.rank_lists import rank_list

_SIZE_FROM = 64
_MOST_RANKS = 1 << 20
# These end on no rank before all have begun them.
_OF_ALL = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"}


@dataclass(slots=True)
class Group:
    """A process group: its members in the order of their ranks, and what each recorded.

    ``last`` has, for each member that is known to have a count, the sequence number it enqueued
    last (0: nothing); ``completed`` the last one known to be complete. ``members_known`` is False
    where membership was inferred. ``is_mixed``: there is
    one of the same name for another device.
    """

    name: GroupName
    members: tuple[int, ...]
    members_known: bool
    is_mixed: bool = False
    tracks: dict[int, Track] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)
    completed: dict[int, int] = field(default_factory=dict)
    _entered_s: dict[int, float | None] = field(default_factory=dict)

    def entered_s(self, seq: int) -> float | None:
        """When the first rank entered ``seq``, in seconds since the epoch; None if not recorded."""
        if seq not in self._entered_s:
            created = [
                track.created_ns[index]
                for track in self.tracks.values()
                if (index := track.index(seq)) is not None and track.created_ns[index]
            ]
            self._entered_s[seq] = min(created) / 1e9 if created else None
        return self._entered_s[seq]

    def __str__(self) -> str:
        said = f"{self.name} ({rank_list(self.members)})"
        return f"{said} over {self.name.backend}" if self.is_mixed else said

    def call(self, evidence: FlightEvidence, rank: int, seq: int) -> Call | None:
        """The call that ``rank`` made under ``seq``, if that is recorded."""
        track, record = self.tracks.get(rank), evidence.ranks[rank].record
        index = track.index(seq) if track is not None else None
        if track is None or record is None or index is None:
            return None
        return record.calls[track.calls[index]]


def align(evidence: FlightEvidence) -> list[Group]:
    """The groups of the job, those with the most members first."""
    world, states = _world(evidence), _states_by_name(evidence)
    groups: dict[tuple[GroupName, tuple[int, ...] | None], Group] = {}
    for rank in evidence.ranks.values():
        for name, track in rank.record.tracks.items() if rank.record else ():
            described = states.get(name.name, {}).get(rank.rank, ())
            members = _stated_members(rank, name, described)
            group = groups.get((name, members))
            if group is None:
                group = Group(name, members or (), members is not None)
                groups[(name, members)] = group
            group.tracks[rank.rank] = track
    found = _with_inferred(groups, world)
    _add_described(found, evidence)
    backends: dict[tuple[str, str], set[str]] = {}
    for group in found:
        same = backends.setdefault((group.name.name, group.name.desc), set())
        same.add(group.name.backend)
    for group in found:
        group.is_mixed = len(backends[group.name.name, group.name.desc]) > 1
        _drop_left_behind(group)
        _count(group, evidence, states.get(group.name.name, {}))
        if group.name.backend == SECOND_OF_NCCL:
            _add_ended_elsewhere(group, evidence)
    return sorted(found, key=lambda group: (-len(group.members), str(group.name)))


def _world(evidence: FlightEvidence) -> tuple[int, ...]:
    """All ranks of the job that anything points to."""
    ranks = set(evidence.ranks)
    for rank in evidence.ranks.values():
        if rank.record is not None:
            ranks.update(rank.record.others, *rank.record.ranks_of.values())
            ranks.update(range(_stated_size(rank.record)))
        for group in rank.groups:
            ranks.update(group.ranks)
    if evidence.lists_all or not ranks:
        return tuple(sorted(ranks))
    return tuple(range(max(ranks) + 1))  # torch numbers ranks without gaps


def _stated_size(record: RankRecord) -> int:
    """How many ranks the job has, from what an all_gather in the default group collects."""
    for name, track in record.tracks.items():
        if not is_default_group(name.name, name.desc):
            continue
        for index in dict.fromkeys(track.calls[-_SIZE_FROM:]):
            call = record.calls[index]
            if call.op == "all_gather" and call.inputs and len(call.outputs) == len(call.inputs):
                given, taken = call.inputs[0], call.outputs[0]
                if taken[1:] == given and 1 < taken[0] < _MOST_RANKS:
                    return taken[0]
    return 0


def _stated_members(
    rank: RankEvidence, name: GroupName, described: Sequence[GroupState]
) -> tuple[int, ...] | None:
    """``described`` is what the rank itself says of groups of that name."""
    assert rank.record is not None
    listed = rank.record.ranks_of.get((name.name, name.desc))
    if listed is None:
        listed = next((state.ranks for state in described if state.ranks), None)
    # A rank outside what it says it is in: numbers of another iteration, of no use here.
    return listed if listed is not None and rank.rank in listed else None


def _with_inferred(
    groups: dict[tuple[GroupName, tuple[int, ...] | None], Group], world: tuple[int, ...]
) -> list[Group]:
    """Ranks that do not know the members join the group of that name which has them."""
    known = [group for (_, members), group in groups.items() if members is not None]
    homes: dict[GroupName, dict[int, Group]] = {}
    for group in known:
        of_name = homes.setdefault(group.name, {})
        for rank in group.members:
            of_name.setdefault(rank, group)
    for (name, members), group in groups.items():
        if members is not None:
            continue
        of_name = homes.get(name, {})
        for rank, track in list(group.tracks.items()):
            if (home := of_name.get(rank)) is not None:
                home.tracks[rank] = group.tracks.pop(rank, track)
        if group.tracks:
            is_default = is_default_group(name.name, name.desc)
            group.members = world if is_default else tuple(sorted(group.tracks))
            known.append(group)
    return known


def _add_described(groups: list[Group], evidence: FlightEvidence) -> None:
    """Counts of members that recorded nothing in a group, and groups that no rank recorded."""
    named: dict[str, list[Group]] = {}
    for group in groups:
        named.setdefault(group.name.name, []).append(group)
    for rank in evidence.ranks.values():
        for state in rank.groups:
            mine = [
                group
                for group in named.get(state.name, ())
                if rank.rank in group.members or rank.rank in state.ranks
                if group.members_known or set(group.members) <= set(state.ranks)
            ]
            for group in mine:
                if not group.members_known:
                    group.members, group.members_known = state.ranks, True
                if rank.rank not in group.tracks and state.last_enqueued >= 0 and len(mine) == 1:
                    _take_counts(group, rank.rank, state)
            if not mine and state.last_enqueued > 0 and rank.rank in state.ranks:
                group = Group(GroupName(state.backend, state.name, state.desc), state.ranks, True)
                _take_counts(group, rank.rank, state)
                groups.append(group)
                named.setdefault(state.name, []).append(group)


def _take_counts(group: Group, rank: int, state: GroupState) -> None:
    group.last[rank] = state.last_enqueued
    if state.last_completed >= 0:
        group.completed[rank] = state.last_completed


def _drop_left_behind(group: Group) -> None:
    """Forget tracks from before the group was made anew, of ranks that did not make it again.

    Their numbers count something else than the others'.
    """
    newest = max((track.makings for track in group.tracks.values()), default=1)
    starts = [
        track.created_ns[0]
        for track in group.tracks.values()
        if track.makings == newest and track.seqs
    ]
    for rank, track in list(group.tracks.items()):
        over = track.seqs and starts and track.created_ns[-1] < min(starts)
        if track.makings < newest and over:
            group.tracks[rank] = Track(track.group, makings=track.makings)


def _has_record(evidence: FlightEvidence, rank: int) -> bool:
    about = evidence.ranks.get(rank)
    return about is not None and about.record is not None


def _states_by_name(evidence: FlightEvidence) -> dict[str, dict[int, list[GroupState]]]:
    """What the ranks themselves say of their groups, by the group's name and the rank."""
    found: dict[str, dict[int, list[GroupState]]] = {}
    for rank in evidence.ranks.values():
        for state in rank.groups:
            found.setdefault(state.name, {}).setdefault(rank.rank, []).append(state)
    return found


def _count(
    group: Group, evidence: FlightEvidence, states: Mapping[int, Sequence[GroupState]]
) -> None:
    """``states`` are the ranks' own descriptions of groups of that name."""
    for rank in group.members:
        track = group.tracks.get(rank)
        if track is not None:
            group.last[rank] = track.last
        elif rank not in group.last and _has_record(evidence, rank):
            group.last[rank] = 0  # it recorded other groups, and nothing in this one
    for rank, track in group.tracks.items():
        for state in states.get(rank, ()):
            if 0 <= state.last_completed <= track.last:
                group.completed.setdefault(rank, state.last_completed)


def _add_ended_elsewhere(group: Group, evidence: FlightEvidence) -> None:
    """What needs all ranks and has ended on one of them has ended on all that have entered it.

    torch's second engine of NCCL learns late that an operation has ended, and no more once its
    group is being destroyed.
    """
    ended = -1
    for rank, track in group.tracks.items():
        for seq, state in zip(reversed(track.seqs), reversed(track.states), strict=True):
            if seq <= ended:
                break
            call = group.call(evidence, rank, seq)
            if state == OperationState.COMPLETED and call is not None and call.op in _OF_ALL:
                ended = seq
    for rank, track in group.tracks.items():
        group.completed[rank] = max(group.completed.get(rank, -1), min(ended, track.last))


def add_possible_members(group: Group, evidence: FlightEvidence) -> bool:
    """Take ranks that never recorded ``group`` for members, where its members are a guess.

    For a group whose first operation does not end: had all its members entered it, it would.
    Returns whether there are any.
    """
    if group.members_known or any(last != 1 for last in group.last.values()):
        return False
    possible = [rank for rank in _world(evidence) if rank not in group.members]
    group.members = tuple(sorted((*group.members, *possible)))
    group.last |= {rank: 0 for rank in possible if _has_record(evidence, rank)}
    return bool(possible)
