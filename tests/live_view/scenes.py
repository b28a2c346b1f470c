"""Runs to look at: a status of so many ranks, and an hour that has had a fault."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from ncclops.live_view.composing import Scene
from ncclops.live_view.history import History, Past
from ncclops.live_view.view import View
from ncclops.record.events import (
    BootstrappedEvent,
    CompileWarmupEvent,
    FaultEvent,
    RestartEvent,
    RunStartedEvent,
    StepEvent,
    WorkerStartedEvent,
)
from ncclops.status.model import (
    FaultStatus,
    LastEvent,
    RankStatus,
    RunStatus,
    StragglerStatus,
)

NOW = 1_800_000_000.0


def rank(number: int, **fields: Any) -> RankStatus:
    usual: dict[str, Any] = {
        "host": f"n{number // 8:03}",
        "phase": "training",
        "step": 1412,
        "step_s": 0.412,
        "step_ratio": 1.0,
        "step_age_s": 0.2,
        "memory_gib": 6.1,
        "gpu_memory_gib": 71.3,
        "iteration": 1,
        "last_event": LastEvent(ts=NOW - 541, event="restart", text="RuntimeError: CUDA error"),
    }
    return RankStatus(rank=number, **(usual | fields))


def status(ranks: int | Sequence[RankStatus], **fields: Any) -> RunStatus:
    """A run that trains."""
    each = tuple(map(rank, range(ranks))) if isinstance(ranks, int) else tuple(ranks)
    usual: dict[str, Any] = {
        "run_id": "20261121-104412-5f0c2e",
        "run_dir": "/runs/x",
        "phase": "training",
        "as_of": NOW,
        "started": NOW - 4000,
        "seconds": 4000.0,
        "profile": "single-node-h200",
        "world_size": len(each),
        "nodes": tuple(dict.fromkeys(one.host for one in each)),
        "restarts": 1,
        "step": 1412,
        "median_step_s": 0.412,
        "goodput": {"ratio": 0.884},
    }
    return RunStatus(ranks=each, **(usual | fields))


@cache
def with_trouble(ranks: int) -> RunStatus:
    """Rank 3 is slow, one in the middle silent, and the last one has failed."""
    changed = [rank(number) for number in range(ranks)]
    changed[3] = replace(changed[3], step_ratio=1.07, step_s=0.44)
    changed[ranks // 2 + 1] = replace(changed[ranks // 2 + 1], step_age_s=45.2, step=1399)
    changed[-1] = replace(changed[-1], phase="failed", step_age_s=None, memory_gib=None)
    return status(
        changed,
        stragglers=(StragglerStatus(rank=3, ratio=1.07, kind="chronic"),),
        faults={"cuda-error": 2},
        last_fault=FaultStatus(
            ts=NOW - 541, rank=5, kind="exception", cause="RuntimeError: CUDA error: illegal access"
        ),
    )


def past(lasted_s: float = 4000.0) -> Past:
    """Steps, and ten minutes before now a fault on rank 5."""
    began, history = NOW - lasted_s, History()
    for event in (
        RunStartedEvent(ts=began, run_id="x", world_size=8),
        WorkerStartedEvent(ts=began + 1, rank=0, pid=1),
        BootstrappedEvent(ts=began + 8, rank=0),
        *(CompileWarmupEvent(ts=began + 100 + each, rank=each, seconds=60.0) for each in range(4)),
        StepEvent(ts=began + 110, rank=0, step=10, step_s=0.4),
        StepEvent(ts=NOW - 601, rank=0, step=1000, step_s=0.4),
        FaultEvent(ts=NOW - 600, rank=5, cause="RuntimeError: illegal access", kind="exception"),
        RestartEvent(ts=NOW - 599, iteration=1, phases_ms={"abort": 104.0}, world_size=8),
        StepEvent(ts=NOW - 590, rank=0, step=900, step_s=0.4),
        StepEvent(ts=NOW - 500, rank=0, step=1100, step_s=0.4),
        StepEvent(ts=NOW - 5, rank=0, step=2300, step_s=0.4),
    ):
        history.take(event)
    return history.until(NOW)


def scene(seen: RunStatus, **fields: Any) -> Scene:
    usual: dict[str, Any] = {"past": past(), "view": View()}
    return Scene(status=seen, **(usual | fields))
