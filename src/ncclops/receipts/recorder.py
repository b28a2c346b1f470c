"""The worker's side: where ``ncclops.receipt`` calls end up, and where the worker entry hooks in.

There is one recorder a process, found with :func:`current`. Outside ``ncclops launch``, in
processes that a worker forks or spawns (data loaders), and where the run directory cannot be
written, it is a silent one whose methods do nothing.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import math
import os
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, SupportsFloat

from ncclops.receipts.memory import Peak, peak_memory
from ncclops.receipts.silent import (
    IterationListener,
    LastMoved,
    PhaseListener,
    Silent,
    StepListener,
    StopCallback,
    UpdateListener,
    WarmupBeginListener,
    WarmupListener,
)
from ncclops.receipts.writer import Writer
from ncclops.record import progress
from ncclops.record.paths import RunPaths
from ncclops.record.progress import ProgressPage, Warmup
from ncclops.record.regular_file import append_regular
from ncclops.record.stop_point import Clock, StopPage
from ncclops.record.variables import RUN_DIR
from ncclops.whole_numbers import whole_number


class Recorder(Silent):
    """Records of one rank. Called from the thread that trains; only the writer does I/O."""

    active = True

    # The agent's clock, too. Kept, as a script may put another one in the module.
    _now_ns = staticmethod(time.monotonic_ns)

    # Of one iteration; see _forget_iteration.
    _mark_ns: int | None  # when the step under way began, as far as known
    _phase_s: float  # in declared phases since the last step

    def __init__(self, run_dir: Path, rank: int, fd: int) -> None:
        self._page = ProgressPage.create(RunPaths(run_dir).rank(rank).progress)
        self._page_path = RunPaths(run_dir).rank(rank).progress
        self._numbers = self._page.numbers
        self._stop = StopPage.attach(run_dir)
        self._stop_updates = None if self._stop is None else self._stop.by(Clock.UPDATES)
        self._barrier = threading.RLock()  # a signal handler may report a step too
        self._writer = Writer(fd, self._tick)
        self._rank = rank
        self._iteration = 0
        self._last_moved: LastMoved | None = None
        self._highest_step: int | None = None
        self._has_stopped = False
        self._busy_s: float | None = None
        self._step_listeners: list[StepListener] = []
        self._update_listeners: list[UpdateListener] = []
        self._warmup_begin_listeners: list[WarmupBeginListener] = []
        self._warmup_listeners: list[WarmupListener] = []
        self._phase_listeners: list[PhaseListener] = []
        self._iteration_listeners: list[IterationListener] = []
        self._numbers[progress.PID] = os.getpid()
        self._numbers[progress.STARTED_NS] = self._now_ns()
        self._tick()
        self._forget_iteration()
        self._writer.start()
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
        known = whole_number(attempt)
        self._put("start", pid=os.getpid(), rank=rank, attempt=known)

    # --- what the script reports --------------------------------------------------------------

    def begin_warmup(self) -> None:
        """Compile warm-up begins."""
        self._warm = False
        self._warming = True
        self._set_warmup(Warmup.RUNNING)
        self._put("warmup-begin")
        for listener in self._warmup_begin_listeners:
            listener()

    def end_warmup(self, taken: timedelta | None, *, completed: bool = True) -> None:
        """Compile warm-up is over after ``taken``; not ``completed`` means by an exception."""
        self._warming = False
        if not completed:
            self._set_warmup(Warmup.NOT_BEGUN)
            self._put("warmup-failed")
            return
        seconds = None if taken is None else round(taken.total_seconds(), 6)
        self._put("compile-warmup", seconds=seconds)
        self._mark_ns = self._now_ns()
        self._be_warm(taken)

    def step(
        self,
        n: int,
        tokens: float | None,
        loss: SupportsFloat | None,
        busy: timedelta | None,
        *,
        ends: bool = True,
    ) -> bool:
        """Step ``n`` has ended. Ends the process (SystemExit) where a stop was agreed upon.

        Without ``ends`` it returns whether one was, and the caller ends the process by ``stop``.
        """
        now = self._now_ns()
        numbers = self._numbers
        try:
            n = int(n)
            numbers[progress.STEP] = n + 1
        except (TypeError, ValueError, OverflowError):
            what = repr(n)[:80]
            raise ValueError(f"receipt.step(n): n is the number of a step, not {what}") from None
        self._steps += 1
        numbers[progress.STEP_NS] = now
        numbers[progress.STEPS] = self._steps
        if self._highest_step is None or n > self._highest_step:
            self._highest_step = n
        record: dict[str, Any] = {
            "ts": time.time(),
            "kind": "step",
            "iteration": self._iteration,
            "step": n,
        }
        if self._mark_ns is not None:
            record["seconds"] = (now - self._mark_ns) / 1e9
        self._mark_ns = now
        if self._steps == 1:
            record["first"] = True  # since the start or restart: it contains the compile
        if tokens is not None:
            record["tokens"] = _number(tokens, "tokens")
        if loss is not None:
            record["loss"] = _jsonable(_number(loss, "loss"))
        if busy is not None:
            if not isinstance(busy, timedelta):
                raise TypeError(f"receipt.step(busy): give a datetime.timedelta, not {busy!r}")
            record["busy_s"] = busy.total_seconds()
        self._busy_s = record.get("busy_s")
        if self._phase_s or self._phases:
            record["phase_s"] = self._phase_s
            self._phase_s = 0.0
        self._writer.put(record)
        for listener in self._step_listeners:
            listener(n)
        if not self._warm and not self._warming and self._steps >= progress.WARM_AFTER_STEPS:
            self._be_warm(None)
        if self._stop is None or not self._ends_here(self._stop, n):
            return False
        self._put("stop", step=n)
        if ends:
            self.stop()
        return True

    def update(self) -> None:
        """An optimizer has updated: the clock of a stop where a script reports no steps."""
        self._numbers[progress.UPDATES] += 1
        for listener in self._update_listeners:
            listener()
        if self._stop_updates is not None:
            updates = self._numbers[progress.UPDATES]
            if self._ends_here(self._stop_updates, updates):
                self._put("stop", update=updates)
                self.stop()

    def begin_phase(self, name: str, limit: timedelta) -> None:
        """The rank is busy with ``name`` and may be without a step for up to ``limit``."""
        self._phases.append((name, self._now_ns(), int(limit.total_seconds() * 1e9)))
        self._page.set_phase(*self._phases[-1])
        self._put("phase-begin", phase=name, limit_s=limit.total_seconds())
        for listener in self._phase_listeners:
            listener(limit)

    def end_phase(self) -> None:
        """The phase begun last is over; the one around it, if any, holds again."""
        if not self._phases:  # begun in an iteration that is over
            return
        name, began_ns, _ = self._phases.pop()
        seconds = (self._now_ns() - began_ns) / 1e9
        if not self._phases:  # what lies within another phase is counted with that one
            self._phase_s += seconds
        self._page.set_phase(*(self._phases[-1] if self._phases else (None, 0, 0)))
        self._put("phase-end", phase=name, seconds=round(seconds, 6))
        for listener in self._phase_listeners:
            listener(None)

    def peak_memory(self) -> Peak:
        """Record the peak memory of this process so far."""
        peak = peak_memory()
        self._memory_known = True
        self._put("peak-memory", gib=round(peak.gib, 4), source=peak.source)
        return peak

    def end(self) -> None:
        """Training is complete. Records peak memory too, where the script has not."""
        self._end("completed")

    def on_stop(self, callback: StopCallback) -> None:
        """Call ``callback`` when a requested stop takes effect; of this iteration's only."""
        self._stop_callbacks.append(callback)
        self._numbers[progress.STOP_CALLBACKS] = len(self._stop_callbacks)

    # --- what the worker entry uses -----------------------------------------------------------

    def begin_iteration(self, iteration: int) -> None:
        """The script is about to run again in this process; ``iteration`` counts from 0."""
        self._iteration = iteration
        self._numbers[progress.ITERATION] = iteration
        self._numbers[progress.ENDED_NS] = 0
        self._numbers[progress.LEFT_NS] = 0
        self._numbers[progress.STEPS] = 0
        self._numbers[progress.UPDATES_BEFORE] += self._numbers[progress.UPDATES]
        self._numbers[progress.UPDATES] = 0
        self._forget_iteration()
        self._put("iteration")
        for listener in self._iteration_listeners:
            listener()

    def begin_restart(self, limit: timedelta) -> None:
        """The rank leaves the script to run it again, in at most ``limit``. From any thread."""
        self._numbers[progress.RESTART_LIMIT_NS] = int(limit.total_seconds() * 1e9)
        self._numbers[progress.RESTART_BEGAN_NS] = self._now_ns()

    def note_left(self) -> None:
        """The main thread is out of the script, which it is to run again with the others."""
        self._numbers[progress.LEFT_NS] = self._now_ns()

    def on_step(self, listener: StepListener) -> None:
        """Call ``listener(n)`` within every step, in the thread that trains."""
        self._step_listeners.append(listener)

    def on_update(self, listener: UpdateListener) -> None:
        """Call ``listener()`` within every update of an optimizer, in the thread that trains."""
        self._update_listeners.append(listener)

    def on_warmup_begin(self, listener: WarmupBeginListener) -> None:
        """Call ``listener()`` when the script reports a warm-up, in the thread that trains."""
        self._warmup_begin_listeners.append(listener)

    def on_phase(self, listener: PhaseListener) -> None:
        """Call ``listener(limit)`` when the script declares a phase, and with None at its end."""
        self._phase_listeners.append(listener)

    def on_iteration(self, listener: IterationListener) -> None:
        """Call ``listener()`` when the script is about to run again in this process."""
        self._iteration_listeners.append(listener)

    def on_warmup_end(self, listener: WarmupListener) -> None:
        """Call ``listener(taken)`` when warm-up is over, in the thread that trains.

        Once per iteration, and again when the script warms up again. ``taken`` is None where the
        script does not report its warm-up: then it counts as over with the second step.
        """
        self._warmup_listeners.append(listener)

    def leave(self) -> None:
        """The script is over on this rank, which may wait for others now: it is not watched."""
        self._numbers[progress.ENDED_NS] = self._now_ns()

    def note_collectives(
        self, counted: tuple[int, int | None] | None, awaited: int | None = None, wait: int = 0
    ) -> None:
        """How many were enqueued and completed, who is awaited, and in which wait in the kernel the
        main thread is meanwhile, 0 for none; see ``collectives``."""
        enqueued, completed = counted or (-1, None)
        self._numbers[progress.COMPLETED] = 0 if completed is None else completed + 1
        self._numbers[progress.ENQUEUED] = enqueued + 1
        self._numbers[progress.AWAITED] = 0 if awaited is None else awaited + 1
        self._numbers[progress.WAIT] = wait

    def note_pace(self, fields: dict[str, Any]) -> None:
        """How much this rank waits for others; see ``pace``."""
        self._writer.put(
            {"ts": time.time(), "kind": "pace", "iteration": self._iteration, **fields}
        )

    @property
    def busy_s(self) -> float | None:
        """What the script has said of its last step."""
        return self._busy_s

    def follow_main_thread(self, last_moved: LastMoved | None) -> None:
        """Note at each heartbeat when the main thread has ``last_moved``, by the monotonic clock in
        seconds; None: nothing looks any more.
        """
        self._last_moved = last_moved
        if last_moved is None:
            self._numbers[progress.MAIN_NS] = 0

    @property
    def has_stopped(self) -> bool:
        """Whether this rank has done its part of a stop at an agreed point."""
        return self._has_stopped

    @property
    def highest_step(self) -> int | None:
        """The highest number of a step that ended in this process, over all iterations."""
        return self._highest_step

    def flush(self) -> bool:
        """Wait until all records are in the file; False if that takes longer than seconds."""
        return self._writer.flush()

    def close(self) -> None:
        """Write what is left and keep the last progress in the run directory."""
        self._writer.close()
        from ncclops.record import shared_page

        with suppress(OSError):
            shared_page.settle(self._page_path)

    # --- within ---------------------------------------------------------------------------------

    def _forget_iteration(self) -> None:
        self._steps = 0
        self._mark_ns = None
        self._warm = False
        self._warming = False
        self._memory_known = False
        self._phases: list[tuple[str, int, int]] = []
        self._phase_s = 0.0
        self._stop_callbacks: list[StopCallback] = []
        self._numbers[progress.STOP_CALLBACKS] = 0
        self._numbers[progress.RESTART_BEGAN_NS] = 0
        self._page.set_phase(None, 0, 0)
        self._set_warmup(Warmup.NOT_BEGUN)

    def _be_warm(self, taken: timedelta | None) -> None:
        self._warm = True
        self._set_warmup(Warmup.OVER)
        for listener in self._warmup_listeners:
            listener(taken)

    def _set_warmup(self, state: Warmup) -> None:
        self._numbers[progress.WARMUP_NS] = self._now_ns()
        self._numbers[progress.WARMUP] = state

    def _ends_here(self, stop: StopPage, count: int) -> bool:
        # A barrier between publishing the count and looking at the page: the agreement on a
        # stop relies on that order, and a processor may otherwise look first.
        with self._barrier:
            pass
        return stop.requested() and stop.ends_here(count)

    def stop(self) -> NoReturn:
        """End as was agreed: the script's callbacks, the end marker, SystemExit(0)."""
        for callback in list(self._stop_callbacks):
            callback()
        _wait_for_gpu()
        self._has_stopped = True
        self._end("stopped")
        self.flush()
        raise SystemExit(0)

    def _end(self, how: str) -> None:
        if not self._memory_known:
            self.peak_memory()
        self._numbers[progress.ENDED_NS] = self._now_ns()
        self._put("end", how=how)

    def _tick(self) -> None:
        self._numbers[progress.TICK_NS] = self._now_ns()
        if (last_moved := self._last_moved) is not None:
            # Of a call under the restart core, which may end meanwhile, and its memory with it.
            with suppress(ValueError):
                self._numbers[progress.MAIN_NS] = int(last_moved() * 1e9)

    def _put(self, kind: str, **fields: Any) -> None:
        record = {"ts": time.time(), "kind": kind, "iteration": self._iteration, **fields}
        self._writer.put_now(record)


def _wait_for_gpu() -> None:
    # Other ranks need its part of the collectives that it has yet to run, and the end of a process
    # ends them.
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


_current: Silent | None = None
_opening = threading.Lock()


def current() -> Silent:
    """This process's recorder, made at the first call."""
    if _current is not None:
        return _current
    return _open()


def _open() -> Silent:
    global _current
    with _opening:
        if _current is None:
            _current = _make()
            atexit.register(_close)
    return _current


def _make() -> Silent:
    run_dir, rank = os.environ.get(RUN_DIR), os.environ.get("RANK", "")
    if not run_dir or not rank.isdecimal() or _is_multiprocessing_child():
        return Silent()
    path = RunPaths(Path(run_dir)).rank(int(rank)).receipt
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with append_regular(path) as file:
            fd = os.dup(file.fileno())
        if not _is_ours(fd):
            os.close(fd)
            return Silent()
    except OSError as error:
        sys.stderr.write(f"ncclops: no receipts from rank {rank}: {path}: {error.strerror}\n")
        return Silent()
    return Recorder(Path(run_dir), int(rank), fd)


def _is_multiprocessing_child() -> bool:
    process = sys.modules.get("multiprocessing.process")
    return process is not None and process.parent_process() is not None


def _is_ours(fd: int) -> bool:
    """Whether no other process writes this rank's records: a program started by a worker inherits
    the variables that say who it is. A POSIX lock goes with the process, and no fork inherits it.
    """
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EAGAIN, errno.EACCES)  # others: a server without locks
    return True


def _close() -> None:
    if _current is not None:
        _current.close()


def _after_fork_in_child() -> None:
    global _current
    _current = Silent()


def begin_as_worker() -> None:
    """This process was forked to be a worker itself (``worker.fork_server``), no child of one."""
    global _current
    _current = None


os.register_at_fork(after_in_child=_after_fork_in_child)


def _jsonable(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _number(value: SupportsFloat, of: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):  # an error of the GPU, met where a tensor is read, is none
        raise TypeError(f"receipt.step({of}): give a number, not {repr(value)[:80]}") from None
