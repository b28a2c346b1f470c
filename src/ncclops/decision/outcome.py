"""How workers end and runs are stopped, in words and as values; the types are of the record."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from datetime import timedelta

from ncclops.process_ends import describe_exit, describe_failure
from ncclops.record.verdict_record import FirstFailure, WorkerEnding

# 128 + number is the shell's way to say "ended by a signal"; SIGINT gives the contract's 130.
SIGNAL_EXIT_BASE = 128


@dataclass(frozen=True, kw_only=True)
class StopRequest:
    """A request to stop. ``grace`` is how long the workers have to end at one point.

    ``signum`` is the signal that requested it; None for `ncclops stop` or another command.
    """

    reason: str
    grace: timedelta
    signum: signal.Signals | None = None


def describe_ending(ending: WorkerEnding | FirstFailure) -> str:
    """How a worker ended, in words, such as ``exited with code 1`` or ``was killed by SIGKILL``."""
    failed = isinstance(ending, FirstFailure) or ending.script_failed
    describe = describe_failure if failed else describe_exit
    return describe(ending.exit_code, ending.signal)
