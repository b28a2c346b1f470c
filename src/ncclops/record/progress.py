"""How far a rank has come, in shared memory, so that it survives a SIGKILL of the rank.

Every field is one aligned 64-bit number, so that no reader sees half of one. Times are nanoseconds
of CLOCK_MONOTONIC, which all processes of a machine share; 0 means "never".
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from pathlib import Path

from ncclops.record import shared_page
from ncclops.record.paths import RunPaths

_MAGIC = 0x3154_5049_4543_4552  # "RECEIPT1"
_NAME_AT = 256  # the phase's name starts at this byte
_NAME_BYTES = 128
# No rank counts so far. What is larger was written over the page; a stop page holds twice a step.
_MOST_STEPS = 1 << 60


class Warmup(IntEnum):
    """Where a rank stands with compile warm-up."""

    NOT_BEGUN = 0
    RUNNING = 1
    OVER = 2


# Positions of the numbers in the page. STEP holds the number of the last step that ended plus one.
MAGIC, PID, ITERATION, STEP, STEP_NS, STEPS, TICK_NS = range(7)
WARMUP, WARMUP_NS, PHASE_BEGAN_NS, PHASE_LIMIT_NS, ENDED_NS, STARTED_NS = range(7, 13)
UPDATES, STOP_CALLBACKS, ENQUEUED, COMPLETED, MAIN_NS = range(13, 18)
RESTART_BEGAN_NS, RESTART_LIMIT_NS, LEFT_NS, AWAITED, WAIT, UPDATES_BEFORE = range(18, 24)


# A script that does not say when it has warmed up has done so when its second step ends: the first
# contains the compile.
WARM_AFTER_STEPS = 2
# A step that lasts so many times as long as usual may be none any more, but a hang.
UNUSUAL_STEPS = 10.0
# The phase of a rank that waits for input from a person (``--attach-stdin``).
INPUT_PHASE = "input"
# The phase of a rank from the abort of its groups until it enters the script again.
RESTART_PHASE = "restart in place"


@dataclass(frozen=True, kw_only=True)
class Progress:
    """One look at a rank's page. Times are as in the module.

    ``step`` is the number of the last step, None before the first; ``steps`` how many there were
    in this iteration, and ``updates`` how often an optimizer has updated in it, after
    ``updates_before`` in earlier ones of this process.
    ``stop_callbacks`` is how many the script has registered for a requested stop,
    ``collectives`` how many were enqueued and completed, ``awaited`` the rank that a message waits
    for (``receipts.collectives``). ``wait`` is the number of the wait in the kernel that the main
    thread is in, within a call that waits for peers; 0: none is known. ``main_ns`` is when the main
    thread was last known to execute Python, None where nothing looks. ``left``: the main thread is
    out of the script, which the ranks are about to run again.
    """

    pid: int
    iteration: int
    step: int | None
    steps: int
    started_ns: int
    step_ns: int
    tick_ns: int
    main_ns: int | None
    warmup: Warmup
    warmup_ns: int
    phase: str | None
    phase_began_ns: int
    phase_limit: timedelta
    ended: bool
    left: bool
    updates: int
    updates_before: int
    stop_callbacks: int
    collectives: tuple[int, int | None] | None
    awaited: int | None
    wait: int


class ProgressPage:
    """The writing side, for one rank. ``numbers`` is for the recorder's fast path."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self.numbers = memoryview(memory)[:_NAME_AT].cast("q")
        self.numbers[MAGIC] = _MAGIC

    @classmethod
    def create(cls, path: Path) -> ProgressPage:
        """A page behind ``path``; where none can be made, one that no other process sees."""
        try:
            return cls(shared_page.create(path))
        except OSError:
            return cls(mmap.mmap(-1, shared_page.SIZE_BYTES))

    def set_phase(self, name: str | None, began_ns: int, limit_ns: int) -> None:
        """Declare the phase that the rank is in, or with None that it is in none."""
        text = (name or "").encode(errors="replace")[: _NAME_BYTES - 1]
        self.numbers[PHASE_BEGAN_NS] = 0  # no reader pairs the new name with the old times
        self._memory[_NAME_AT : _NAME_AT + _NAME_BYTES] = text.ljust(_NAME_BYTES, b"\0")
        self.numbers[PHASE_LIMIT_NS] = limit_ns
        self.numbers[PHASE_BEGAN_NS] = began_ns


def read(path: Path) -> Progress | None:
    """What the rank's page says now; None if there is none (yet).

    The page is memory that the rank writes: whatever is in it, this raises nothing.
    """
    content = shared_page.read(path)
    if content is None:
        return None
    numbers = memoryview(content)[:_NAME_AT].cast("q")
    if numbers[MAGIC] != _MAGIC:
        return None
    text = content[_NAME_AT : _NAME_AT + _NAME_BYTES].split(b"\0", 1)[0].decode(errors="replace")
    name, began_ns, limit_ns = text, numbers[PHASE_BEGAN_NS], numbers[PHASE_LIMIT_NS]
    if numbers[RESTART_BEGAN_NS]:  # whatever it was in when the fault came
        name = RESTART_PHASE
        began_ns, limit_ns = numbers[RESTART_BEGAN_NS], numbers[RESTART_LIMIT_NS]
    return Progress(
        pid=numbers[PID],
        iteration=numbers[ITERATION],
        step=_count(numbers[STEP]) - 1 if _count(numbers[STEP]) else None,
        steps=numbers[STEPS],
        started_ns=numbers[STARTED_NS],
        step_ns=numbers[STEP_NS],
        tick_ns=numbers[TICK_NS],
        main_ns=numbers[MAIN_NS] or None,
        warmup=_warmup(numbers[WARMUP]),
        warmup_ns=numbers[WARMUP_NS],
        phase=name if began_ns > 0 else None,
        phase_began_ns=began_ns,
        phase_limit=timedelta(microseconds=limit_ns // 1000),
        ended=numbers[ENDED_NS] > 0,
        left=numbers[LEFT_NS] > 0,
        updates=_count(numbers[UPDATES]),
        updates_before=_count(numbers[UPDATES_BEFORE]),
        stop_callbacks=numbers[STOP_CALLBACKS],
        collectives=_collectives(numbers[ENQUEUED], numbers[COMPLETED]),
        awaited=numbers[AWAITED] - 1 if numbers[AWAITED] > 0 else None,
        wait=numbers[WAIT],
    )


def highest_step(paths: RunPaths) -> int | None:
    """The highest step that a rank of this host is at, as far as any reports its steps."""
    pages = (read(paths.rank(each).progress) for each in paths.rank_numbers())
    return max((page.step for page in pages if page and page.step is not None), default=None)


def _warmup(number: int) -> Warmup:
    return Warmup(number) if number in tuple(Warmup) else Warmup.NOT_BEGUN


def _count(number: int) -> int:
    return number if abs(number) <= _MOST_STEPS else 0


def _collectives(enqueued: int, completed: int) -> tuple[int, int | None] | None:
    # Each number is one more than it says, so that 0 is "not known".
    if not enqueued:
        return None
    return enqueued - 1, completed - 1 if completed else None
