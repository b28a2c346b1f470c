"""What a rank that hears of a fault on another one has to say of itself.

When one rank hangs, those that wait for it are as silent, and any of them may be the first to
exceed its timeout. When one skips a step and destroys its groups, the others fail. Where the main
thread is tells them apart.
"""

from __future__ import annotations

import sys
import time
from traceback import format_stack, walk_stack
from typing import Literal

from torch import distributed

from ncclops.restart._groups.recorder import has_pending_operation
from ncclops.restart._instant import Instant
from ncclops.restart._monitor.link import Page, Watch
from ncclops.restart.attribution import ExceededTimeout, Fault, FaultKind
from ncclops.restart.waiting import waits_for_peers


def own_silence(
    page: Page, main_thread: int, initial_rank: int, *, had_groups: bool
) -> Fault | None:
    """The fault of this rank, if its main thread has not moved for half the soft timeout, or has
    not pinged, and does not wait for its peers; or if it destroys its groups. Any thread."""
    soft_s, _ = page.timeouts()
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
    if silent_s < soft_s / 2:
        return None
    stack = "".join(["Main thread (most recent call last):\n", *format_stack(frame)])
    if waits_for_peers(stack) or has_pending_operation():
        return None
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
