"""How workers, attempts and runs end, as values; ``verdict.json``."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Literal

from ncclops.classify import wording
from ncclops.goodput import Goodput

Outcome = Literal["completed", "no-receipt", "failed", "interrupted", "stopped"]

# 128 + number is the shell's way to say "ended by a signal"; SIGINT gives the contract's 130.
SIGNAL_EXIT_BASE = 128


@dataclass(frozen=True, kw_only=True)
class StopRequest:
    """One wish to stop. ``grace`` is how long the workers have to come to an end together.

    ``signum`` is the signal that it came as; None where `ncclops stop` or another command asks.
    """

    reason: str
    grace: timedelta
    signum: signal.Signals | None = None


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How one worker ended in the last attempt. Both codes are None if it did not end at all."""

    rank: int
    pid: int
    exit_code: int | None
    signal: str | None
    seconds: float | None
    asked_to_stop: bool = False

    @property
    def ok(self) -> bool:
        return self.exit_code == 0

    def how(self) -> str:
        """In words, such as ``exited with code 1`` or ``was killed by SIGKILL``."""
        return wording.describe_exit(self.exit_code, self.signal)


@dataclass(frozen=True, kw_only=True)
class FirstFailure:
    """The worker that failed first, and what it left to read. ``log`` is a file of ``host``."""

    ending: Ending
    message: str | None
    tail: Sequence[str]
    log: str
    host: str

    def headline(self) -> str:
        """Which rank, how and why, in one line."""
        ending = self.ending
        headline = f"rank {ending.rank} {ending.how()}"
        if ending.seconds is not None:
            headline += f" after {ending.seconds:.1f}s"
        if self.message:
            headline += f": {self.message}"
        elif hint := wording.signal_hint(ending.signal):
            headline += f" ({hint})"
        return headline


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What ``verdict.json`` says."""

    run_id: str
    outcome: Outcome
    exit_code: int
    reason: str
    attempts: int
    seconds: float
    first_failure: FirstFailure | None
    workers: Sequence[Ending]
    classification: dict[str, Any] | None = None  # of ncclops.classify/1, with the decision taken
    receipt: dict[str, Any] | None = None  # ncclops.receipt/1
    goodput: Goodput | None = None

    def to_json(self) -> dict[str, Any]:
        document = asdict(self)
        failure = document.pop("first_failure")
        if failure is not None:
            failure |= failure.pop("ending")
        document["goodput"] = None if self.goodput is None else self.goodput.to_json()
        return {"schema": "ncclops.verdict/1", **document, "first_failure": failure}
