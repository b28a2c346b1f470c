"""The run directory, read into a status: once for a command, again and again for the server."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ncclops.control import compare, merge
from ncclops.control.events import RankFacts, RunFacts
from ncclops.control.gpu_memory import GpuMemory
from ncclops.control.ranks import Moment, RankSteps, look
from ncclops.control.status import RankStatus, RunPhase, RunStatus
from ncclops.goodput import Tally
from ncclops.launch.tail import LineReader

# A status this old is as good as a new one: steps take longer, and ten thousand requests a second
# cost no more than two.
_MAX_AGE_S = 0.5
# The records are read on even if nobody asks, so that who asks after a week need not wait.
_CATCH_UP_EVERY_S = 20.0


class RunReader:
    """Follows the files of one run. One thread at a time."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._facts = RunFacts(run_id=run_dir.name)
        self._tally = Tally()
        self._events = _Follower(run_dir / "events.jsonl")
        self._receipts: dict[int, _Follower] = {}
        self._steps: dict[int, RankSteps] = {}
        self._gpus = GpuMemory(run_dir)

    def read(self) -> RunStatus:
        """The status now. Raises ``OSError`` if there are no events to be read."""
        self.catch_up()
        status = merge.merge([self._own_status(), *merge.load(self._run_dir)])
        return compare.compared(status, self._facts.stragglers)

    def catch_up(self) -> None:
        """Read what has been written since the last time."""
        records = list(self._events.read())
        for event in records:
            self._facts.add(event)
        for rank in self._facts.ranks:
            records += self._read_receipts(rank)
        for record in sorted(records, key=_ts):
            self._tally.add(record)

    def close(self) -> None:
        self._events.close()
        for receipts in self._receipts.values():
            receipts.close()

    def _read_receipts(self, rank: int) -> Iterator[dict[str, Any]]:
        path = self._run_dir / "ranks" / str(rank) / "receipt.jsonl"
        follower = self._receipts.setdefault(rank, _Follower(path))
        steps = self._steps.setdefault(rank, RankSteps())
        for record in follower.read():
            steps.add(record)
            yield {**record, "rank": rank}

    def _own_status(self) -> RunStatus:
        facts, now = self._facts, time.time()
        ranks = tuple(self._look(facts.ranks[rank], now) for rank in sorted(facts.ranks))
        ended = facts.newest if facts.verdict is not None else None
        status = RunStatus(
            run_id=facts.run_id,
            run_dir=str(self._run_dir),
            phase=self._phase(ranks),
            as_of=now,
            started=facts.started,
            seconds=None if facts.started is None else round((ended or now) - facts.started, 3),
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
            goodput=self._tally.result(ended or now).to_json(),
        )
        return _with_verdict(status, facts)

    def _look(self, facts: RankFacts, now: float) -> RankStatus:
        here = facts.host == socket.gethostname() and self._facts.verdict is None
        moment = Moment(now=now, monotonic_ns=time.monotonic_ns(), here=here)
        steps = self._steps.get(facts.rank, RankSteps())
        seen = look(self._run_dir, facts, steps, moment)
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
        there = [rank for rank in ranks if rank.phase == "training"]
        return any(
            rank.step_s is not None or rank.iteration >= self._facts.iteration for rank in there
        )


class LiveSights:
    """What the server shows: read when somebody asks, kept for half a second."""

    def __init__(self, run_dir: Path) -> None:
        self._reader = RunReader(run_dir)
        self._reading = asyncio.Lock()
        self._status: RunStatus | None = None
        self._read_at = 0.0
        self._bytes: dict[str, bytes] = {}

    async def status(self) -> bytes:
        """See ``routes.Sights``."""
        await self._refresh()
        return self._bytes["status"]

    async def metrics(self) -> bytes:
        """See ``routes.Sights``."""
        from ncclops.control.metrics import render

        status = await self._refresh()
        if "metrics" not in self._bytes:
            self._bytes["metrics"] = render(status)
        return self._bytes["metrics"]

    async def keep_up(self) -> None:
        """Read on for ever."""
        while True:
            async with self._reading:
                await asyncio.to_thread(self._reader.catch_up)
            await asyncio.sleep(_CATCH_UP_EVERY_S)  # so that the next request has little to read

    async def _refresh(self) -> RunStatus:
        async with self._reading:
            if self._status is None or time.monotonic() - self._read_at > _MAX_AGE_S:
                # In a thread: the files may be on a server that does not answer.
                read = await asyncio.to_thread(self._reader.read)
                self._status = replace(read, source="agent")
                self._read_at = time.monotonic()
                self._bytes = {"status": json.dumps(self._status.to_json()).encode() + b"\n"}
            return self._status


class _Follower:
    """The records of a growing file, each once; of one that is not there yet, none."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: LineReader | None = None

    def read(self) -> Iterator[dict[str, Any]]:
        if self._lines is None:
            try:
                self._lines = LineReader(self._path)
            except FileNotFoundError:
                return
        while lines := list(self._lines.read()):
            yield from filter(None, map(_record, lines))

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:  # half a line, or a script's own
        return None
    return record if isinstance(record, dict) else None


def _ts(record: dict[str, Any]) -> float:
    ts = record.get("ts")
    return float(ts) if isinstance(ts, int | float) else 0.0


def _with_verdict(status: RunStatus, facts: RunFacts) -> RunStatus:
    if facts.verdict is None:
        return status
    told = {name: facts.verdict.get(name) for name in ("outcome", "exit_code", "reason")}
    return replace(status, **told)  # type: ignore[arg-type]
