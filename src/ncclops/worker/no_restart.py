"""No rank starts the script again once the attempt is ending, whatever happens on the way."""

from __future__ import annotations

from ncclops.record.worker_commands import EndingCommand
from ncclops.restart.exception import Escalation, RestartAbort
from ncclops.restart.finalize import Finalize
from ncclops.restart.state import FrozenState
from ncclops.worker import agent_commands


class _Ending:
    """Why the attempt is ending, once the agent has said that it is."""

    reason: str | None = None

    def take(self, command: EndingCommand) -> None:
        self.reason = command.reason


_ending = _Ending()


def watch() -> None:
    """Take the agent's command from now on."""
    agent_commands.on(EndingCommand, _ending.take)


def is_needed() -> bool:
    """Whether the attempt is ending."""
    return _ending.reason is not None


def check() -> None:
    """Raise ``RestartAbort`` if the attempt is ending. Other ranks, which may not know it yet, find
    that in the incident.
    """
    if (why := escalation()) is not None:
        raise RestartAbort(f"no restart: {why.reason}", escalation=why)


def escalation() -> Escalation | None:
    """What a rank leaves with because the attempt is ending; None while it is not."""
    return None if _ending.reason is None else Escalation("stop", _ending.reason)


class NoRestart(Finalize):
    """After a fault this rank leaves if the attempt is ending."""

    def __call__(self, state: FrozenState) -> FrozenState:
        check()
        return state
