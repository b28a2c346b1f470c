"""The wording of failures, for verdicts, events and terminals alike."""

from __future__ import annotations

from ncclops.classify.model import Classification

_SIGNAL_HINTS = {
    "SIGKILL": "often the out-of-memory killer: look at dmesg and the cgroup's memory.events",
    "SIGSEGV": "a crash in native code",
    "SIGABRT": "a native library gave up, often the NCCL watchdog: look for it in the log",
    "SIGBUS": "often a full /dev/shm",
}


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


# What ranks die of once their store has gone: its line, its consequences, or nothing that is known.
STORE_MISSED = ("store-rendezvous", "peer-exit", "unknown")


def store_loss(what: str) -> Classification:
    """The verdict on an attempt whose store server ended before its ranks; ``what`` says how.

    Nothing is wrong with the configuration: the next attempt has a store of its own.
    """
    return Classification(
        class_="store-rendezvous",
        confidence=0.9,
        summary=what,
        retry_policy="retry-after-cooldown",
        retry_reason="its store server ended, and the next attempt has another one",
        remedy=(
            "where it was killed: look at dmesg and the cgroup's memory.events on its node",
            "start the job again: it goes on from its last checkpoint",
        ),
    )
