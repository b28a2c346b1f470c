"""The wording of failures, for verdicts, events and terminals alike."""

from __future__ import annotations

import signal as signals

from ncclops.classify.model import Classification

_SIGNAL_HINTS = {
    "SIGKILL": "often the out-of-memory killer: look at dmesg and the cgroup's memory.events",
    "SIGSEGV": "a crash in native code",
    "SIGABRT": "a native library gave up, often the NCCL watchdog: look for it in the log",
    "SIGBUS": "often a full /dev/shm",
}


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


def signal_hint(signal: str | None) -> str | None:
    """The most frequent reason why ``signal`` kills a process; None where there is no such."""
    return _SIGNAL_HINTS.get(signal or "")


def describe_loss(name: str, why: str) -> str:
    """The loss of a node, such as ``h1 was lost: its agent has ended``."""
    return f"{name} was lost: {why}"


def loss(what: str) -> Classification:
    """The verdict on an attempt that ended because a node was lost; ``what`` says which, and why.

    No line of any log stands for it, so no signature does.
    """
    return Classification(
        class_="peer-exit",
        confidence=0.9,
        summary=what,
        retry_policy="replace-node",
        retry_reason="a node was lost, and another one may take its place",
        remedy=("look at the host's own log, its network and its scheduler",),
    )
