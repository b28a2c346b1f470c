"""What was counted over a time, against how often it may happen. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

# Below this probability chance does not explain what was counted: one false conviction in a
# hundred thousand looks at a port that is exactly at its limit.
_CHANCE = 1e-5


def over(grown: Mapping[str, int], limits: Mapping[str, float], seconds: float) -> list[str]:
    """What has grown faster than its limit, where chance does not explain it."""
    if seconds <= 0:
        return []
    return [
        f"{name} +{grown[name]} ({grown[name] / seconds:.3g}/s)"
        for name, most in limits.items()
        if grown.get(name, 0) > most * seconds and _by_chance(grown[name], most * seconds) < _CHANCE
    ]


def _by_chance(count: int, expected: float) -> float:
    """How likely ``count`` events are at most, where fewer (``expected``) are usual.

    Chernoff's bound for a Poisson distribution, which no number of events is too large for.
    """
    return math.exp(count - expected - count * math.log(count / expected))
