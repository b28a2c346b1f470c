"""A stop at one step for the ranks of all nodes, as one node's agent sees it."""

from __future__ import annotations

from collections.abc import Callable

from ncclops.agent.stop_agreement import ProposedStop, StopWay
from ncclops.cluster.records import Record, StopVoteRecord, StopWayRecord
from ncclops.cluster.round_state import RoundState


class SharedStop:
    """This agent's part in agreeing on a point. ``cluster.stop_vote`` has the protocol.

    ``post`` puts a record into the agents' log; ``is_cut_off`` is true if it cannot be reached.
    """

    def __init__(
        self,
        round_state: RoundState,
        post: Callable[[Record], None],
        is_cut_off: Callable[[], bool],
    ) -> None:
        self._round_state, self._post, self._is_cut_off = round_state, post, is_cut_off

    @property
    def asked(self) -> bool:
        """Whether any node was asked to stop."""
        return self._round_state.stop is not None

    @property
    def by_signals(self) -> bool:
        """Whether the ranks cannot be stopped at one point, as far as is known now."""
        point, failed = self._round_state.stop_point, self._round_state.failed is not None
        return failed or self._is_cut_off() or (point is not None and point.way is StopWay.SIGNAL)

    @property
    def proposal(self) -> ProposedStop | None:
        """The latest proposal."""
        point = self._round_state.stop_point
        return None if point is None else ProposedStop(point.number, point.way, point.point)

    @property
    def agreed(self) -> bool:
        """Whether all ranks end at :attr:`proposal`."""
        return self._round_state.stop_go

    def offer(self, way: StopWay, at: int) -> None:
        """This node's ranks can be stopped in this way, and have come as far as ``at``."""
        self._post(StopWayRecord(way=way, at=at))

    def vote(self, number: int, at: int) -> None:
        """They had come as far as ``at`` after proposal ``number`` was put to them."""
        self._post(StopVoteRecord(number=number, at=at))
