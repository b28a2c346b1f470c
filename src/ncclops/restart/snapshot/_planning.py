"""Who takes which state from where, and who keeps whose copy: pure functions of what ranks have.

Each rank's state has up to two units:

- ``OWN``: what no other rank has, such as its random number generators, or its shard of a model;
- ``SHARED``: what several ranks hold alike, such as the model under plain DDP. Ranks that name the
  same ``shard`` hold the same.

A unit in somebody's memory is told by its ``Label``. A label never changes: what was taken in a
world of four ranks by the rank that was number 2 stays that. ``epoch`` counts restores, so that a
step which was trained twice, before a fault and again after it, is not mixed up with itself: ranks
restore a ``Moment``, an epoch and a step of it, and the newest is that of the highest epoch.

Standard library only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any, NamedTuple

OWN, SHARED = "own", "shared"


class Moment(NamedTuple):
    """A step of an epoch."""

    epoch: int
    step: int


@dataclass(frozen=True)
class Label:
    """Which unit of which rank at which moment, and how large.

    ``role`` and ``world`` are the rank's number and the number of ranks when it was taken, ``seat``
    the rank's number at launch. ``layout`` is a digest of the shapes of parameters and of the
    places of their shards; ``digest`` that of the content.
    """

    unit: str
    epoch: int
    step: int
    role: int
    world: int
    seat: int
    shard: str
    layout: str
    nbytes: int
    digest: str

    @property
    def moment(self) -> Moment:
        """When it was taken."""
        return Moment(self.epoch, self.step)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Label:
        """Raises ``ValueError`` for what is no label."""
        types = {name: int if kind == "int" else str for name, kind in cls.__annotations__.items()}
        if set(fields) != set(types):
            raise ValueError(f"fields {sorted(fields)[:20]} are not those of a label")
        for name, kind in types.items():
            if type(fields[name]) is not kind:
                raise ValueError(f"{name} of a label is a {type(fields[name]).__name__}")
        if fields["nbytes"] < 0:
            raise ValueError("a label with a negative size")
        return cls(**fields)


@dataclass(frozen=True)
class Holding:
    """A unit in the memory of a rank: its own, or a copy that it keeps for its partner."""

    label: Label
    is_copy: bool = False


@dataclass(frozen=True)
class Seat:
    """What one rank has and needs, as it tells the others.

    ``domain`` is what fails as a whole: a node, say. ``needs`` are the units that it needs, with
    the layout that each must have ("": any).
    """

    role: int
    seat: int
    domain: str
    shard: str
    needs: Mapping[str, str]
    holdings: Sequence[Holding]


class Source(Enum):
    """Where a rank took its state from."""

    MEMORY = "memory"  # this rank's own
    REPLICA = "replica"  # the memory of another rank, which holds the same
    PARTNER = "partner"  # the copy that a partner has kept
    CHECKPOINT = "checkpoint"  # what the user's function has loaded
    NOTHING = "nothing"  # there is no state yet: training begins


@dataclass(frozen=True)
class Fetch:
    """Take ``label`` from the rank with number ``holder``; its own memory where that is itself."""

    label: Label
    holder: int
    source: Source


@dataclass(frozen=True)
class Plan:
    """What all ranks do. ``moment`` is ``None`` where memory has no complete state.

    ``epoch`` is that of what is trained from here on. ``missing``: why no newer moment could be
    taken, for people: the newest one that is not complete, and the ranks that lack it.
    """

    epoch: int
    moment: Moment | None
    fetches: Mapping[int, Mapping[str, Fetch]]
    missing: str


Excluded = Collection[tuple[int, Label]]


def plan(seats: Sequence[Seat], excluded: Excluded = ()) -> Plan:
    """The newest moment of which every rank can have all that it needs, and from whom.

    ``excluded`` are holdings that have turned out not to be there: the rank and the label.
    """
    world = len(seats)
    offers = _offers(seats, frozenset(excluded))
    missing = ""
    for moment in sorted(offers, reverse=True):
        fetches, lacking = _fetches(seats, offers[moment], world)
        if not lacking:
            return Plan(_next_epoch(seats), moment, fetches, missing)
        if not missing:
            missing = f"step {moment.step}: {_lacking(lacking)}"
    return Plan(_next_epoch(seats), None, {}, missing)


class _Offer(NamedTuple):
    holder: Seat
    holding: Holding


def _offers(seats: Sequence[Seat], excluded: frozenset[Any]) -> dict[Moment, list[_Offer]]:
    found: dict[Moment, list[_Offer]] = {}
    for seat in sorted(seats, key=lambda each: each.role):
        for holding in seat.holdings:
            offers = found.setdefault(holding.label.moment, [])
            if (seat.role, holding.label) not in excluded:
                offers.append(_Offer(seat, holding))
    return found


def _next_epoch(seats: Sequence[Seat]) -> int:
    return 1 + max((h.label.epoch for each in seats for h in each.holdings), default=0)


def _fetches(
    seats: Sequence[Seat], offers: Sequence[_Offer], world: int
) -> tuple[dict[int, dict[str, Fetch]], list[tuple[int, str]]]:
    """What each rank takes, and the (rank, unit) for which there is no offer."""
    asked: Counter[int] = Counter()  # how often each rank is asked by others
    fetches: dict[int, dict[str, Fetch]] = {}
    lacking = []
    for seat in sorted(seats, key=lambda each: each.role):
        fetches[seat.role] = {}
        for unit, layout in sorted(seat.needs.items()):
            fitting = [
                each for each in offers if _fits(each.holding.label, seat, unit, layout, world)
            ]
            if not fitting:
                lacking.append((seat.role, unit))
                continue
            best = min(fitting, key=lambda each: _cost(each, seat, asked))
            if best.holder.role != seat.role:
                asked[best.holder.role] += 1
            source = _source(best, seat)
            fetches[seat.role][unit] = Fetch(best.holding.label, best.holder.role, source)
    return fetches, lacking


def _fits(label: Label, seat: Seat, unit: str, layout: str, world: int) -> bool:
    """Whether ``label`` is what ``seat`` needs.

    A rank's own state is that of its number where there are as many ranks as then: whoever sits
    there now. In a world of another size numbers mean something else, and a process goes on with
    what it had.
    """
    if label.unit != unit or (layout and label.layout != layout):
        return False
    if unit == SHARED:
        return label.shard == seat.shard
    return label.role == seat.role if label.world == world else label.seat == seat.seat


def _cost(offer: _Offer, seat: Seat, asked: Mapping[int, int]) -> tuple[Any, ...]:
    """The smallest is taken: without the wire, then from near, then from who is asked least."""
    holder, holding = offer
    elsewhere = holder.role != seat.role
    return (
        elsewhere,
        holding.is_copy,
        holder.domain != seat.domain,
        asked[holder.role] if elsewhere else 0,
        holder.role,
    )


def _source(offer: _Offer, seat: Seat) -> Source:
    if offer.holding.is_copy:
        return Source.PARTNER
    return Source.MEMORY if offer.holder.role == seat.role else Source.REPLICA


def _lacking(lacking: Sequence[tuple[int, str]]) -> str:
    ranks = sorted({role for role, _ in lacking})
    units = sorted({unit for _, unit in lacking})
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if ranks[8:] else "")
    return f"nobody has the {' and '.join(units)} state of rank{'s' * (len(ranks) > 1)} {shown}"


# --- partners -------------------------------------------------------------------------------------


def partners(domains: Sequence[str]) -> list[int | None]:
    """For each rank the one that keeps its copy: in another domain, wherever that is possible.

    Each rank keeps at most one other's. ``None`` where a rank is alone. Ranks of one domain stand
    in a row; each is kept by the one that is as many places further as the largest domain has
    ranks. That is another domain for all, unless one domain has more than half of the ranks.
    """
    count = len(domains)
    if count < 2:
        return [None] * count
    row = sorted(range(count), key=lambda rank: (domains[rank], rank))
    shift = max(Counter(domains).values()) % count or 1
    kept: list[int | None] = [None] * count
    for place, rank in enumerate(row):
        kept[rank] = row[(place + shift) % count]
    return kept


def needs_partner(seats: Sequence[Seat]) -> dict[str, bool]:
    """For each unit, whether a copy adds something: not where each shard is in two domains."""
    found = {}
    for unit in (OWN, SHARED):
        holders = [each for each in seats if unit in each.needs]
        if not holders:
            continue
        found[unit] = unit == OWN or _is_in_one_domain(seats)
    return found


def _is_in_one_domain(seats: Sequence[Seat]) -> bool:
    """Whether the loss of one domain would take all replicas of some shard.

    Where all ranks are in one domain, a domain is a rank.
    """
    alone = len({each.domain for each in seats}) < 2
    places: dict[str, set[object]] = {}
    for each in seats:
        if SHARED in each.needs:
            places.setdefault(each.shard, set()).add(each.role if alone else each.domain)
    return any(len(domains) < 2 for domains in places.values())
