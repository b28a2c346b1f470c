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
    """How likely ``count`` or more events are where ``expected`` are usual (Poisson)."""
    if count > 10 * expected + 50:
        return 0.0
    term = total = math.exp(-expected)
    for number in range(1, count):
        term *= expected / number
        total += term
    return max(0.0, 1.0 - total)
