"""The ranks of a process group meet over its store before its backend is made, within a deadline.

A backend that waits for a rank names a key of the store, or nothing. Here each rank says that it
has come, and who has not is named, with its host and what it is doing.

Keys are below ``ncclops/meeting/<group>/<number of ranks>``:

    next             the number of the first meeting that may not be over
    <n>/came/<i>     the i-th rank has come to the n-th meeting
    <n>/count        how many have
    <n>/over         nobody waits any more: ``complete`` or ``late``, whichever is written first
    <n>/late         how many ranks have waited too long; the first of them finds the ...
    <n>/absent       ... ranks that have not come, as JSON
    <n>/asked/<k>    one rank of node k finds out what those of its node are doing, ...
    <n>/places/<k>   ... and tells it, as JSON

As long as all come, a rank sends five requests, whatever the number of ranks is, and the last one
three more. Who comes when the others have given up waits in the next meeting for them to come
again. What a rank knows of earlier meetings is in the store alone: groups are made again under the
same name, in other stores and with ranks that have not been in them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from ncclops.host_name import host_name
from ncclops.rank_lists import rank_list
from ncclops.record.variables import ACTIVE_RANKS, NODES, RUN_DIR
from ncclops.restart.exception import PeersAbsent

# Of ranks that have not come, the most whose number is told, and the most whose place is.
_NUMBERS, _PLACES = 16, 4
# For what others have to write once a rank has waited too long.
_TOLD_WITHIN = timedelta(seconds=20)


class AbsentRanksError(PeersAbsent):
    """Ranks of a process group did not come to its making in time; the message names them."""


@dataclass(frozen=True)
class Team:
    """The ranks of a job of which none is lost: ``size`` of them, ``nproc`` on each node.

    ``hosts`` are the nodes' names, ``node`` is this rank's, ``rank`` its number.
    """

    rank: int
    size: int
    nproc: int
    node: int
    hosts: tuple[str, ...]
    run: Path | None

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Team:
        run = environ.get(RUN_DIR)
        return cls(
            rank=int(environ.get("RANK", "0")),
            size=int(environ.get(ACTIVE_RANKS) or environ.get("WORLD_SIZE", "1")),
            nproc=int(environ.get("LOCAL_WORLD_SIZE", "1")),
            node=int(environ.get("GROUP_RANK", "0")),
            hosts=tuple(environ.get(NODES, "").split()) or (host_name(),),
            run=None if run is None else Path(run),
        )

    def node_of(self, rank: int) -> int:
        """The number of the node that ``rank`` is on."""
        return rank // self.nproc

    def host_of(self, rank: int) -> str:
        """The name of that node, as far as it is known."""
        node = self.node_of(rank)
        return self.hosts[node] if node < len(self.hosts) else f"node {node}"


@dataclass(frozen=True)
class Meeting:
    """Of ``ranks``, by their numbers in the job, of which this one is the ``own``-th.

    ``group`` names the group among those that use ``store``, and ``what`` says what the ranks come
    to. ``team`` None: the numbers do not say which rank of the job has them.
    """

    store: Any
    group: str
    what: str
    ranks: Sequence[int]
    own: int
    team: Team | None

    def wait(self, limit: timedelta) -> None:
        """Until all ranks have come. Raises ``AbsentRanksError`` after ``limit``."""
        began = time.monotonic()
        number = self.store.add(f"{self._base}/next", 0)
        while self.own in (absent := self._absent_from(number, limit)):  # it was over before
            number += 1
        if absent:
            text = self._describe(f"{self._base}/{number}", absent, time.monotonic() - began)
            known = [] if self.team is None else [self.ranks[i] for i in absent]
            raise AbsentRanksError(text, known[:_NUMBERS])

    @property
    def _base(self) -> str:
        return f"ncclops/meeting/{self.group}/{len(self.ranks)}"

    def _absent_from(self, number: int, limit: timedelta) -> list[int]:
        """Come to a meeting. The ranks that have not come, by their places in the group, once it
        is over; none: all have.
        """
        store, here = self.store, f"{self._base}/{number}"
        store.set(f"{here}/came/{self.own}", "")
        if store.add(f"{here}/count", 1) == len(self.ranks):
            self._end(number, "complete")
        elif not _is_there(store, f"{here}/over", limit):
            if store.add(f"{here}/late", 1) == 1 and (absent := self._find_absent(here)):
                store.set(f"{here}/absent", json.dumps(absent))
                self._end(number, "late")
            if not _is_there(store, f"{here}/over", _TOLD_WITHIN):
                return self._find_absent(here)
        if store.get(f"{here}/over") == b"complete":
            return []
        found: list[int] = json.loads(store.get(f"{here}/absent"))
        return found

    def _end(self, number: int, how: str) -> None:
        over = f"{self._base}/{number}/over"
        # First, so that nobody who has seen the end comes to this meeting again.
        self.store.compare_set(f"{self._base}/next", str(number), str(number + 1))
        # Once more, as the server of torch 2.5 wakes nobody for the former.
        self.store.set(over, self.store.compare_set(over, "", how))

    def _find_absent(self, here: str) -> list[int]:
        return [i for i in range(len(self.ranks)) if not self.store.check([f"{here}/came/{i}"])]

    def _describe(self, here: str, absent: Sequence[int], waited_s: float) -> str:
        numbers = [self.ranks[i] for i in absent]
        more = f" and {len(numbers) - _NUMBERS} more" if len(numbers) > _NUMBERS else ""
        text = (
            f"waited {waited_s:.0f} s for rank{'s' * (len(numbers) > 1)}"
            f" {rank_list(numbers[:_NUMBERS])}{more} of {len(self.ranks)}, which had not come to"
            f" {self.what}"
        )
        if self.team is None:
            return text
        named = numbers[:_PLACES]
        present = {self.team.node_of(rank) for rank in set(self.ranks) - set(numbers)}
        places = self._ask(here, named, present)
        told = [f"rank {r} on {self.team.host_of(r)}{places.get(r, '')}" for r in named]
        return f"{text}: {'; '.join(told)}"

    def _ask(self, here: str, named: Sequence[int], present: set[int]) -> dict[int, str]:
        """What ``named`` are doing, as ranks on their nodes see it, of which some are here."""
        team, found = self.team, dict[int, str]()
        assert team is not None
        for node in sorted({team.node_of(rank) for rank in named} & present):
            key = f"{here}/places/{node}"
            if node == team.node and self.store.add(f"{here}/asked/{node}", 1) == 1:
                of_node = [rank for rank in named if team.node_of(rank) == node]
                self.store.set(key, json.dumps(_places(team.run, of_node)))
            if _is_there(self.store, key, _TOLD_WITHIN):
                found |= {int(rank): text for rank, text in json.loads(self.store.get(key)).items()}
        return found


def _is_there(store: Any, key: str, limit: timedelta) -> bool:
    """Whether ``key`` is there within ``limit``; raises what a store does that is lost."""
    began = time.monotonic()
    try:
        store.wait([key], limit)
    except RuntimeError:
        if time.monotonic() - began < 0.9 * limit.total_seconds():
            raise
        return False
    return True


def _places(run: Path | None, ranks: Iterable[int]) -> dict[int, str]:
    """What ``ranks`` of this node are doing, as the end of a sentence."""
    from ncclops.capture.run_snapshots import describe_place

    return {} if run is None else {rank: describe_place(run, rank) for rank in ranks}
