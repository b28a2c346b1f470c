"""Measures how long this rank waits for others in collectives, without a change to the script.

Around torch's calls that wait: on the CPU the time in which the main thread is blocked, on a GPU
the time between two events on the stream, since a rank whose GPU is late lets the others' streams
wait. A backward pass under DistributedDataParallel waits in C++ at its end, where two callbacks of
autograd's engine stand around that. What is in a compiled graph, or called as an operator
(functional collectives, DTensor), is not seen.

What it costs is measured with it, and units of work are left out where it would be more than
``BUDGET`` of the time.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

from ncclops.receipts.pace import Pace, Unit, UnitKind
from ncclops.receipts.silent import Silent
from ncclops.worker import after_import

# A third of what is promised (0.1 % of a step of 100 ms): the rest is for what it does not see.
BUDGET = 0.0003
# What may be spent before: the first units are measured in any case.
_ADVANCE_NS = 20_000_000
# What two more functions of Python around a call cost (`scripts/bench_waits.py`).
_AROUND_NS = 6_000
# What takes longer was interrupted by other processes.
_MOST_AT_ONCE_NS = 200_000
# Units whose events the GPU has not reached yet.
_MOST_PENDING = 64

_C10D = "torch.distributed.distributed_c10d"
_DDP = "torch.nn.parallel.distributed"
_TRANSFERS = ("send", "recv", "recv_anysource")
_COLLECTIVES = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "barrier"),
    *("allgather", "_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
    *("alltoall", "alltoall_base", "gather", "scatter"),
)

_clock = time.perf_counter_ns
# Events around a call, and for how long it has blocked the main thread.
_Pair = tuple[Any, Any, int]


class Waits:
    """The waits of this process, told to ``recorder``."""

    def __init__(self, recorder: Silent) -> None:
        self._recorder = recorder
        self._pace = Pace(self._note)
        self._main = threading.main_thread().ident
        self._everyone = int(os.environ.get("WORLD_SIZE", "0"))
        self._started_ns = _clock()
        self._spent_ns = 0
        self._free: list[Any] = []  # events for another use
        self._begin_iteration()

    def follow(self) -> None:
        """Measure from now on, where there are receipts."""
        recorder = self._recorder
        if not recorder.active:
            return
        recorder.on_iteration(self._begin_iteration)
        recorder.on_step(lambda n: self._at("step", n))
        recorder.on_update(lambda: self._at("update", None))
        recorder.on_phase(lambda limit: self._pace.phase(begins=limit is not None))
        recorder.on_warmup_begin(lambda: self._pace.phase(begins=True))
        recorder.on_warmup_end(lambda _: self._pace.phase(begins=False))
        after_import.act(_C10D, self._watch_groups)
        after_import.act(_DDP, self._watch_ddp)

    # --- units ----------------------------------------------------------------------------------

    def _begin_iteration(self) -> None:
        self._pace.restart()
        self._measuring = False
        self._blocked_ns = 0
        self._base: Any = None  # an event at the beginning of the unit
        self._pairs: list[_Pair] = []
        self._pending: list[tuple[Unit, Any, list[_Pair]]] = []
        self._counted = 0  # updates and stretches, which nobody numbers
        self._transfers = False
        self._groups: set[str] = set()

    def _at(self, kind: UnitKind, number: int | None) -> None:
        now = _clock()
        if threading.get_ident() != self._main or not self._pace.ends(kind, now):
            return
        length, counts = self._pace.begin(now)
        self._counted += 1
        number = self._counted if number is None else number
        if counts and self._measuring:
            unit = Unit(kind, number, time.time(), length / 1e9, self._blocked_ns / 1e9)
            busy_s = self._recorder.busy_s if kind == "step" else None
            if busy_s is not None:  # the script knows better
                unit = Unit(kind, number, unit.at, unit.seconds, unit.seconds - busy_s)
                self._pairs = []
            self._take(unit)
        else:
            self._release(self._base, self._pairs)
        self._blocked_ns, self._pairs = 0, []
        allowed = _ADVANCE_NS + BUDGET * (now - self._started_ns)
        self._measuring = self._spent_ns < allowed
        self._base = self._mark() if self._measuring else None
        self._spend(_clock() - now)

    def _spend(self, ns: int) -> None:
        self._spent_ns += min(ns, _MOST_AT_ONCE_NS)

    def _take(self, unit: Unit) -> None:
        if not self._pairs and not self._pending:
            self._release(self._base, [])
            self._pace.add(unit)
            return
        self._pending.append((unit, self._base, self._pairs))
        try:
            while self._pending and self._settles(*self._pending[0]):
                del self._pending[0]
        except RuntimeError:  # of CUDA: the script's own next call says so, too
            self._pending.clear()
        if len(self._pending) > _MOST_PENDING:  # the GPU is stuck; its events are not touched
            self._pending.clear()

    def _settles(self, unit: Unit, base: Any, pairs: list[_Pair]) -> bool:
        """Whether the GPU is through with ``unit``, which is counted then."""
        import torch

        if pairs and torch.cuda.is_current_stream_capturing():
            return False  # no query is allowed now
        if not all(after.query() for _, after, _ in pairs):
            return False
        waited_s = unit.waited_s
        if pairs and base is not None and base.query():
            waited_s += _covered_s(base, pairs)
        self._release(base, pairs)
        self._pace.add(Unit(unit.kind, unit.number, unit.at, unit.seconds, waited_s))
        return True

    def _release(self, base: Any, pairs: list[_Pair]) -> None:
        self._free += [event for pair in pairs for event in pair[:2]]
        if base is not None:
            self._free.append(base)

    def _note(self, fields: dict[str, Any]) -> None:
        peers = self._peers() if self._transfers else None
        self._recorder.note_pace(fields | ({} if peers is None else {"peers": peers}))

    def _peers(self) -> list[int]:
        """Ranks that do the same work, where stages of a pipeline do not.

        They are in a group with this one that reduces or gathers, and not all ranks are. Empty
        where ranks have other numbers than at the start.
        """
        world = sys.modules[_C10D]._world
        names, everyone = world.pg_names, len(world.pg_group_ranks.get(world.default_pg, ()))
        if everyone != self._everyone:
            return []
        groups = [
            sorted(ranks)
            for group, ranks in world.pg_group_ranks.items()
            if names.get(group) in self._groups and len(ranks) < everyone
        ]
        return max(groups, key=len, default=[])

    # --- what waits -----------------------------------------------------------------------------

    def _watch_groups(self, module: ModuleType) -> None:
        group, work = getattr(module, "ProcessGroup", None), getattr(module, "Work", None)
        if group is None or work is None:  # a torch without distributed
            return
        for names, note in ((_COLLECTIVES, self._note_group), (_TRANSFERS, self._note_transfer)):
            for name in names:
                if hasattr(group, name):
                    setattr(group, name, self._enqueuing(getattr(group, name), note))
        group.monitored_barrier = self._waiting(group.monitored_barrier)
        work.wait = self._waiting(work.wait)

    def _waiting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``original``, which waits for other ranks, measured."""

        @wraps(original)
        def waiting(*arguments: Any, **keywords: Any) -> Any:
            try:
                if not self._measuring:
                    return original(*arguments, **keywords)
                before, called = self._mark(), _clock()
                try:
                    return original(*arguments, **keywords)
                finally:
                    self._waited(before, called)
            finally:
                if self._pace.by_stretches:
                    self._at("stretch", None)

        return waiting

    def _enqueuing(
        self, original: Callable[..., Any], note: Callable[[Any], None]
    ) -> Callable[..., Any]:
        """``original``, which lets no more than a stream wait, measured where there is one."""

        @wraps(original)
        def enqueuing(group: Any, *arguments: Any, **keywords: Any) -> Any:
            if not self._measuring:
                return original(group, *arguments, **keywords)
            note(group)
            before = self._mark()
            if before is None:
                return original(group, *arguments, **keywords)
            called = _clock()
            try:
                return original(group, *arguments, **keywords)
            finally:
                self._waited(before, called)

        return enqueuing

    def _note_group(self, group: Any) -> None:
        self._groups.add(group.group_name)

    def _note_transfer(self, _group: Any) -> None:
        self._transfers = True

    def _waited(self, before: Any, called: int) -> None:
        blocked = _clock() - called if threading.get_ident() == self._main else 0
        after = None if before is None else self._mark()
        if after is None:
            self._blocked_ns += blocked
        else:
            self._pairs.append((before, after, blocked))
        self._spent_ns += _AROUND_NS

    def _mark(self) -> Any:
        """An event on the stream, where there is a GPU."""
        cuda: Any = sys.modules.get("torch.cuda")
        if cuda is None or not cuda.is_initialized() or cuda.is_current_stream_capturing():
            return None
        began = _clock()
        event = self._free.pop() if self._free else cuda.Event(enable_timing=True)
        try:
            event.record()
        except RuntimeError:
            return None
        self._spend(_clock() - began)
        return event

    # --- the end of a backward pass -------------------------------------------------------------

    def _watch_ddp(self, module: ModuleType) -> None:
        ddp: Any = module.DistributedDataParallel
        original = ddp.__init__

        @wraps(original)
        def made(on: Any, *arguments: Any, **keywords: Any) -> None:
            original(on, *arguments, **keywords)
            needed = [each for each in on.module.parameters() if each.requires_grad]
            if needed:
                # Of the last layer, as a rule: its gradient comes first.
                needed[-1].register_hook(self._on_gradient)

        ddp.__init__ = made

    def _on_gradient(self, _gradient: Any) -> None:
        # Where autograd itself is compiled this is traced, and must come to nothing.
        if self._measuring and not sys.modules["torch"].compiler.is_compiling():
            _engine().queue_callback(self._before_reducer)  # which queues its own later on

    def _before_reducer(self) -> None:
        before, called = self._mark(), _clock()
        _engine().queue_callback(lambda: self._waited(before, called))


def _engine() -> Any:
    return sys.modules["torch"].autograd.Variable._execution_engine


def _covered_s(base: Any, pairs: list[_Pair]) -> float:
    """Seconds in which the rank was within any of ``pairs``, on whatever streams they are."""
    total = end = 0.0
    blocked_ms = 0.0
    for begin_ms, end_ms, own_ms in sorted(
        (base.elapsed_time(before), base.elapsed_time(after), own / 1e6)
        for before, after, own in pairs
    ):
        total += max(0.0, end_ms - max(begin_ms, end))
        end = max(end, end_ms)
        blocked_ms += own_ms
    # A group of the CPU blocks the thread, and not the stream.
    return max(total, blocked_ms) / 1e3
