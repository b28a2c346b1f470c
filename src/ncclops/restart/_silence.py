"""What a rank that hears of a fault on another one has to say of itself.

When one rank hangs, those that wait for it are as silent, and any of them may be the first to
exceed its timeout. When one skips a step and destroys its groups, the others fail. Where the main
thread is tells them apart. A rank that does something else for longer than the others wait, such as
an import in a new process or an evaluation, is not silent, and has begun no operation meanwhile.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from traceback import format_stack, walk_stack
from typing import Any, Literal

from torch import distributed

from ncclops.restart._groups.recorder import has_pending_operation
from ncclops.restart._instant import Instant
from ncclops.restart._interrupt.handled import passes_through
from ncclops.restart._monitor.link import Page, Watch
from ncclops.restart.attribution import ExceededTimeout, Fault, FaultKind
from ncclops.restart.raised import comes_from_restart, is_due_to_peer
from ncclops.restart.waiting import waits_for_peers


class LastOperation:
    """When this rank has begun the last operation of its groups, as far as that is known."""

    def __init__(self) -> None:
        self._begun: list[Any] = []
        self._at = time.monotonic()

    def iteration_begins(self) -> None:
        """There is none yet."""
        self._at = time.monotonic()

    def look(self, begun: list[Any]) -> None:
        """``begun``: what ``begun_operations`` says now."""
        if begun != self._begun:
            self._begun, self._at = begun, time.monotonic()

    def seconds_since(self, *, has_groups: bool) -> float:
        """0 where the recorder is off and this rank has groups."""
        return time.monotonic() - self._at if self._begun or not has_groups else 0.0


def own_silence(
    page: Page,
    main_thread: int,
    initial_rank: int,
    last: LastOperation,
    waited_s: float | None = None,
    *,
    had_groups: bool,
) -> Fault | None:
    """The fault of this rank, if its main thread has not moved for half the soft timeout, or has
    not pinged, or it has begun no operation for as long, and does not wait for its peers, or does
    so in the clean-up after an exception of its own; or if it destroys its groups. Where another
    rank has waited ``waited_s`` and no longer, half of that without an operation is enough. Any
    thread."""
    soft_s, _ = page.timeouts()
    waited_s = soft_s if waited_s is None else min(waited_s, soft_s)
    by_ping = 0 < page.ping < page.main_beat
    silent_s = time.monotonic() - (page.ping if by_ping else page.main_beat)
    frame = sys._current_frames().get(main_thread)
    if page.watch != Watch.SOFT_AND_HARD or frame is None:
        return None
    calls = {caller.f_code.co_name for caller, _ in walk_stack(frame)}
    left = had_groups and not distributed.is_initialized() and "init_process_group" not in calls
    ends = "destroy_process_group" in calls and not has_pending_operation()
    if left or ends:
        return Fault.of_early_return(initial_rank, int(page.number), int(page.iteration))
    has_groups = had_groups or distributed.is_initialized()
    idle_s = last.seconds_since(has_groups=has_groups) if silent_s < soft_s / 2 else 0.0
    if silent_s < soft_s / 2 and idle_s < waited_s / 2:
        return None
    stack = "".join(["Main thread (most recent call last):\n", *format_stack(frame)])
    if waits_for_peers(stack) or has_pending_operation():
        return _of_clean_up(passes_through(main_thread, frame), initial_rank, page)
    if idle_s:
        detail = f"began no operation of its groups for {idle_s:.1f} s, in which others waited"
        if waited_s == soft_s:
            detail += (
                f"; what takes longer than the soft timeout ({soft_s:.3g} s) belongs into "
                "call.phase() or receipt.phase(), on the ranks that wait for it as well"
            )
        busy = Fault.observed(FaultKind.SOFT_TIMEOUT, initial_rank, int(page.iteration), detail)
        return replace(busy, rank=int(page.number), traceback=stack)
    what = "no ping" if by_ping else "the main thread did not move"
    detail = f"{what} for {silent_s:.1f} s, and it did not wait for its peers"
    clock: Literal["ping", "main-thread"] = "ping" if by_ping else "main-thread"
    return Fault(
        kind=FaultKind.SOFT_TIMEOUT,
        initial_rank=initial_rank,
        rank=int(page.number),
        iteration=int(page.iteration),
        at=time.time(),
        instant=Instant.now(),
        summary=f"rank {initial_rank}: {detail}",
        detail=detail,
        traceback=stack,
        timeout=ExceededTimeout("soft", soft_s, round(silent_s, 3), clock),
    )


def _of_clean_up(error: Exception | None, initial_rank: int, page: Page) -> Fault | None:
    if error is None or is_due_to_peer(error) or comes_from_restart(error):
        return None
    fault = Fault.of_exception(
        error,
        FaultKind.EXCEPTION,
        initial_rank=initial_rank,
        rank=int(page.number),
        iteration=int(page.iteration),
    )
    return replace(fault, summary=f"{fault.summary}, and its clean-up waited for other ranks")
