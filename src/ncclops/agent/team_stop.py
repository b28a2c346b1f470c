"""Stopping the workers without cutting a collective, if there is a way; in any case, in time.

A worker that ends while others are in a collective with it leaves them there, and on GPUs takes
the communicator with it. So the workers are to end at one point of the script:

    they report steps               after a step that none of them has passed
    the script handles SIGTERM      where the script decides, as ever
    they have no process group      at once: nothing can be cut
    their optimizers have updated   after an update that none of them has passed

Before the first step and update either may still come, so both are waited for, unless ranks have
printed steps: then neither will. Where there is no point, or it does not come within the grace
time, a line says so; then all groups are aborted, and after that the processes are signalled. So
they are at once where a rank is found to hang meanwhile. Ranks that do not move are named after a
few seconds, with what shortens the time, and where they are is recorded before they are ended by
force; so it is of ranks that are to get a process group, and have waited for it for that long.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from enum import Enum, auto
from functools import partial
from pathlib import Path

from ncclops.agent.condition import Condition
from ncclops.agent.job import Job
from ncclops.agent.left_waiting import LeftWaiting
from ncclops.agent.stop_agreement import StopAgreement, StopWay
from ncclops.agent.stop_requests import StopRequests
from ncclops.agent.team import Team
from ncclops.agent.workers import Worker
from ncclops.durations import format_rounded
from ncclops.host import process_tree
from ncclops.rank_lists import ranks_named
from ncclops.record import progress
from ncclops.record.events import StopAgreedEvent, StopForcedEvent, StopRequestedEvent
from ncclops.record.progress import INPUT_PHASE, WARM_AFTER_STEPS, Progress
from ncclops.record.stop_point import Clock, StopPage, highest_reading
from ncclops.record.worker_commands import AbortCommand

# Between two looks at whether all ranks have come as far; no event says when a page changes.
_LOOK_EVERY_S = 0.05
# Collectives keep ranks within a step of each other, or two where steps overlap.
_LEAD_STEPS = 2
# An abort takes milliseconds where it works at all.
_ABORT_LIMIT = timedelta(seconds=5)
# Ranks that an abort lets out of a collective end by its exception, unless they handle that. Those
# that are in none yet do not notice.
_LEAVE_WITHIN = timedelta(seconds=2)

_NO_CLOCK = "no rank has reported a step or updated an optimizer"
# So long none of the ranks has come further before a line says who is waited for.
_TOLD_AFTER = timedelta(seconds=10)
_REMEDY = "`ncclops.receipt.step(n)` in its loop a script ends after a step"


class Way(Enum):
    """How the workers can be stopped at the moment."""

    STEPS = auto()
    UPDATES = auto()
    EITHER = auto()  # no rank has come to its first step or update
    SIGNAL = auto()
    UNSETTLED = auto()  # some ranks have come to their first, and some have not
    NONE = auto()  # ranks train, but report no steps and have no optimizer; or one waits for input


def find_way(
    seen: list[Progress | None], *, grouped: bool, handles_sigterm: bool, trains: bool = False
) -> Way:
    """The way to stop ranks of which ``seen`` are the pages (None: it has none).

    ``grouped``: there are process groups. ``handles_sigterm``: the script has a SIGTERM handler,
    which is used where nothing else could write a last checkpoint. ``trains``: steps have been
    printed, by whichever iteration of a script that restarts in place.
    """
    pages = [page for page in seen if page is not None]
    if any(page.phase == INPUT_PHASE for page in pages):
        return Way.NONE
    whole = len(pages) == len(seen)
    if handles_sigterm and not (whole and all(page.stop_callbacks for page in pages)):
        return Way.SIGNAL
    stepped = [page.step is not None for page in pages]
    if whole and all(stepped):
        return Way.STEPS
    if not grouped and not any(stepped):
        return Way.SIGNAL
    if whole and all(page.updates for page in pages) and not _may_all_step(pages):
        return Way.UPDATES
    if any(stepped) or any(page.updates for page in pages):
        return Way.UNSETTLED
    return Way.NONE if trains and not any(page.iteration for page in pages) else Way.EITHER


def _may_all_step(pages: list[Progress]) -> bool:
    """Whether ranks that have reported no step may only be a little behind those that have."""
    return 0 < max(page.steps for page in pages) <= _LEAD_STEPS


class TeamStop:
    """One stop of one team. ``page`` is None where none could be made.

    ``steps_printed``: how many a rank's output shows.
    ``others``: how the agents of the other nodes agree on it, if there are any; ``spare``: this
    node's ranks wait in reserve, unless they have been called. ``record_late`` records where all
    ranks are, before some are ended by force: these ranks, and what they have not done.
    """

    def __init__(
        self,
        job: Job,
        team: Team,
        stop: StopRequests,
        condition: Condition,
        page: StopPage | None,
        say: Callable[[str], None],
        note: Callable[[str], None],
        steps_printed: Callable[[int], int],
        others: StopAgreement | None = None,
        record_late: Callable[[Sequence[int], str], Awaitable[None]] | None = None,
        *,
        spare: bool = False,
    ) -> None:
        self._job, self._team, self._stop = job, team, stop
        self._condition, self._page = condition, page
        self._say, self._note = say, note
        self._steps_printed = steps_printed
        self._others, self._spare = others, spare
        self._record_late = record_late
        self._clock: Clock | None = None  # by which the point is agreed
        self._point: str | None = None  # where all are to end, once that is agreed
        self._agreed: int | None = None  # the same, on its clock
        self._hung: str | None = None  # why the point will not come
        self.waits = False  # for ranks to end at one point

    def give_up(self, why: str) -> None:
        """Do not wait for the point any longer: ``why`` says why it will not come."""
        self._hung = why
        self._condition.notify()

    async def run(self) -> None:
        """Stop the team; when this returns, none of it is left that SIGKILL could end."""
        others = self._others
        self.waits = True
        way = await (self._end_together() if others is None else self._end_with(others))
        self.waits = False
        if not self._team.running():
            return
        if way is Way.SIGNAL:
            await self._tell_where_ranks_wait_for_a_group()
            await self._signal_by_handlers()
            return
        if self._stop.hurry:
            self._team.by_force = True
        else:
            late = await self._tell_where_late_ranks_are()
            await self._abort_groups(self._why_by_force(way), late)
        await self.signal_all(self._job.stop_grace)

    async def _signal_by_handlers(self) -> None:
        freeing = LeftWaiting(self._job, self._team, self._condition, self._say)
        # Of what ranks of other nodes do at this moment too little is known here.
        task = asyncio.create_task(freeing.run()) if self._others is None else None
        try:
            await self.signal_all(self._left())
        finally:
            if task is not None:
                task.cancel()

    async def force(self, why: str) -> None:
        """Stop the team now: there is nothing to wait for."""
        await self._abort_groups(why)
        await self.signal_all(self._job.stop_grace)

    async def end_rest(self) -> None:
        """End the ranks that are left after another one's failure.

        In a collective with that one no handler and no ``finally`` of the script would run.
        """
        await self._abort()
        if self._team.bootstrapped:
            over = lambda: not self._team.running() or self._stop.hurry  # noqa: E731
            await self._condition.until(over, min(_LEAVE_WITHIN, self._job.stop_grace))
        await self.signal_all(self._job.stop_grace)

    async def signal_all(self, limit: timedelta) -> None:
        """SIGTERM, ``limit``, SIGKILL, for the workers that are still there."""
        team, changes = self._team, self._condition
        team.asked_to_stop |= {worker.rank for worker in team.running()}
        team.send(signal.SIGTERM)
        await changes.until(lambda: not team.running() or self._stop.hurry, limit)
        if team.running():
            ranks = [worker.rank for worker in team.running()]
            self._job.run.add(StopRequestedEvent(signal="SIGKILL", ranks=ranks))
            team.send(signal.SIGKILL)
            await changes.until(lambda: not team.running(), process_tree.KILL_DEADLINE)

    # --- together -------------------------------------------------------------------------------

    async def _end_together(self) -> Way:
        """Until all have ended at one point, the grace time is over, or there is no such point."""
        while not self._is_over():
            way = self._way()
            if way in (Way.SIGNAL, Way.NONE):
                return way
            if clocks := _CLOCKS.get(way):
                for clock in clocks:
                    self._agree(clock)
                if way is Way.EITHER:
                    return await self._until_first()
                await self._until_over(clocks[0])
                return way
            await asyncio.sleep(_LOOK_EVERY_S)
        return Way.UNSETTLED

    async def _until_first(self) -> Way:
        """Until all have ended at the first step or update, if one comes."""
        self._tell_what_is_missing()
        while not self._is_over():
            if self._way() is Way.NONE:
                return Way.NONE
            await asyncio.sleep(_LOOK_EVERY_S)
        return Way.EITHER

    def _tell_what_is_missing(self) -> None:
        left = format_rounded(self._left())
        self._note(
            f"{_NO_CLOCK} yet: all ranks end after the first one, and if none comes within"
            f" {left} by SIGTERM, wherever they are; with {_REMEDY}"
        )

    async def _end_with(self, others: StopAgreement) -> Way:
        """The same together with the agents of other nodes, which all have to take part."""
        if self._spare and not self._has_begun():
            others.offer(StopWay.RESERVE, 0)
            await self._condition.until(lambda: self._is_over() or others.by_signals, self._left())
            return Way.SIGNAL if others.by_signals else Way.UNSETTLED
        way = await self._find_common_way(others)
        if way not in _CLOCKS:
            return way
        (clock,), number = _CLOCKS[way], -1
        page, paths = self._page, [self._page_of(each.rank) for each in self._team.running()]
        assert page is not None
        while not self._is_over() and not others.by_signals:
            proposal = others.proposal
            if proposal is not None and others.agreed and proposal.number == number:
                page.by(clock).confirm()
                self._report_agreed(clock, proposal.point)
                await self._until_over(clock)
                return way
            if proposal is not None and proposal.number != number:
                number = proposal.number
                page.by(clock).propose(proposal.point)
                others.vote(number, highest_reading(paths, clock))
            known = proposal, others.agreed
            await self._condition.until(partial(self._has_changed, others, known), self._left())
        page.by(clock).withdraw()
        return Way.SIGNAL if others.by_signals else way

    async def _find_common_way(self, others: StopAgreement) -> Way:
        """Offer the way that this node's ranks have, and find out which one all nodes have."""
        mine, told = None, False
        while not self._is_over() and not others.by_signals:
            way = self._way() if mine is None else mine
            if way is Way.EITHER and not told:
                told = True
                self._tell_what_is_missing()
            if mine is None and way in _SHARED_WAYS:
                mine = way
                paths = [self._page_of(worker.rank) for worker in self._team.running()]
                clocks = _CLOCKS.get(way)
                at = highest_reading(paths, clocks[0]) if clocks else 0
                others.offer(_SHARED_WAYS[way], at)
            if others.proposal is not None and mine is not None:
                return mine  # a point has the common way, or says that there is none
            # No event says when ranks come to their first step.
            limit = timedelta(seconds=_LOOK_EVERY_S) if mine is None else self._left()
            await self._condition.until(partial(self._has_changed, others, (None, False)), limit)
        if not others.by_signals:
            return Way.UNSETTLED
        return Way.NONE if mine is Way.NONE else Way.SIGNAL

    def _has_begun(self) -> bool:
        pages = (progress.read(self._page_of(worker.rank)) for worker in self._team.running())
        return any(page and _has_stepped(page) for page in pages) or bool(self._team.bootstrapped)

    def _has_changed(self, others: StopAgreement, known: tuple[object, bool]) -> bool:
        changed = (others.proposal, others.agreed) != known
        return changed or self._is_over() or others.by_signals

    async def _until_over(self, clock: Clock) -> None:
        readings, told = self._readings(clock), False
        while not self._is_over():
            # A later request may leave less time than the first one.
            known = self._stop.deadline
            changed = partial(lambda known: self._is_over() or self._stop.deadline < known, known)
            limit = self._left() if told else min(self._left(), _TOLD_AFTER)
            if await self._condition.until(changed, limit) or told:
                continue
            before, readings = readings, self._readings(clock)
            if told := readings == before and not self._is_over():
                self._tell_who_is_late(readings)

    def _readings(self, clock: Clock) -> dict[int, int | None]:
        """How far each rank that is left has come."""
        seen = {each.rank: progress.read(self._page_of(each.rank)) for each in self._team.running()}
        return {rank: None if p is None else clock.reading(p) for rank, p in seen.items()}

    def _tell_who_is_late(self, readings: dict[int, int | None]) -> None:
        if self._agreed is None or self._left() < _TOLD_AFTER:
            return  # it is over soon
        late = _late(readings, self._agreed)
        ranks = late or list(readings)
        has = "has" if len(ranks) == 1 else "have"
        what = (
            f"{has} not come to {self._point}" if late else f"{has} ended {self._point}, and go on"
        )
        left = format_rounded(self._left())
        run = self._job.run.shown()
        self._say(
            f"{ranks_named(ranks)} {what}: waiting for {left} more;"
            f" `ncclops stop {run} --grace 5s` shortens that, `ncclops stacks {run}` shows where"
            " they are"
        )

    async def _tell_where_late_ranks_are(self) -> list[int]:
        """Of ranks that have not come to the agreed point, once the time is over; these ranks."""
        if self._clock is None or self._agreed is None or self._team.final_failure() is not None:
            return []
        late = _late(self._readings(self._clock), self._agreed)
        if late and self._record_late is not None:
            what = f"has not come to {self._point} in the time that it was given"
            await self._record_late(late, what)
        return late

    async def _tell_where_ranks_wait_for_a_group(self) -> None:
        """Of ranks none of which has come to a process group or a step: most likely they wait for
        one another, or for a store. Not of a script that works without: it shows steps, declares
        a phase, or decides itself how it ends."""
        running = self._team.running()
        waited_s = min(time.monotonic() - worker.started for worker in running)
        if (
            self._record_late is None
            or self._stop.hurry
            or self._spare
            or self._team.bootstrapped
            or self._job.layout.world_size < 2
            or waited_s < _TOLD_AFTER.total_seconds()
            or any(self._shows_work(worker) for worker in running)
        ):
            return
        waited = format_rounded(timedelta(seconds=waited_s))
        what = f"has no process group and has made no step {waited} after its start"
        await self._record_late([worker.rank for worker in running], what)

    def _shows_work(self, worker: Worker) -> bool:
        page = progress.read(self._page_of(worker.rank))
        if page is None or _has_stepped(page) or page.phase is not None:
            return True  # without a page, it is a program that is none of ours
        return self._steps_printed(worker.rank) > 0 or _handles_sigterm(worker.pid)

    def _left(self) -> timedelta:
        return timedelta(seconds=max(0.0, self._stop.deadline - time.monotonic()))

    def _way(self) -> Way:
        if self._page is None:
            return Way.SIGNAL
        running = self._team.running()
        return find_way(
            [progress.read(self._page_of(worker.rank)) for worker in running],
            grouped=bool(self._team.bootstrapped),
            handles_sigterm=any(_handles_sigterm(worker.pid) for worker in running),
            trains=any(self._steps_printed(each.rank) >= WARM_AFTER_STEPS for each in running),
        )

    def _agree(self, clock: Clock) -> None:
        assert self._page is not None
        ranks = [worker.rank for worker in self._team.running()]
        point = self._page.by(clock).agree(map(self._page_of, ranks))
        self._report_agreed(clock, point)

    def _report_agreed(self, clock: Clock, point: int) -> None:
        running = self._team.running()
        ranks = [worker.rank for worker in running]
        if clock is Clock.STEPS:
            name, agreed = f"step {point}", StopAgreedEvent(step=point, ranks=ranks)
        else:
            pages = [progress.read(self._page_of(worker.rank)) for worker in running]
            since = " since the restart" if any(page and page.iteration for page in pages) else ""
            name, agreed = f"update {point}{since}", StopAgreedEvent(update=point, ranks=ranks)
        self._job.run.add(agreed)
        if point:  # 0: the first, which may never come
            self._point, self._agreed, self._clock = name, point, clock
            self._note(f"all ranks are to end after {name}")

    def _page_of(self, rank: int) -> Path:
        return self._job.run.paths.rank(rank).progress

    def _is_over(self) -> bool:
        team, stop = self._team, self._stop
        late = time.monotonic() >= stop.deadline or self._hung is not None
        return not team.running() or late or stop.hurry or team.final_failure() is not None

    # --- by force -------------------------------------------------------------------------------

    def _why_by_force(self, way: Way) -> str:
        failed = self._team.final_failure()
        if failed is not None:
            return f"rank {failed.rank} has failed meanwhile"
        if self._hung is not None:
            return self._hung
        if way is Way.NONE and self._at_input():
            return "a rank waits for input"
        if way is Way.NONE:
            return f"no rank reports steps or has an optimizer; with {_REMEDY}"
        if self._point is not None:
            return f"the grace time is over, and not all ranks have come to {self._point}"
        without = f", and {_NO_CLOCK}" if way is Way.EITHER else ""
        return f"the grace time is over{without}"

    def _at_input(self) -> bool:
        pages = (progress.read(self._page_of(worker.rank)) for worker in self._team.running())
        return any(page is not None and page.phase == INPUT_PHASE for page in pages)

    async def _abort_groups(self, why: str, late: Sequence[int] = ()) -> None:
        ranks = [worker.rank for worker in self._team.running()]
        self._job.run.add(StopForcedEvent(ranks=ranks, reason=why, late=list(late)))
        count = f"{len(ranks)} worker{'s' * (len(ranks) != 1)}"
        self._say(f"{why}: aborting the process groups of {count}, then SIGTERM")
        await self._abort()

    async def _abort(self) -> None:
        """Abort all process groups; what ends from now on ends because of us."""
        team = self._team
        team.by_force = True
        team.asked_to_stop |= {worker.rank for worker in team.running()}
        asked = {worker.rank for worker in team.running() if worker.send_command(AbortCommand())}
        asked &= team.bootstrapped  # a program that is none of ours does not answer
        await self._condition.until(lambda: asked <= team.aborted | team.ranks_ended, _ABORT_LIMIT)


_CLOCKS = {
    Way.STEPS: (Clock.STEPS,),
    Way.UPDATES: (Clock.UPDATES,),
    Way.EITHER: (Clock.STEPS, Clock.UPDATES),
}


# The names, in the agents' shared log, of the ways that several nodes can agree on.
_SHARED_WAYS = {
    Way.STEPS: StopWay.STEPS,
    Way.UPDATES: StopWay.UPDATES,
    Way.SIGNAL: StopWay.SIGNAL,
    Way.NONE: StopWay.SIGNAL,
}


def _has_stepped(page: progress.Progress) -> bool:
    return page.step is not None or page.updates > 0


def _late(readings: dict[int, int | None], agreed: int) -> list[int]:
    """The ranks that have not come to ``agreed``."""
    return [rank for rank, at in readings.items() if at is None or at < agreed]


def _handles_sigterm(pid: int) -> bool:
    """Whether the process has a handler for SIGTERM; no worker entry of ours sets one."""
    with suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (signal.SIGTERM - 1) & 1)
    return False
