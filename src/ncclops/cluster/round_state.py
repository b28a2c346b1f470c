"""The state of a round, computed from the records of the shared log. Pure.

All agents read the same records in the same order, so all compute the same state. One of them,
the first that is left, decides what comes next, and its decision is a record like any other: if
it is lost on the way, the next one decides, and the first decision in the log holds.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ncclops.cluster.records import (
    AtWorkRecord,
    BackRecord,
    ByeRecord,
    CheckRecord,
    DecisionRecord,
    EndedRecord,
    FailedRecord,
    FaultRecord,
    LeftOutRecord,
    LimitsRecord,
    LostRecord,
    PacesRecord,
    Record,
    RefusedRecord,
    SilentRecord,
    StartRecord,
    StopGoRecord,
    StopPointRecord,
    StopRecord,
    StopVoteRecord,
    StopWayRecord,
    ViewRecord,
    WaitingRecord,
)
from ncclops.decision.deciding import AttemptDecision
from ncclops.decision.node_end import NodeEnd
from ncclops.decision.outcome import StopRequest
from ncclops.health.liveness import NodeView
from ncclops.health.paces import RankPace


@dataclass
class RoundState:
    """Which of ``size`` nodes are left, how they ended, and what was decided.

    ``failed`` is the first failure that ends the attempt everywhere, ``stop`` the first request
    to end the job (what follows from it: ``stop_vote``). ``names`` are the nodes' names by rank,
    once they are checked or the start was given.
    """

    size: int
    idle: frozenset[int] = frozenset()  # nodes without workers in this attempt
    names: list[str] = field(default_factory=list)
    start: StartRecord | None = None
    refused: RefusedRecord | None = None
    check: CheckRecord | None = None
    left_out: LeftOutRecord | None = None
    failed: FailedRecord | None = None
    stop: StopRecord | None = None
    stop_ways: dict[int, StopWayRecord] = field(default_factory=dict)
    stop_point: StopPointRecord | None = None
    stop_votes: dict[int, int] = field(default_factory=dict)  # on this point
    stop_go: bool = False
    decision: AttemptDecision | None = None
    views: dict[int, NodeView] = field(default_factory=dict)  # of their ranks, by node
    paces: dict[int, dict[int, RankPace]] = field(default_factory=dict)  # by node and rank
    ended: dict[int, NodeEnd] = field(default_factory=dict)
    lost: dict[int, LostRecord] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)
    silent: set[int] = field(default_factory=set)  # nodes whose agents do not answer
    without_work: set[int] = field(default_factory=set)  # nodes whose ranks are all to return

    def take(self, record: Record) -> bool:
        """Take ``record`` in; whether it is news: the first of its kind where only that counts."""
        node = record.node
        match record:
            case StartRecord() if self.start is None:
                self.start = record
            case RefusedRecord() if self.refused is None:
                self.refused = record
            case CheckRecord() if self.check is None:
                self.check, self.names = record, record.names
            case LeftOutRecord() if self.left_out is None:
                self.left_out = record
            case FailedRecord() if self.failed is None:
                self.failed = record
            case StopRecord() if self.stop is None:
                self.stop = record
            case DecisionRecord() if self.decision is None:
                self.decision = record.decision
            case StopWayRecord():
                self.stop_ways[node] = record
            case StopPointRecord() if self._is_later(record):
                self.stop_point = record
                self.stop_votes.clear()
            case StopVoteRecord():
                if self._is_present(record):
                    self.stop_votes[node] = record.at
            case StopGoRecord():
                self.stop_go = self.stop_go or self._is_present(record)
            case ViewRecord():
                self.views[node] = record.view
            case PacesRecord():
                known = self.paces.setdefault(node, {})
                known.update({pace.rank: pace for pace in record.paces})
            case EndedRecord():
                self.ended[node] = record.end
                self.lost.pop(node, None)  # it was only late
            case LostRecord() if node not in self.lost and node not in self.left:
                self.lost[node] = record
            case BackRecord() if node in self.lost:
                del self.lost[node]
            case AtWorkRecord(at_work=at_work):
                (self.without_work.discard if at_work else self.without_work.add)(node)
            case SilentRecord(silent=silent):
                (self.silent.add if silent else self.silent.discard)(node)
            case ByeRecord():
                self.left.add(node)
            case WaitingRecord() | FaultRecord() | LimitsRecord():
                pass
            case _:  # not the first one, or none that this version knows
                return False
        return True

    def _is_later(self, record: StopPointRecord) -> bool:
        """It is not where two nodes have decided, one after the other."""
        return self.stop_point is None or record.number > self.stop_point.number

    def _is_present(self, record: StopVoteRecord | StopGoRecord) -> bool:
        return self.stop_point is not None and record.number == self.stop_point.number

    @property
    def living(self) -> list[int]:
        """Nodes that are neither lost nor gone, in the order in which they decide."""
        return [rank for rank in range(self.size) if rank not in self.lost]

    def decider(self) -> int | None:
        """The node that decides what comes next; None when none is left.

        A node that was asked to stop leaves without waiting for a decision, and one whose agent
        does not answer makes none.
        """
        others = self.left | self.silent
        return next((rank for rank in self.living if rank not in others), None)

    def all_ended(self) -> bool:
        """Whether every living node that has workers is done with the attempt, as far as its agent
        answers.
        """
        return not self.not_ended() - self.silent

    def not_ended(self) -> set[int]:
        """The living nodes that have workers and are not done with the attempt."""
        return set(self.living) - set(self.ended) - self.idle

    def works(self, rank: int) -> bool:
        """Whether ranks of the node work, as far as its records tell."""
        done = rank in self.ended or rank in self.left or rank in self.without_work
        return rank in self.living and rank not in self.idle and not done

    def all_left(self) -> bool:
        """Whether no node needs the store any more."""
        return all(rank in self.left for rank in self.living)

    def name(self, rank: int) -> str:
        """The node's name, or its number where no name is known."""
        return self.names[rank] if rank < len(self.names) else f"node {rank}"

    def node_ends(self) -> list[NodeEnd]:
        """How the attempt ended on each node of the round, as far as its records tell."""
        return [self._node_end(rank) for rank in range(self.size)]

    def _node_end(self, rank: int) -> NodeEnd:
        name, idle, lost = self.name(rank), rank in self.idle, self.lost.get(rank)
        first = self.failed is not None and self.failed.node == rank
        stop = self._stop_asked_of(rank)
        if (end := self.ended.get(rank)) is not None:
            asked = self.stop is not None and self.stop.node == rank
            return replace(
                end,
                name=name,
                idle=idle,
                failed_first=first,
                stop=end.stop or stop,
                stopping=end.stopping or asked,  # maybe only after it had posted its end
            )
        why = None if lost is None else lost.why
        if rank in self.silent:
            why = why or "its agent does not answer"
        return NodeEnd(name=name, idle=idle, failed_first=first, lost=why, stop=stop)

    def _stop_asked_of(self, rank: int) -> StopRequest | None:
        """The request to stop that this node got and that has ended others: it may have ended by
        itself before, or be lost since."""
        if self.stop is None or self.stop.node != rank:
            return None
        has_ended_others = any(end.stopped_elsewhere for end in self.ended.values())
        return self.stop.request if has_ended_others else None
