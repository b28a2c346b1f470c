"""What of this process code that is imported may change, and a fork hands on.

A worker that is started afresh begins with the agent's, and has what its script's own imports
change from then on.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

_LIMITS = [name for name in dir(resource) if name.startswith("RLIMIT_")]


def current_directory() -> str | None:
    """As a string, to compare and to go back to; ``None`` if it has been removed."""
    try:
        return os.getcwd()  # noqa: PTH109
    except OSError:
        return None


def _umask() -> int:
    os.umask(mask := os.umask(0o077))
    return mask


def _says(what: str) -> Any:
    return field(metadata={"what": what})


@dataclass(frozen=True)
class ProcessState:
    """What the kernel, and Python, keep for the whole process; look at it with :meth:`now`."""

    directory: str | None = _says("the current directory")
    umask: int = _says("the umask")
    handlers: Mapping[int, Any] = _says("the handling of signals")
    blocked: frozenset[int] = _says("the signals that are blocked")
    limits: Mapping[str, tuple[int, int]] = _says("the limits on resources")

    @classmethod
    def now(cls) -> ProcessState:
        """That of this process. For the main thread of a process that has no other."""
        return cls(
            directory=current_directory(),
            umask=_umask(),
            handlers={number: signal.getsignal(number) for number in signal.valid_signals()},
            blocked=frozenset(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
            limits={name: resource.getrlimit(getattr(resource, name)) for name in _LIMITS},
        )

    def changed(self, before: ProcessState) -> list[str]:
        """What is not as ``before``, in words."""
        return [
            each.metadata["what"]
            for each in fields(self)
            if getattr(self, each.name) != getattr(before, each.name)
        ]


def changed_variables(before: Mapping[str, str]) -> dict[str, tuple[str | None, str | None]]:
    """The environment variables that are not as ``before``: what they were, and are."""
    names = {*before, *os.environ}
    both = {name: (before.get(name), os.environ.get(name)) for name in names}
    return {name: (was, is_now) for name, (was, is_now) in both.items() if was != is_now}


def change_variables(changes: Mapping[str, tuple[str | None, str | None]]) -> None:
    """Make ``changes`` in this process, of variables that are what they were there before."""
    for name, (was, is_now) in changes.items():
        if os.environ.get(name) != was:
            continue
        if is_now is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = is_now
