"""How an agent agrees with the agents of other nodes on one step after which all ranks end."""

from __future__ import annotations

from typing import Any, Protocol

# The way of a job that cannot be stopped at one step: each agent signals its workers.
SIGNAL = "signal"
# The way of a node whose ranks wait as spares: they end when all others have.
RESERVE = "reserve"


class StopAgreement(Protocol):
    """One agent's part in agreeing with the others on a common step."""

    @property
    def asked(self) -> bool:
        """Whether a stop was requested on any node."""

    @property
    def by_signals(self) -> bool:
        """Whether the ranks cannot be stopped at one point, as far as is known now."""

    @property
    def point(self) -> dict[str, Any] | None:
        """The latest proposal: ``round``, and the ``point`` in ticks of the clock ``way``."""

    @property
    def agreed(self) -> bool:
        """Whether all ranks end at :attr:`point`."""

    def offer(self, way: str, at: int) -> None:
        """This node's ranks can be stopped in this way, and have come as far as ``at``."""

    def vote(self, number: int, at: int) -> None:
        """They had come as far as ``at`` after proposal ``number`` was put to them."""
