"""One round of a job on several nodes: what this node knows of it. A new round is a new object."""

from __future__ import annotations

import socket

from ncclops.cluster.records import StopGoRecord, StopPointRecord
from ncclops.cluster.round_state import RoundState
from ncclops.cluster.store_values import NodeFacts
from ncclops.decision.node_end import NodeEnd


class Round:
    """From the rendezvous for attempt ``number`` until the rendezvous for the next one.

    ``state`` is what the shared log says, the same on all nodes; the rest is known here only:
    its ``rank`` once the nodes have met, on node 0 the facts that were ``gathered`` and the
    ``listener`` of the workers' store; ``no_round``: why there is none; ``not_needed``: the job has
    ended without us; ``others_have_begun``: in a round without us; ``end``: how the attempt ended
    here.
    """

    def __init__(self, number: int, most: int) -> None:
        self.number = number
        self.state = RoundState(most)
        self.rank: int | None = None
        self.gathered: list[NodeFacts] | None = None
        self.listener: socket.socket | None = None
        self.no_round: str | None = None
        self.not_needed = False
        self.others_have_begun = False
        self.end: NodeEnd | None = None
        self.is_deciding = False  # our decision is on its way into the log
        self._lost_at: dict[int, float] = {}
        self._failures = 0
        self._stop_posted: tuple[type, int] | None = None

    def meet(self, rank: int, size: int) -> None:
        """The nodes have met, and this one is ``rank`` of ``size``."""
        self.rank, self.state = rank, RoundState(size)

    @property
    def is_over_before_start(self) -> bool:
        """Whether it is known that there will be no start."""
        state = self.state
        if state.refused or state.left_out or state.stop or self.no_round or self.not_needed:
            return True
        # Of a node that is lost while all are checked node 0 says what follows.
        return bool(state.lost if state.check is None else 0 in state.lost)

    @property
    def is_stopped_before_start(self) -> bool:
        """Whether a node was asked to stop the job, and nothing else has kept it from starting."""
        state = self.state
        other = state.refused or state.left_out or self.no_round or self.not_needed
        return state.start is None and state.stop is not None and not other

    def lose(self, node: int, now: float) -> None:
        """``node`` is taken for lost since ``now``."""
        self._lost_at[node] = now

    def lost_for(self, seconds: float, now: float) -> list[int]:
        """The nodes with workers that have been lost for so long, and have not come back."""
        state = self.state
        lost = [node for node in state.lost if node not in state.idle]
        return [node for node in lost if now - self._lost_at[node] >= seconds]

    @property
    def is_ours_to_decide(self) -> bool:
        """Whether this node is the first that is left."""
        return self.rank is not None and self.state.decider() == self.rank

    def is_first_failure(self) -> bool:
        """Whether a worker of this node fails for the first time; to be asked once for each."""
        self._failures += 1
        return self._failures == 1

    def is_new_stop(self, record: StopPointRecord | StopGoRecord) -> bool:
        """Whether we have not posted ``record``, about where to stop, already."""
        this = (type(record), record.number)
        is_new, self._stop_posted = this != self._stop_posted, this
        return is_new
