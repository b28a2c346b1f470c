"""From counters that are read periodically to how long each has not changed, for each rank.

Pure: times and readings are arguments (``probes`` takes the readings).
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum

# Below this share of one core a process tree counts as idle: NCCL's watchdog and our own writer
# use some CPU in a process that is stuck, too.
IDLE_CPU_SHARE = 0.05
# The kernel counts CPU time in ticks of 10 ms: over less than this, a single one is a large share.
_CPU_STRETCH_S = 1.0
_STEPS_REMEMBERED = 8
# What a declared compile warm-up is called, for which the limit is that of the run.
WARMUP_PHASE = "compile warm-up"


class Kind(StrEnum):
    """The independent kinds of evidence that a rank runs. Values are their names in messages."""

    STEP = "step counter"
    INTERPRETER = "interpreter progress"
    MAIN_THREAD = "main thread"
    COLLECTIVE = "collective counters"
    CPU = "CPU time"
    GPU = "GPU activity"
    PHASE = "declared phase"


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One look at a rank. None stands for "not known" throughout, and is no evidence of anything.

    ``steps`` counts steps, ``tick`` changes while the interpreter runs, ``main_beat`` while the
    main thread executes Python, ``enqueued`` and ``completed`` count collectives, ``awaited`` is
    the rank that its oldest pending operation waits for, a message, ``cpu_s`` is CPU time of the
    process tree. ``incarnation`` changes with each start and iteration of the worker. ``ended``:
    the script is over on the rank, which waits for the others to come as far. ``left``: the rank is
    out of the script, and is to run it again as ``iteration`` + 1.
    """

    rank: int
    alive: bool | None = None
    incarnation: object = None
    steps: int | None = None
    tick: int | None = None
    main_beat: int | None = None
    enqueued: int | None = None
    completed: int | None = None
    awaited: int | None = None
    cpu_s: float | None = None
    gpu_active: bool | None = None
    warming_up: bool = False
    phase: str | None = None
    phase_age: timedelta | None = None
    phase_limit: timedelta | None = None
    ended: bool = False
    left: bool = False
    iteration: int | None = None


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What is known of a rank at one time: for each kind, how long ago it last changed.

    A kind that is missing from ``ages`` is not known. ``in_collective`` is None where the
    counters are not; ``step_time`` is the median of the last steps.
    """

    rank: int
    alive: bool | None = None
    ages: Mapping[Kind, timedelta] = field(default_factory=dict)
    in_collective: bool | None = None
    collectives: int | None = None
    awaited: int | None = None
    warming_up: bool = False
    phase: str | None = None
    phase_age: timedelta | None = None
    phase_limit: timedelta | None = None
    step_time: timedelta | None = None


class Tracker:
    """When each kind of evidence of one rank last changed."""

    def __init__(self) -> None:
        self._incarnation: object = None
        self._known: dict[Kind, _Known] = {}
        self._step_times: deque[float] = deque(maxlen=_STEPS_REMEMBERED)

    def add(self, reading: Reading, now: float) -> Sample:
        """Take a reading at ``now``, in seconds of any one clock. At first all count as moved."""
        if reading.incarnation != self._incarnation:
            self._incarnation = reading.incarnation
            self._known.clear()
            self._step_times.clear()
        self._note_step_time(reading, now)
        values = _values(reading)
        for kind, value in values.items():
            known = self._known.get(kind)
            if known and kind is Kind.CPU and now - known.at < _CPU_STRETCH_S:
                continue  # too soon to judge; the interval goes on
            if known is None or _has_moved(kind, known, value, now):
                self._known[kind] = _Known(value, now, moved=now)
            else:
                self._known[kind] = _Known(value, now, moved=known.moved)
        # What this look could not read is not known now, however long it has been silent.
        return self._sample(reading, {kind: self._known[kind].moved for kind in values}, now)

    def _note_step_time(self, reading: Reading, now: float) -> None:
        known = self._known.get(Kind.STEP)
        if known is None or reading.steps is None:
            return
        steps = reading.steps - int(known.value)
        if steps > 0:
            self._step_times.append((now - known.moved) / steps)

    def _sample(self, reading: Reading, moved: Mapping[Kind, float], now: float) -> Sample:
        times = self._step_times
        return Sample(
            rank=reading.rank,
            alive=reading.alive,
            ages={kind: timedelta(seconds=now - at) for kind, at in moved.items()},
            in_collective=_in_collective(reading),
            collectives=reading.enqueued,
            awaited=reading.awaited,
            warming_up=reading.warming_up,
            phase=reading.phase,
            phase_age=reading.phase_age,
            phase_limit=reading.phase_limit,
            step_time=timedelta(seconds=statistics.median(times)) if times else None,
        )


@dataclass(frozen=True)
class _Known:
    value: float
    at: float
    moved: float


def _in_collective(reading: Reading) -> bool | None:
    if reading.enqueued is None or reading.completed is None:
        return None
    return reading.enqueued > reading.completed


def _values(reading: Reading) -> dict[Kind, float]:
    """What can be read, as numbers of which only changes matter."""
    collectives = None
    if reading.enqueued is not None or reading.completed is not None:
        collectives = (reading.enqueued or 0) + (reading.completed or 0)
    values = {
        Kind.STEP: reading.steps,
        Kind.INTERPRETER: reading.tick,
        Kind.MAIN_THREAD: reading.main_beat,
        Kind.COLLECTIVE: collectives,
        Kind.CPU: reading.cpu_s,
        Kind.GPU: reading.gpu_active,
    }
    return {kind: value for kind, value in values.items() if value is not None}


def _has_moved(kind: Kind, known: _Known, value: float, now: float) -> bool:
    if kind is Kind.CPU:
        return value - known.value > IDLE_CPU_SHARE * (now - known.at)
    if kind is Kind.GPU:
        return bool(value)
    return value != known.value
