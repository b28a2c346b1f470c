"""Restart a distributed function in the same processes when a rank fails.

``from ncclops import restart as inprocess`` serves code written for NVIDIA's in-process wrapper.
torch is imported with the first use of a name below; importing the package itself is light,
which the guardian processes rely on.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ncclops.restart.compose import Compose
    from ncclops.restart.incident import Incident
    from ncclops.restart.state import FrozenState, Mode, State
    from ncclops.restart.wrap import CallWrapper, Wrapper

__all__ = ["CallWrapper", "Compose", "FrozenState", "Incident", "Mode", "State", "Wrapper"]

_HOMES = {
    "CallWrapper": "wrap",
    "Compose": "compose",
    "FrozenState": "state",
    "Incident": "incident",
    "Mode": "state",
    "State": "state",
    "Wrapper": "wrap",
}

_SUBMODULES = {
    "abort",
    "attribution",
    "completion",
    "compose",
    "exception",
    "finalize",
    "health_check",
    "incident",
    "initialize",
    "monitor_process",
    "monitor_thread",
    "nested_restarter",
    "param_utils",
    "progress_watchdog",
    "rank_assignment",
    "rank_filter",
    "sibling_monitor",
    "snapshots",
    "state",
    "store",
    "terminate",
    "utils",
    "wrap",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_SUBMODULES})
