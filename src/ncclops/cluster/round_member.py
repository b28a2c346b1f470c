"""One round, as the rendezvous process takes part in it: exchange of facts, log, heartbeats."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection
from datetime import timedelta
from pathlib import Path
from typing import Any

from msgspec import structs

from ncclops.cluster import messages, steady_clock, store_values
from ncclops.cluster.heartbeat import SILENT_AFTER, HeartbeatWatch, Unread, watched_by
from ncclops.cluster.records import (
    BackRecord,
    ByeRecord,
    LostRecord,
    RefusedRecord,
    SilentRecord,
    UnknownRecord,
    WaitingRecord,
)
from ncclops.cluster.rendezvous_link import Link, Refused, first_line
from ncclops.cluster.shared_log import SharedLog, is_lost
from ncclops.cluster.statuses import Statuses
from ncclops.cluster.store_values import NodeFacts, RankClaim

logger = logging.getLogger(__name__)

# Between two reports of which nodes have come.
_LOOK_S = 2.0


class RoundMember:
    """This node as a member of one round, until the next one: facts, the log, heartbeats.

    ``prefix`` is the round's name space in the store, ``rank`` this node's number of ``size``.
    """

    def __init__(self, link: Link, prefix: str, rank: int, size: int) -> None:
        self.prefix, self.rank, self.size = prefix, rank, size
        self.over = threading.Event()
        self._link = link
        self._store = link.connect()
        self.log = SharedLog(self._store, prefix)
        # For the record that our agent has ended. Its own connection, made now: by then making one
        # may take too long (a name server that does not answer), and the others are in use.
        self.final_log = SharedLog(link.connect(), prefix)
        self._nodes_left = set(range(size))

    def begin(self, facts: NodeFacts) -> None:
        """Register this node, and start the threads. Raises ``Refused`` if its rank is taken."""
        link, key = self._link, f"{self.prefix}/node/{self.rank}"
        config = link.config
        mine = RankClaim(
            name=facts.name, pid=config.launcher, at=time.time(), run_dir=config.run_dir
        )
        claimed = self._store.compare_set(key, "", store_values.encode(mine))
        if (owner := store_values.decode(claimed, RankClaim)) != mine:
            who = f" ({owner})" if owner else ""
            raise Refused(
                f"node {self.rank} of job {config.job_id} is there already{who}: give each"
                " node its own --node-rank, and each job in a store its own --rdzv-id"
            )
        self._store.set(self._heartbeat_key(self.rank), "0")
        link.send(messages.Met(self.rank, self.size))
        for work in (self._read, self._beat, self._exchange_statuses):
            threading.Thread(target=self._guarded, args=(work,), daemon=True).start()
        self._exchange(facts)

    # --- facts --------------------------------------------------------------------------------

    def _exchange(self, facts: NodeFacts) -> None:
        """Node 0 gets the facts of all nodes, and each node the offset of its clock.

        Node 0 publishes its time once all nodes wait for it: so the difference between that time
        and a node's own is the offset of the clocks plus one message. Of the clocks as they were
        when the job began: one that is set later is no reason to end it.
        """
        if self.rank == 0:
            self._store.set(self._facts_key(0), store_values.encode(facts))
            self._gather()
            self._store.set(f"{self.prefix}/clock", repr(steady_clock.now()))
            if (gathered := self._all_facts()) is None:
                return
            self._wait_for([self._offset_key(rank) for rank in range(1, self.size)])
            offsets = [0.0, *(self._offset(rank) for rank in range(1, self.size))]
            pairs = zip(gathered, offsets, strict=True)
            self._link.send(
                messages.Gathered(
                    [structs.replace(facts, clock_offset_s=offset) for facts, offset in pairs]
                )
            )
            return
        self._store.set(self._facts_key(self.rank), store_values.encode(facts))
        self._wait_for([f"{self.prefix}/clock"])
        now = steady_clock.now()
        offset = now - float(self._store.get(f"{self.prefix}/clock"))
        self._store.set(self._offset_key(self.rank), f"{offset:.6f}")

    def _gather(self) -> None:
        """Wait until the facts of all nodes are there. Raises ``Refused`` after the time for it."""
        deadline = time.monotonic() + self._link.config.join_s
        missing = list(range(1, self.size))
        reported: list[int] = []
        while missing:
            try:
                self._store.wait([self._facts_key(missing[0])], timedelta(seconds=_LOOK_S))
            except RuntimeError as error:
                if is_lost(error):
                    raise
            missing = [rank for rank in missing if not self._store.check([self._facts_key(rank)])]
            if missing and missing != reported:
                reported = missing
                here = self._names_but(missing)
                self.log.post(WaitingRecord(node=self.rank, missing=missing, here=here))
            if missing and time.monotonic() > deadline:
                raise Refused(self._why_missing(missing))

    def _all_facts(self) -> list[NodeFacts] | None:
        """Of all nodes, by rank; None, and refused for all, where some are of another version."""
        facts = {rank: self._facts(rank) for rank in range(self.size)}
        known = [each for each in facts.values() if each is not None]
        if len(known) == self.size:
            return known
        others = ", ".join(f"node {rank}" for rank, each in facts.items() if each is None)
        line = f"ncclops: node {self.rank} cannot read what it knows of {others}"
        self.log.post(RefusedRecord(node=self.rank, names=["ncclops"], lines=[line]))
        return None

    def _facts(self, rank: int) -> NodeFacts | None:
        return store_values.decode(self._store.get(self._facts_key(rank)), NodeFacts)

    def _offset(self, rank: int) -> float:
        return float(self._store.get(self._offset_key(rank)))

    def _names_but(self, missing: Collection[int]) -> list[str]:
        here = [rank for rank in range(self.size) if rank not in missing]
        known = {rank: self._facts(rank) for rank in here}
        return [facts.name if facts else f"node {rank}" for rank, facts in known.items()]

    def _why_missing(self, missing: list[int]) -> str:
        nodes = f"node{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
        here = " ".join(self._names_but(missing))
        return f"{nodes} did not come within {self._link.config.join_s:.0f}s; here: {here}"

    def _wait_for(self, keys: list[str]) -> None:
        limit_s = self._link.config.join_s
        try:
            if keys:
                self._store.wait(keys, timedelta(seconds=limit_s))
        except RuntimeError as error:
            if is_lost(error):
                raise
            raise Refused(f"the other nodes were not all there within {limit_s:.0f}s") from None

    # --- threads ------------------------------------------------------------------------------

    def _guarded(self, work: Any) -> None:
        try:
            work(self._link.connect())
        except RuntimeError as error:  # torch's store errors are
            if not self.over.is_set():
                self._link.send(messages.StoreLost(first_line(error)))

    def _read(self, store: Any) -> None:
        log, number = SharedLog(store, self.prefix), 0
        limit = timedelta(seconds=self._link.config.beat_s)
        while not self.over.is_set():
            record = log.read(number, limit)
            if record is None:
                continue
            number += 1
            match record:
                case UnknownRecord():
                    logger.warning("record %d of the shared log cannot be read", number - 1)
                    continue
                case LostRecord(node=node) | ByeRecord(node=node):
                    self._nodes_left.discard(node)
                case BackRecord(node=node):
                    self._nodes_left.add(node)
            self._link.send(messages.Logged(record))

    def _beat(self, store: Any) -> None:
        config, count = self._link.config, 0
        watch = HeartbeatWatch(config.beat_s * config.missed_beats)
        log = SharedLog(store, self.prefix)
        silent_after_s = SILENT_AFTER * config.beat_s * config.missed_beats
        agent = Unread(silent_after_s, config.beat_s / 2)
        while not self.over.wait(config.beat_s / 2):  # nothing to wait for: a heartbeat is periodic
            count += 1
            store.set(self._heartbeat_key(self.rank), str(count))
            ranks = watched_by(self.rank, self._nodes_left)
            keys = [self._heartbeat_key(rank) for rank in ranks]
            # A node that has met and sent no heartbeat yet cannot be judged.
            if keys and store.check(keys):
                counts = dict(zip(ranks, map(int, store.multi_get(keys)), strict=True))
                for rank in watch.look(time.monotonic(), counts):
                    why = f"no heartbeat for {config.beat_s * config.missed_beats:g}s"
                    log.post(LostRecord(node=rank, why=why, by=self.rank))
                    self._nodes_left.discard(rank)
            if agent.look(time.monotonic(), self._link.unread()):
                log.post(SilentRecord(node=self.rank, silent=agent.is_silent))
            if not agent.is_silent:  # what it does not read would block this thread in the end
                self._link.send(messages.Tick())

    def _exchange_statuses(self, store: Any) -> None:
        statuses = Statuses(store, self.prefix, self.rank, self._nodes_left.copy)
        statuses.exchange(Path(self._link.config.run_dir), self.over)

    def _heartbeat_key(self, rank: int) -> str:
        return f"{self.prefix}/heartbeat/{rank}"

    def _facts_key(self, rank: int) -> str:
        return f"{self.prefix}/facts/{rank}"

    def _offset_key(self, rank: int) -> str:
        return f"{self.prefix}/offset/{rank}"
