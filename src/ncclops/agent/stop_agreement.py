"""How an agent agrees with the agents of other nodes on one step after which all ranks end."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol


class StopWay(Enum):
    """How the ranks of a node can be stopped; the value is its name between nodes."""

    STEPS = "steps"  # after a step that the script reports
    UPDATES = "updates"  # after an update of an optimizer
    SIGNAL = "signal"  # not at one point: each agent signals its workers
    RESERVE = "reserve"  # they wait as spares, and end when all others have


@dataclass(frozen=True)
class ProposedStop:
    """Proposal ``number``: all ranks hold from ``point`` on, in ticks of the clock ``way``."""

    number: int
    way: StopWay
    point: int


class StopAgreement(Protocol):
    """One agent's part in agreeing with the others on a common step."""

    @property
    def asked(self) -> bool:
        """Whether a stop was requested on any node."""

    @property
    def by_signals(self) -> bool:
        """Whether the ranks cannot be stopped at one point, as far as is known now."""

    @property
    def proposal(self) -> ProposedStop | None:
        """The latest proposal."""

    @property
    def agreed(self) -> bool:
        """Whether all ranks end at :attr:`proposal`."""

    def offer(self, way: StopWay, at: int) -> None:
        """This node's ranks can be stopped in this way, and have come as far as ``at``."""

    def vote(self, number: int, at: int) -> None:
        """They had come as far as ``at`` after proposal ``number`` was put to them."""
