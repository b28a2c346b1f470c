"""What limits a worker is given: timeouts and budgets, one JSON object in NCCLOPS_LIMITS."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict

from ncclops.profiles.model import Growth, Restarts
from ncclops.record.variables import LIMITS
from ncclops.timeouts.model import Timeouts


def to_variable(timeouts: Timeouts, growth: Growth, restarts: Restarts) -> str:
    """The value of ``NCCLOPS_LIMITS``."""
    return json.dumps(
        {"timeouts": timeouts.to_json(), "growth": asdict(growth), "restarts": asdict(restarts)}
    )


def from_environ(environ: Mapping[str, str]) -> tuple[Timeouts, Growth, Restarts] | None:
    """The agent's value in ``environ``; None outside of a run."""
    text = environ.get(LIMITS)
    if text is None:
        return None
    document = json.loads(text)
    return (
        Timeouts.from_json(document["timeouts"]),
        Growth(**document["growth"]),
        Restarts(**document["restarts"]),
    )
