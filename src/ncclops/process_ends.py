"""How a process has ended, in words. Standard library only."""

from __future__ import annotations

import signal as signals


def signal_name(number: int) -> str:
    """``SIGKILL`` and so on; real-time signals have numbers only."""
    try:
        return signals.Signals(number).name
    except ValueError:
        return f"signal {number}"


def describe_exit(code: int | None, signal: str | None) -> str:
    """Such as ``exited with code 1`` or ``was killed by SIGKILL``; neither: it did not end."""
    if signal:
        return f"was killed by {signal}"
    return "did not end" if code is None else f"exited with code {code}"


def describe_failure(code: int | None, signal: str | None) -> str:
    """The same of a worker that has failed, however it ended."""
    before = " before its script had ended well" if code == 0 else ""
    return describe_exit(code, signal) + before


def exit_status(code: int | None, signal: str | None) -> str:
    """Such as ``exit code 1`` or ``SIGKILL``."""
    return f"exit code {code}" if signal is None else signal
