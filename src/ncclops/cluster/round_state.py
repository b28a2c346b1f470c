"""The state of a round, computed from the records of the shared log. Pure.

All agents read the same records in the same order, so all compute the same state. One of them,
the first that is left, decides what comes next, and its decision is a record like any other: if
it is lost on the way, the next one decides, and the first decision in the log holds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ncclops.cluster.shared_log import Record


@dataclass
class RoundState:
    """Which of ``size`` nodes are left, how they ended, and what was decided.

    ``failed`` is the first failure that ends the attempt everywhere, ``stop`` the first request
    to end the job (what follows from it: ``stop_vote``). ``names`` are the nodes' names by rank,
    once the start was given.
    """

    size: int
    idle: frozenset[int] = frozenset()  # nodes without workers in this attempt
    names: list[str] = field(default_factory=list)
    start: Record | None = None
    refused: Record | None = None
    failed: Record | None = None
    stop: Record | None = None
    stop_ways: dict[int, Record] = field(default_factory=dict)
    stop_point: Record | None = None
    stop_votes: dict[int, int] = field(default_factory=dict)  # on this point
    stop_go: bool = False
    decision: Record | None = None
    ended: dict[int, Record] = field(default_factory=dict)
    lost: dict[int, Record] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)

    def take(self, record: Record) -> bool:
        """Take ``record`` in; whether it changed anything."""
        kind, node = record["kind"], int(record.get("node", -1))
        match kind:
            case "start" | "refused" | "failed" | "stop" | "decision":
                if getattr(self, kind) is not None:
                    return False
                setattr(self, kind, record)
            case "stop-way":
                self.stop_ways[node] = record
            case "stop-point":
                if self.stop_point is not None and record["round"] <= self.stop_point["round"]:
                    return False  # two have decided, one after the other
                self.stop_point = record
                self.stop_votes.clear()
            case "stop-vote" if self._is_present(record):
                self.stop_votes[node] = record["at"]
            case "stop-go" if self._is_present(record):
                self.stop_go = True
            case "ended":
                self.ended[node] = record
                self.lost.pop(node, None)  # it was only late
            case "lost":
                if node in self.lost or node in self.left:
                    return False
                self.lost[node] = record
            case "back":
                return self.lost.pop(node, None) is not None
            case "bye":
                self.left.add(node)
            case _:
                return True
        return True

    def _is_present(self, record: Record) -> bool:
        return self.stop_point is not None and record["round"] == self.stop_point["round"]

    @property
    def living(self) -> list[int]:
        """Nodes that are neither lost nor gone, in the order in which they decide."""
        return [rank for rank in range(self.size) if rank not in self.lost]

    def decider(self) -> int | None:
        """The node that decides what comes next; None when none is left.

        A node that was asked to stop leaves without waiting for a decision.
        """
        return next((rank for rank in self.living if rank not in self.left), None)

    def all_ended(self) -> bool:
        """Whether every living node that has workers is done with the attempt."""
        return all(rank in self.ended or rank in self.idle for rank in self.living)

    def all_left(self) -> bool:
        """Whether no node needs the store any more."""
        return all(rank in self.left for rank in self.living)

    def name(self, rank: int) -> str:
        """The node's name, or its number where no name is known."""
        return self.names[rank] if rank < len(self.names) else f"node {rank}"
