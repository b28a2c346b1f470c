"""The run directory, read into a status: once for a command, again and again for the server."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ncclops.errors import UsageError
from ncclops.goodput import SpansSoFar, measure
from ncclops.host import process_view
from ncclops.host_name import host_name
from ncclops.record import event_log
from ncclops.record.events import VerdictEvent
from ncclops.record.paths import RunPaths
from ncclops.record.run_record import RUN
from ncclops.record.verdict_record import VERDICT, VerdictRecord
from ncclops.status import compare, merge
from ncclops.status.event_facts import RankFacts, RunFacts
from ncclops.status.gpu_memory import GpuMemory
from ncclops.status.model import RankStatus, RunPhase, RunStatus
from ncclops.status.ranks import Moment, look

# A status this old is as good as a new one: steps take longer, and ten thousand requests a second
# cost no more than two.
_MAX_AGE_S = 0.5
# By so much the events of a run and its verdict may differ in how long it took: the verdict comes
# a little before its event.
_SAME_CLOCK_S = 5.0


class RunReader:
    """Reads one run, and from then on what is new of its events. One thread at a time."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._facts = RunFacts(run_id=run_dir.name)
        self._spans = SpansSoFar()
        self._reader = event_log.follow(RunPaths(run_dir).events)
        self._gpus = GpuMemory(run_dir)
        self._is_of_this_boot = _is_of_this_boot(run_dir)
        self._is_cut = False  # the verdict is there, and not its event

    def read(self, *, lost: bool = False) -> RunStatus:
        """The status now, with what other nodes have sent.

        ``lost``: its record is not written any more, so that it has lasted until the newest event.
        """
        status = merge.merge([self.own(lost=lost), *merge.load(self._run_dir)])
        return compare.compared(status, self._facts.stragglers)

    def own(self, *, lost: bool = False) -> RunStatus:
        """The status now, of what this run directory records. ``lost``: as for ``read``."""
        new = list(self._reader.new())
        for event in new:
            self._facts.add(event)
        self._spans.take_all(new, time.time())
        if self._facts.verdict is None and (verdict := self._verdict()) is not None:
            # Its event could not be written, or something has replaced the record of events.
            self._is_cut = True
            self._facts.verdict = VerdictEvent(
                outcome=verdict.outcome, exit_code=verdict.exit_code, reason=verdict.reason
            )
        return self._own_status(lost)

    def close(self) -> None:
        self._reader.close()

    def _own_status(self, lost: bool) -> RunStatus:
        facts, now = self._facts, time.time()
        over = lost or facts.verdict is not None
        ranks = tuple(self._look(facts.ranks[rank], now, over) for rank in sorted(facts.ranks))
        until = facts.newest if over and facts.newest is not None else now
        status = RunStatus(
            run_id=facts.run_id,
            run_dir=str(self._run_dir),
            phase=self._phase(ranks),
            as_of=now,
            started=facts.started,
            seconds=_duration_s(facts.started, until),
            profile=facts.profile,
            world_size=facts.world_size,
            nodes=tuple(dict.fromkeys(rank.host for rank in ranks)),
            attempt=facts.attempt,
            iteration=max([facts.iteration, *(rank.iteration for rank in ranks)]),
            restarts=facts.restarts,
            retries=facts.retries,
            ranks=ranks,
            faults=dict(facts.faults),
            last_fault=facts.last_fault,
            goodput=measure(self._spans.until(until)).to_json(),
        )
        return self._with_verdict(status)

    def _with_verdict(self, status: RunStatus) -> RunStatus:
        verdict = self._facts.verdict
        if verdict is None:
            return status
        if (measured_s := self._measured_s(status)) is not None:
            status = replace(status, seconds=measured_s, goodput=None)
        return replace(
            status, outcome=verdict.outcome, exit_code=verdict.exit_code, reason=verdict.reason
        )

    def _measured_s(self, status: RunStatus) -> float | None:
        """How long a run took of which its events do not say that: its host's clock was set
        meanwhile, or they are cut.

        None where that is not known to have been so.
        """
        record = self._verdict()
        if record is None or (record.goodput is not None and not self._is_cut):
            return None
        if status.seconds is None:
            return record.seconds if self._is_cut else None
        return record.seconds if abs(status.seconds - record.seconds) > _SAME_CLOCK_S else None

    def _verdict(self) -> VerdictRecord | None:
        try:
            return VERDICT.read(RunPaths(self._run_dir).verdict)
        except (UsageError, OSError):
            return None

    def _look(self, facts: RankFacts, now: float, over: bool) -> RankStatus:
        on_this_host = facts.host == host_name() and self._is_of_this_boot
        here = on_this_host and self._facts.verdict is None
        moment = Moment(now=now, monotonic_ns=time.monotonic_ns(), here=here)
        seen = look(self._run_dir, facts, moment)
        if over and facts.ended is None:
            seen = replace(seen, phase="lost", step_age_s=None, heartbeat_age_s=None)
        return replace(seen, gpu_memory_gib=self._gpus.gib(facts.rank) if here else None)

    def _phase(self, ranks: tuple[RankStatus, ...]) -> RunPhase:
        facts = self._facts
        if facts.verdict is not None:
            return "ended"
        if facts.stopping:
            return "stopping"
        if facts.between_attempts:
            return "retrying"
        if facts.interrupted and not self._is_back(ranks):
            return "restarting"
        return compare.run_phase(ranks)

    def _is_back(self, ranks: tuple[RankStatus, ...]) -> bool:
        """Whether a rank has made a step since the last start."""
        iteration = self._facts.iteration
        return any(rank.phase == "training" and rank.iteration >= iteration for rank in ranks)


def _duration_s(started: float | None, until: float) -> float | None:
    # Not below zero: the host's clock may have been set back since.
    return None if started is None else max(0.0, round(until - started, 3))


def read_once(run_dir: Path, is_lost: Callable[[RunStatus], bool] = lambda _: False) -> RunStatus:
    """The status of a run from its directory alone. Raises ``OSError`` if it holds no events.

    ``is_lost`` says of a status whether the run's agent has ended without a verdict.
    """
    reader = RunReader(run_dir)
    try:
        seen = reader.read()
        return replace(reader.read(lost=True), phase="lost") if is_lost(seen) else seen
    finally:
        reader.close()


def _is_of_this_boot(run_dir: Path) -> bool:
    """Whether numbers of processes and times since the boot mean something here still."""
    try:
        record = RUN.read(RunPaths(run_dir).run)
        return (
            record is None
            or record.launcher is None
            or record.launcher.boot_id == process_view.boot_id()
        )
    except (UsageError, OSError):
        return True


class LiveSights:
    """What the server shows: read on request, kept for half a second."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._reader: RunReader | None = None
        self._reading = asyncio.Lock()
        self._status: RunStatus | None = None
        self._read_at = 0.0
        self._bytes: dict[str, bytes] = {}

    async def status(self) -> bytes:
        """See ``routes.StatusProvider``."""
        await self._refresh()
        return self._bytes["status"]

    async def metrics(self) -> bytes:
        """See ``routes.StatusProvider``."""
        from ncclops.status.metrics import render

        status = await self._refresh()
        if "metrics" not in self._bytes:
            self._bytes["metrics"] = render(status)
        return self._bytes["metrics"]

    def _read(self) -> RunStatus:
        self._reader = self._reader or RunReader(self._run_dir)
        return replace(self._reader.read(), source="agent")

    async def _refresh(self) -> RunStatus:
        async with self._reading:
            if self._status is None or time.monotonic() - self._read_at > _MAX_AGE_S:
                # In a thread: the files may be on a server that does not answer.
                self._status = await asyncio.to_thread(self._read)
                self._read_at = time.monotonic()
                self._bytes = {"status": json.dumps(self._status.to_json()).encode() + b"\n"}
            return self._status
