"""What the run's record says around an incident: what was decided, and how workers ended."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ncclops.classify import wording


@dataclass(frozen=True)
class Decision:
    """What followed an incident, and why."""

    what: str
    why: str


@dataclass(frozen=True)
class WorkerEnd:
    """How a worker's process ended: with exit ``code``, or killed by ``signal`` (its name)."""

    code: int | None
    signal: str | None

    def __str__(self) -> str:
        return wording.exit_status(self.code, self.signal)


def read_events(run: Path) -> list[dict[str, Any]]:
    """The events of the run; none without a record, and no line that is not whole."""
    events = []
    try:
        with (run / "events.jsonl").open("rb") as file:
            for line in file:
                try:
                    event = json.loads(line)
                except ValueError:
                    continue
                if isinstance(event, dict):
                    events.append(event)
    except OSError:
        return []
    return events


def worker_end(events: list[dict[str, Any]], rank: int, not_before: float) -> WorkerEnd | None:
    """How the worker of ``rank`` ended after that time; None without a record of it."""
    for event in events:
        if (
            event.get("event") == "worker-exited"
            and event.get("rank") == rank
            and event["ts"] >= not_before
        ):
            code, signal = event.get("exit_code"), event.get("signal")
            if code is None and signal is None:
                return None
            return WorkerEnd(None if code is None else int(code), signal and str(signal))
    return None


def decision_on(
    incident: Mapping[str, Any], events: list[dict[str, Any]], until: float = math.inf
) -> Decision:
    """What was decided on the incident: a restart in place, another attempt, or the end.

    ``until`` is when the next fault was, in seconds since the epoch.
    """
    at = incident["at"] - 1  # clocks of several nodes
    following = [event for event in events if event.get("ts", 0) >= at]
    for number, event in enumerate(following):
        if event.get("event") == "escalation" and event["ts"] < until:
            return _escalated(event, following[number + 1 :])
    for event in following:
        name = event.get("event")
        in_place = incident.get("rank_before") is not None  # or the agent's own
        if name == "restart" and in_place and event.get("iteration") == incident["iteration"] + 1:
            return _restarted(incident)
        if name == "retry":
            return Decision(
                f"a new attempt (number {event.get('attempt')})", _text(event, "reason")
            )
        if name == "verdict":
            return Decision(f"the run ended: {event.get('outcome')}", _text(event, "reason"))
    if incident.get("rank") is not None:
        return _restarted(incident)
    return Decision("nothing is on record", "the run has not come to a decision yet")


def _escalated(escalation: Mapping[str, Any], following: list[dict[str, Any]]) -> Decision:
    """Restarts in place were given up, for new processes or for good."""
    why = _text(escalation, "reason")
    for event in following:
        name = event.get("event")
        if name == "retry":
            return Decision(
                f"no further restart in place, but new processes (attempt {event.get('attempt')})",
                why,
            )
        if name == "escalation":
            why = _text(event, "reason")  # the agent's: it has no attempt left
        if name == "verdict":
            return Decision(f"the run ended: {event.get('outcome')}", why)
    to = "new processes" if escalation.get("to") == "respawn" else "the end of the run"
    return Decision(f"no further restart in place, but {to}", why)


def _restarted(incident: Mapping[str, Any]) -> Decision:
    lost = incident.get("ranks_lost") or []
    went_on, before = incident.get("world_size"), incident.get("world_size_before")
    if not lost:
        return Decision(
            f"restarted in place, on all {went_on} ranks", "every rank was healthy and came back"
        )
    ranks = ", ".join(map(str, lost))
    return Decision(
        f"restarted in place, on {went_on} of {before} ranks",
        f"rank{'s' if len(lost) > 1 else ''} {ranks} cannot come back, and the others are healthy",
    )


def _text(event: Mapping[str, Any], key: str) -> str:
    return str(event.get(key) or "")
