"""Whether this node is fit for another attempt: one that has failed is checked again first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ncclops.agent.in_thread import in_thread
from ncclops.errors import NodeUnfit

# A check gives up each part that does not answer within 15 s, and asks the rest side by side.
LIMIT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Fitness:
    """What a check of this node has come to: ``lines`` are its table, ``refusal`` says in one line
    why the node cannot take part; None if it can."""

    lines: Sequence[str]
    refusal: str | None = None


CheckNode = Callable[[], Fitness]


async def require(
    check: CheckNode, *, say: Callable[[str], None], note: Callable[[str], None]
) -> None:
    """Check this node, which has failed. Raises ``NodeUnfit`` if it is not fit.

    A check that does not end, or fails itself, is no word against the node.
    """
    note("preflight: this node has failed, and is checked before the next attempt")
    try:
        found = await in_thread(check, LIMIT_S)
    except (TimeoutError, OSError) as error:
        say(f"preflight: this node could not be checked: {error}")
        return
    for line in found.lines:
        (say if found.refusal else note)(line)
    if found.refusal:
        raise NodeUnfit(found.refusal)
