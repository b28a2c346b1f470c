"""How all ranks come to restore the same moment: told, planned by one, fetched, confirmed.

Keys, below a prefix that each restore has of its own:

===========================  ===================================================================
``have/<rank>``              what a rank has, needs and where it listens
``plan/<attempt>/<rank>``    what the rank shall do, from rank 0 (``_planning.plan``)
``got/<attempt>/<rank>``     what the rank did not get
``go/<attempt>``             from rank 0: what was missing; nothing is: all ranks go on
===========================  ===================================================================

A rank that dies in between is a fault: the restore of the next iteration begins from the start.
Nothing is given up and nothing is loaded before ``go``.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ncclops.restart.snapshot._background import Background
from ncclops.restart.snapshot._blobs import Blob, is_intact
from ncclops.restart.snapshot._errors import PeerError, SnapshotError
from ncclops.restart.snapshot._memory import Memory
from ncclops.restart.snapshot._planning import (
    Fetch,
    Holding,
    Label,
    Moment,
    Plan,
    Seat,
    Source,
    needs_partner,
    partners,
    plan,
)
from ncclops.restart.snapshot._wire import SILENCE_S, Address, Connection

log = logging.getLogger("ncclops.restart")

# Each attempt leaves out what was missing in the one before.
_MOST_ATTEMPTS = 8
# Of the time for a restore, what one fetch may take: a holder that sends a byte now and then must
# leave enough for another plan, without it.
_SHARE_OF_A_FETCH = 0.75
# Of so many ranks the source is told, where it is not the usual one.
_MOST_TOLD = 64


@dataclass(frozen=True)
class Order:
    """What rank 0 has planned for one rank.

    ``fetches`` are by unit, with the address of the holder; ``partner`` keeps this rank's copies
    of ``copied`` units from here on, and has those of ``is_there`` already. ``sources`` tells how
    many ranks take their state from where, ``elsewhere`` which ones do not from their own memory.
    ``every`` is the largest that a rank asks for: with different ones they would not meet.
    ``goes_on``: that of any rank, see ``Told``.
    """

    epoch: int
    moment: Moment | None
    fetches: Mapping[str, tuple[Fetch, Address]]
    partner: tuple[int, Address] | None
    copied: Sequence[str]
    is_there: Sequence[str]
    every: int | None
    interval: int
    sources: Mapping[str, int]
    elsewhere: Mapping[int, str]
    missing: str
    goes_on: bool


@dataclass(frozen=True)
class Told:
    """What one rank tells the others of itself. ``goes_on``: its objects have been trained."""

    seat: Seat
    address: Address
    epoch_floor: int
    every: int | None
    interval: int
    wants_partner: bool
    goes_on: bool


@dataclass(frozen=True)
class Agreed:
    """What a restore has come to: the order of the last attempt, and what was fetched, by unit."""

    order: Order
    blobs: Mapping[str, Blob]


class Agreement:
    """One restore of one rank, in its background thread."""

    def __init__(
        self,
        background: Background,
        memory: Memory,
        prefix: str,
        world: int,
        timeout: timedelta,
    ) -> None:
        self._background = background
        self._memory = memory
        self._prefix = prefix
        self._world = world
        self._timeout = timeout

    def reach(self, told: Told) -> Agreed:
        """Raises ``SnapshotError`` where the ranks come to no agreement, and what the store
        raises."""
        role = told.seat.role
        self._set(f"have/{role}", _told_as_json(told))
        leader = _Leader(self, self._world) if role == 0 else None
        for attempt in range(_MOST_ATTEMPTS):
            if leader is not None:
                leader.publish(attempt)
            order = _order_from_json(self.wait(f"plan/{attempt}/{role}"))
            blobs, failed = self._fetch(order)
            self._set(f"got/{attempt}/{role}", [label.as_json() for label in failed])
            if leader is not None:
                leader.judge(attempt)
            if self.wait(f"go/{attempt}") == []:
                return Agreed(order, blobs)
        raise SnapshotError(f"after {_MOST_ATTEMPTS} attempts some rank still could not fetch")

    def compare(self, role: int, what: str, value: Any) -> list[Any]:
        """What all ranks have found, by rank."""
        self._set(f"{what}/{role}", value)
        if role == 0:
            found = [self.wait(f"{what}/{each}") for each in range(self._world)]
            self.set_many({f"{what}/all": found})
        everything: list[Any] = self.wait(f"{what}/all")
        return everything

    # --- fetching -------------------------------------------------------------------------------

    def _fetch(self, order: Order) -> tuple[dict[str, Blob], list[Label]]:
        """What was got, by unit, and what was not. Of the latter the holder is known."""
        blobs, failed = {}, []
        for unit, (fetch, address) in order.fetches.items():
            try:
                blobs[unit] = self._fetch_one(fetch, address)
            except PeerError as error:
                log.warning("step %d from rank %d: %s", fetch.label.step, fetch.holder, error)
                failed.append(fetch.label)
        return blobs, failed

    def _fetch_one(self, fetch: Fetch, address: Address) -> Blob:
        own = self._memory.find(fetch.label)
        if own is not None:
            if not is_intact(own):
                raise PeerError("what this rank had in memory is damaged")
            return own
        limit_s = _SHARE_OF_A_FETCH * self._timeout.total_seconds()
        connection = Connection.to(address, min(limit_s, SILENCE_S))
        self._background.connections.add(connection)
        late = threading.Timer(limit_s, connection.close)
        late.daemon = True
        late.start()
        try:
            import torch

            return connection.get(fetch.label, lambda n: torch.empty(n, dtype=torch.uint8))
        finally:
            late.cancel()
            self._background.connections.discard(connection)
            connection.close()

    # --- the store ------------------------------------------------------------------------------

    def _set(self, name: str, value: Any) -> None:
        self._background.client.set(f"{self._prefix}/{name}", json.dumps(value))

    def set_many(self, values: Mapping[str, Any]) -> None:
        """Set keys of this restore."""
        self._background.client.set_many(
            {f"{self._prefix}/{name}": json.dumps(value) for name, value in values.items()}
        )

    def wait(self, name: str) -> Any:
        """The value of a key of this restore, once it is there."""
        return json.loads(self._background.wait_for_key(f"{self._prefix}/{name}", self._timeout))


class _Leader:
    """What rank 0 does besides: it plans for all."""

    def __init__(self, agreement: Agreement, world: int) -> None:
        self._agreement = agreement
        self._world = world
        self._excluded: set[tuple[int, Label]] = set()
        self._told: list[Told] = []
        self._plan: Plan | None = None

    def publish(self, attempt: int) -> None:
        """Plan, and tell each rank its part."""
        if not self._told:
            self._told = [
                _told_from_json(self._agreement.wait(f"have/{each}")) for each in range(self._world)
            ]
            _warn_of_different_replicas(self._told)
            _warn_of_different_intervals(self._told)
        began = time.monotonic()
        self._plan = made = plan([each.seat for each in self._told], self._excluded)
        planned = orders(made, self._told)
        log.debug("planned for %d ranks in %.3f s", self._world, time.monotonic() - began)
        self._agreement.set_many(
            {f"plan/{attempt}/{role}": _order_as_json(each) for role, each in enumerate(planned)}
        )

    def judge(self, attempt: int) -> None:
        """Gather what was not got, and tell all ranks whether they go on."""
        assert self._plan is not None
        missing = []
        for role in range(self._world):
            for fields in self._agreement.wait(f"got/{attempt}/{role}"):
                label = Label.from_json(fields)
                holder = self._plan.fetches[role][label.unit].holder
                self._excluded.add((holder, label))
                missing.append([holder, label.step])
        self._agreement.set_many({f"go/{attempt}": missing})


def orders(made: Plan, told: Sequence[Told]) -> list[Order]:
    """What each rank is told to do, by rank, of what was planned from what all have ``told``."""
    seats = [each.seat for each in told]
    chosen = partners([each.domain for each in seats])
    copied = [unit for unit, needed in needs_partner(seats).items() if needed]
    wants = all(each.wants_partner for each in told)
    sources = {role: _source_of_rank(made.fetches.get(role, {})) for role in range(len(told))}
    elsewhere = {
        role: source.value
        for role, source in sources.items()
        if source not in (Source.MEMORY, Source.NOTHING)
    }
    found = []
    for role in range(len(told)):
        keeper = chosen[role] if wants else None
        fetches = made.fetches.get(role, {})
        found.append(
            Order(
                epoch=max(made.epoch, *(each.epoch_floor for each in told)),
                moment=made.moment,
                fetches={u: (f, told[f.holder].address) for u, f in fetches.items()},
                partner=None if keeper is None else (keeper, told[keeper].address),
                copied=copied,
                is_there=[]
                if keeper is None
                else [
                    u
                    for u, f in fetches.items()
                    if Holding(f.label, True) in seats[keeper].holdings
                ],
                every=_every(told),
                interval=max(each.interval for each in told),
                sources=dict(Counter(each.value for each in sources.values())),
                elsewhere=dict(list(elsewhere.items())[:_MOST_TOLD]),
                missing=made.missing,
                goes_on=any(each.goes_on for each in told),
            )
        )
    return found


def _source_of_rank(fetches: Mapping[str, Fetch]) -> Source:
    """The most distant source of a rank's units."""
    order = [Source.MEMORY, Source.REPLICA, Source.PARTNER]
    found = [each.source for each in fetches.values()]
    return max(found, key=order.index) if found else Source.NOTHING


def _every(told: Sequence[Told]) -> int | None:
    return max((each.every for each in told if each.every is not None), default=None)


def _warn_of_different_intervals(told: Sequence[Told]) -> None:
    if len(asked := {each.every for each in told}) > 1:
        differ = ", ".join(sorted(map(str, asked))[:8])
        log.warning("the ranks' every= differ (%s): %s steps for all", differ, _every(told))


def _warn_of_different_replicas(told: Sequence[Told]) -> None:
    """Replicas that have drifted apart are somebody's broken memory or arithmetic."""
    digests: dict[tuple[str, Moment], dict[str, int]] = {}
    for each in told:
        for holding in each.seat.holdings:
            label = holding.label
            if label.unit == "shared":
                known = digests.setdefault((label.shard, label.moment), {})
                known.setdefault(label.digest, label.role)
    for (shard, moment), known in digests.items():
        if len(known) > 1:
            log.warning(
                "replicas of the state%s at step %d are not equal: ranks %s had different ones",
                f" {shard!r}" if shard else "",
                moment.step,
                " and ".join(map(str, sorted(known.values())[:8])),
            )


# --- as JSON --------------------------------------------------------------------------------------


def _told_as_json(told: Told) -> dict[str, Any]:
    fields = dataclasses.asdict(told)
    fields["address"] = list(told.address)
    return fields


def _told_from_json(fields: Mapping[str, Any]) -> Told:
    seat = dict(fields["seat"])
    seat["holdings"] = [
        Holding(Label.from_json(each["label"]), each["is_copy"]) for each in seat["holdings"]
    ]
    return Told(
        **{**fields, "seat": Seat(**seat), "address": Address(*fields["address"])},
    )


def _order_as_json(order: Order) -> dict[str, Any]:
    return {
        **dataclasses.asdict(order),
        "fetches": {
            unit: [fetch.label.as_json(), fetch.holder, fetch.source.value, list(address)]
            for unit, (fetch, address) in order.fetches.items()
        },
        "partner": None if order.partner is None else [order.partner[0], list(order.partner[1])],
        "elsewhere": list(order.elsewhere.items()),
    }


def _order_from_json(fields: Mapping[str, Any]) -> Order:
    partner = fields["partner"]
    return Order(
        **{
            **fields,
            "moment": None if fields["moment"] is None else Moment(*fields["moment"]),
            "fetches": {
                unit: (Fetch(Label.from_json(label), holder, Source(source)), Address(*address))
                for unit, (label, holder, source, address) in fields["fetches"].items()
            },
            "partner": None if partner is None else (partner[0], Address(*partner[1])),
            "elsewhere": dict(fields["elsewhere"]),
        }
    )
