"""Reads a rank's counters from the outside: its progress page, its processes, its GPU."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from ncclops.health.evidence import WARMUP_PHASE, Reading
from ncclops.record import progress
from ncclops.record.paths import RunPaths
from ncclops.record.progress import WARM_AFTER_STEPS, Progress, Warmup


def read_rank(
    run_dir: Path,
    rank: int,
    pid: int,
    *,
    alive: bool | None = None,
    gpu_active: bool | None = None,
    printed_steps: int | None = None,
) -> Reading:
    """One look at the worker ``pid`` of ``rank`` on this node.

    ``alive`` is what the caller knows from the process's pidfd, ``gpu_active`` whether its GPU
    works, ``printed_steps`` how many steps the log shows, for a script that only prints. What a
    worker does not report (another program, or not that far yet) is unknown, not stale.
    """
    reading = Reading(
        rank=rank,
        alive=alive,
        incarnation=pid,
        steps=printed_steps,
        cpu_s=tree_cpu_s(pid),
        gpu_active=gpu_active,
        warming_up=(printed_steps or 0) < WARM_AFTER_STEPS,
    )
    page = progress.read(RunPaths(run_dir).rank(rank).progress)
    return reading if page is None or page.pid != pid else _with_page(reading, page)


def _with_page(reading: Reading, page: Progress) -> Reading:
    enqueued, completed = page.collectives or (None, None)
    phase, began_ns, limit = page.phase, page.phase_began_ns, page.phase_limit
    if phase is None and page.warmup is Warmup.RUNNING:
        phase, began_ns = WARMUP_PHASE, page.warmup_ns
    age = timedelta(microseconds=(time.monotonic_ns() - began_ns) // 1000)
    return replace(
        reading,
        incarnation=(page.pid, page.iteration),
        # No steps yet may mean that the script reports none.
        steps=page.steps or page.updates or reading.steps,
        tick=page.tick_ns,
        main_beat=page.main_ns,
        enqueued=enqueued,
        completed=completed,
        awaited=page.awaited,
        warming_up=(
            reading.warming_up
            and page.warmup is not Warmup.OVER
            and (page.updates < WARM_AFTER_STEPS or page.warmup is Warmup.RUNNING)
        ),
        phase=phase,
        phase_age=None if phase is None else age,
        phase_limit=None if page.phase is None else limit,
        ended=page.ended,
        left=page.left,
        iteration=page.iteration,
    )


def tree_cpu_s(pid: int) -> float | None:
    """CPU seconds that ``pid`` and what it started have used; None if it cannot be seen."""
    import psutil

    try:
        root = psutil.Process(pid)
        tree = [root, *root.children(recursive=True)]
    except psutil.Error:
        return None
    total = 0.0
    for process in tree:
        try:
            used = process.cpu_times()
        except psutil.Error:  # gone meanwhile; its parent has its time once it is reaped
            continue
        total += used.user + used.system + used.children_user + used.children_system
    return total
