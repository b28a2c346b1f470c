"""One round for each snapshot: copied, checked, sent to the partner, reported, complete on all.

A rank begins to write the next snapshot only when the round of the one before is complete on all
ranks: the buffer that it writes to has the one before that, which nobody needs any more. So at any
moment there is a snapshot that all ranks have, their partners included, however far one of them is
behind. Keys of a round, below the prefix of the restore that it follows:

======================  ========================================================================
``round/<n>/costs``     a log: what the snapshot has cost each rank
``round/<n>/count``     how many ranks have reported, or more: a rank whose connection was lost in
                        the addition counts again, so the log says whether all have
``round/<n>/done``      from a rank that was the last: the interval after the next snapshot; from
                        one that cannot complete its own: ``failed``, and no rank takes another
======================  ========================================================================
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from ncclops.restart.snapshot._background import Background, Closed
from ncclops.restart.snapshot._blobs import Blob
from ncclops.restart.snapshot._errors import PeerError, SnapshotError
from ncclops.restart.snapshot._pace import Cost, interval
from ncclops.restart.snapshot._wire import Address, Connection

log = logging.getLogger("ncclops.restart")

_CONNECTS_WITHIN_S = 10.0
# Rounds of an iteration last as long as training does; whoever is late is a fault of its own.
_NEVER = timedelta(days=365)
_FAILED = "failed"


class Partner:
    """The way to the rank that keeps copies for this one. The background thread's."""

    def __init__(self, background: Background, rank: int, address: Address) -> None:
        self.rank = rank
        self._background = background
        self._address = address
        self._connection: Connection | None = None
        self.failure: str | None = None  # of the latest attempt

    def send(self, blobs: Sequence[Blob]) -> None:
        """Have it keep ``blobs``. What fails is logged once, and tried again with the next ones."""
        try:
            if self._connection is None:
                self._connection = Connection.to(self._address, _CONNECTS_WITHIN_S)
                self._background.connections.add(self._connection)
            for blob in blobs:
                self._connection.put(blob)
        except PeerError as error:
            self._give_up(error)
        else:
            self.failure = None

    def _give_up(self, error: PeerError) -> None:
        if self._connection is not None:
            self._background.connections.discard(self._connection)
            self._connection.close()
            self._connection = None
        if self._background.closed:
            raise Closed
        if self.failure is None:
            log.warning(
                "rank %d keeps no copy of this rank's snapshots: %s; until it does, the loss of "
                "this rank costs what no replica has",
                self.rank,
                error,
            )
        self.failure = str(error)


class Round:
    """One snapshot on its way. ``complete``: this rank's copies are; ``ended``: those of all."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.complete = threading.Event()
        self.complete_at = 0.0
        self.ended = threading.Event()
        self.interval = 0  # after the next snapshot; once it has ended
        self.cost: queue.SimpleQueue[Cost] = queue.SimpleQueue()
        self.is_reported = False  # whether the main thread has handed over its cost


class Rounds:
    """Carries out the rounds of one iteration, in its background thread."""

    def __init__(
        self,
        background: Background,
        prefix: str,
        role: int,
        world: int,
        partner: Partner | None,
        decide: Callable[[Sequence[Cost]], int],
        aborted: Callable[[], bool],
    ) -> None:
        self._background = background
        self._prefix = prefix
        self._role = role
        self._world = world
        self.partner = partner
        self._decide = decide
        self._aborted = aborted

    def run(self, each: Round, blobs: Sequence[Blob], sent: Sequence[Blob]) -> None:
        """Complete ``blobs``, have the partner keep ``sent``, and report."""
        try:
            self._run(each, blobs, sent)
        except Closed:
            raise
        except Exception:
            # The others would wait for this rank in their next ``take``, and it for them in a
            # collective until that is a hang.
            self.give_up(each.number)
            raise

    def give_up(self, number: int) -> None:
        """Tell the others that this rank does not complete its own."""
        with contextlib.suppress(Exception):
            self._background.client.set(f"{self._prefix}/round/{number}/done", _FAILED)

    def _run(self, each: Round, blobs: Sequence[Blob], sent: Sequence[Blob]) -> None:
        for blob in blobs:
            for event in blob.waits_for:
                event.synchronize()
            with self._background.changing_snapshots():
                self._finish_copying(blob)
            blob.seal()
        if self.partner is not None and sent:
            self.partner.send(sent)
        each.complete_at = time.monotonic()
        each.complete.set()
        cost = self._background.next_of(each.cost)
        each.interval = self._report(each.number, cost)
        each.ended.set()

    def _finish_copying(self, blob: Blob) -> None:
        """The device has done it.

        An abort of NCCL's groups ends collectives without an error, and what the device has been
        given after them goes on with numbers that were never summed. So what was not complete when
        an abort began is not taken.
        """
        if self._aborted():
            raise Closed
        blob.waits_for.clear()
        blob.is_copied = True

    def _report(self, number: int, cost: Cost) -> int:
        client, key = self._background.client, f"{self._prefix}/round/{number}"
        client.append(
            f"{key}/costs", json.dumps([self._role, cost.step_s, cost.cost_s, cost.busy_s])
        )
        if client.add(f"{key}/count", 1, repeatable=True) >= self._world:
            lines = map(json.loads, client.read_log(f"{key}/costs"))
            costs = {role: Cost(*rest) for role, *rest in lines}
            if len(costs) == self._world:
                client.set(f"{key}/done", str(self._decide(list(costs.values()))))
                self._clear_up(number - 2)
        done = self._background.wait_for_key(f"{key}/done", _NEVER)
        if done == _FAILED:
            raise SnapshotError("a rank could not complete its own")
        return int(done)

    def _clear_up(self, number: int) -> None:
        """Everybody has read what was told in this round."""
        if number < 0:
            return
        for name in ("costs", "count", "done"):
            try:
                self._background.client.delete(f"{self._prefix}/round/{number}/{name}")
            except (RuntimeError, NotImplementedError):
                return  # some stores delete nothing


def decided_by(every: int | None, budget: float, before: int) -> Callable[[Sequence[Cost]], int]:
    """How the interval comes about: it is given, or follows from measured costs.

    ``before`` is what holds as long as nothing was measured.
    """
    if every is not None:
        return lambda _: every
    return lambda costs: interval(costs, budget, before)
