"""What workers tell, taken over into the team and the run's ``events.jsonl``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ncclops.agent.team import Team
from ncclops.decision.retrying import Escalated
from ncclops.record.run_directory import RunDirectory

Record = Mapping[str, Any]


def _entered(team: Team, rank: int, _: Record) -> None:
    team.entered.add(rank)


def _ready_to_end(team: Team, rank: int, _: Record) -> None:
    team.ready_to_end.add(rank)
    team.release()


def _bootstrapped(team: Team, rank: int, _: Record) -> None:
    team.bootstrapped.add(rank)


def _aborted(team: Team, rank: int, _: Record) -> None:
    team.aborted.add(rank)


def _fault(team: Team, rank: int, _: Record) -> None:
    team.last_faulty = rank


def _escalation(team: Team, _: int, record: Record) -> None:
    team.escalation = Escalated.of(record)


# What an event means for the team, and which ones the record of the run takes over. Others are
# not ours: scripts may write to the directory too. Warm-up is known from receipts and printed
# lines alike (``watching``).
_EFFECTS: Mapping[str, Callable[[Team, int, Record], None]] = {
    "entered": _entered,
    "ready-to-end": _ready_to_end,
    "bootstrapped": _bootstrapped,
    "groups-aborted": _aborted,
    "fault": _fault,
    "escalation": _escalation,
}
_COPIED = frozenset(
    {"bootstrapped", "fault", "restart", "escalation"}
    | {"group-timeout", "resource-growth", "own-wrapper"}
)
_OWN_FIELDS = ("event", "rank", "of_rank", "node")


def take_over(run: RunDirectory, team: Team, rank: int, record: Record) -> None:
    """Act on one line of a worker's ``worker.jsonl``."""
    event = str(record.get("event"))
    if event == "escalation" and team.escalation is not None:
        return  # all ranks say it; once is enough
    rank = record.get("of_rank", rank)  # told for one that is dead
    if effect := _EFFECTS.get(event):
        effect(team, rank, record)
    if event in _COPIED:
        fields = {name: value for name, value in record.items() if name not in _OWN_FIELDS}
        run.event(event, rank=rank, **fields)
