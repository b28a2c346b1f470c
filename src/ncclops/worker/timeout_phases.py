"""Which window of timeouts holds: the long one until compile warm-up is over, then the steady one.

One rank's warm-up ends before another's. A rank that tightened at once would time out waiting for
one that still compiles, so the ranks meet over the store first. Where some do not come (they
compile longer, or do not report) no rank waits for long: two complete steps show as well that
no rank compiles any more, since the collectives of a step need all ranks.

The restart core keeps the long soft and hard timeouts throughout. It knows nothing of other ranks,
and it is the agent that finds hangs (``ncclops.health.hang``); the core's timers are for what
cannot be seen from outside.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import TYPE_CHECKING

from ncclops.durations import format_duration
from ncclops.receipts.silent import Silent
from ncclops.record import worker_record
from ncclops.record.events import GroupTimeoutEvent
from ncclops.record.progress import WARM_AFTER_STEPS
from ncclops.record.worker_commands import TightenCommand
from ncclops.timeouts.model import Timeouts, Window
from ncclops.worker.group_timeouts import GroupTimeouts
from ncclops.worker.store_barrier import meet

if TYPE_CHECKING:
    from ncclops.restart import CallWrapper

# How long a rank waits for the others at the end of a warm-up that the script reports.
_MEETING_LIMIT = timedelta(seconds=30)


class TimeoutPhases:
    """Follows the receipts of a rank and moves its timeouts with them."""

    def __init__(
        self, timeouts: Timeouts, groups: GroupTimeouts, meeting_limit: timedelta = _MEETING_LIMIT
    ) -> None:
        self._timeouts = timeouts
        self._groups = groups
        self._meeting_limit = meeting_limit
        self._call: CallWrapper | None = None
        self._declared: list[timedelta] = []  # limits of the script's phases, the outermost first
        self._is_phase_open = False
        self._told = False  # that a phase is longer than a group's timeout
        self._warmups = 0  # in this iteration
        self._steps_left: int | None = None  # until the steady window without a meeting
        self._requested: Window | None = None  # of an operator, not granted yet
        self._granted: Window | None = None

    def follow(self, recorder: Silent) -> None:
        """Follow the phases that ``recorder`` reports."""
        recorder.on_warmup_begin(self._begin_warmup)
        recorder.on_warmup_end(self._end_warmup)
        recorder.on_step(self._step)
        recorder.on_update(self._grant)
        recorder.on_phase(self._declare)

    def on_command(self, command: TightenCommand) -> None:
        """An operator requests shorter timeouts: the steady window from now on. From any thread.

        It holds from the next step or update on, which shows that no rank compiles: their
        collectives need all ranks. After a restart, when warm-up is over again.
        """
        self._requested = Window(
            process_group=command.process_group, soft=command.soft, hard=command.hard
        )

    def begin_iteration(self, call: CallWrapper | None = None) -> None:
        """The script starts (again), under ``call`` if in-process restart looks after it."""
        self._call = call
        self._warmups = 0
        self._steps_left = None
        self._declared.clear()
        self._is_phase_open = False  # a phase of the restart core ends with its iteration
        self._groups.begin_iteration()

    def _begin_warmup(self) -> None:
        if self._timeouts.steady is None or not self._groups.is_steady:
            return
        self._groups.widen()
        self._set_restart_core()

    def _end_warmup(self, taken: timedelta | None) -> None:
        if self._timeouts.steady is None or self._groups.is_steady:
            return
        self._warmups += 1
        missing = [] if taken is None else self._missing_elsewhere()
        if not missing:
            self._be_steady()
            return
        self._steps_left = WARM_AFTER_STEPS
        why = (
            f"ranks {', '.join(map(str, missing))} have not ended their warm-up yet;"
            f" timeouts tighten after {WARM_AFTER_STEPS} more steps"
        )
        worker_record.report(GroupTimeoutEvent(applied=False, why=why))

    def _missing_elsewhere(self) -> list[int]:
        """Ranks of the job that have not ended this warm-up within the limit."""
        distributed = sys.modules.get("torch.distributed")
        if distributed is None or not distributed.is_available():
            return []
        if not distributed.is_initialized() or distributed.get_world_size() == 1:
            return []
        return meet(f"warm-up/{self._warmups}", self._meeting_limit)

    def _declare(self, limit: timedelta | None) -> None:
        """The script is in a phase that may take up to ``limit``; None: no longer."""
        if limit is not None:
            self._declared.append(limit)
            self._tell(limit, self._groups.lengthen(limit))
        elif self._declared:
            self._declared.pop()
            if not self._declared:
                self._groups.restore()
        self._set_restart_core()

    def _tell(self, limit: timedelta, shorter: timedelta | None) -> None:
        """Say once that ranks outside of the phase cannot wait for it as long as it may take."""
        if shorter is None or self._told:
            return
        self._told = True
        sys.stderr.write(
            f"ncclops: a phase of up to {format_duration(limit)} is declared, and torch ends a"
            f" collective after {format_duration(shorter)}: declare it on all ranks, whose"
            " collectives then last as long, or set --timeout steady_process_group=TIME\n"
        )

    def _grant(self) -> None:
        if self._requested is None:
            return
        self._granted, self._requested = self._requested, None
        self._timeouts = self._timeouts.tightened(self._granted)
        self._groups.use(self._timeouts)
        self._be_steady()

    def _step(self, _n: int) -> None:
        self._grant()
        if self._call is not None:
            self._call.beat()
        if self._steps_left is None:
            self._groups.look_for_new()
            return
        self._steps_left -= 1
        if self._steps_left == 0:
            self._be_steady()

    def _be_steady(self) -> None:
        self._steps_left = None
        self._groups.tighten()
        self._set_restart_core()

    def _set_restart_core(self) -> None:
        """Set soft and hard to what holds now: an operator's, or more in a declared phase.

        As a phase of the restart core, which ends with its iteration: a restart has the long
        window again.
        """
        if self._call is None:
            return
        if self._is_phase_open:
            self._call.end_phase()
            self._is_phase_open = False
        first = self._timeouts.first
        window = self._granted if self._granted is not None and self._groups.is_steady else first
        limit = self._declared[-1] if self._declared else timedelta(0)
        if window.soft is None or window.hard is None or first.soft is None:
            return  # nothing restarts in place
        if window is first and limit <= first.soft:
            return
        longer = max(1.0, limit / window.soft)
        self._call.begin_phase(
            "declared" if longer > 1 else "requested",
            soft_timeout=window.soft * longer,
            hard_timeout=window.hard * longer,
        )
        self._is_phase_open = True
