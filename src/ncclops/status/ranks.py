"""What one rank shows of itself: its progress page, its records, its output, its memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from ncclops.health.stragglers import WINDOW_STEPS
from ncclops.host import process_view
from ncclops.receipts.log_scan import LogScan
from ncclops.receipts.observation import Observation
from ncclops.record import progress, receipt_records
from ncclops.record.paths import RunPaths
from ncclops.record.progress import Progress, Warmup
from ncclops.record.receipt_records import (
    IterationRecord,
    ReceiptRecord,
    StartRecord,
    StepRecord,
)
from ncclops.record.tail import last_lines
from ncclops.status.event_facts import RankFacts
from ncclops.status.model import RankStatus

# The step time shown is the median of so many: one slow step means nothing, ten do.
_RECENT_STEPS = 10
_PRINTED_LINES = 200
# Enough for the window of steps, with phases and the like between them.
_RECORDS, _RECORD_BYTES = 2 * WINDOW_STEPS, 300
# A page that is older than the worker by more than two clocks may differ is an earlier worker's.
_CLOCK_SLACK_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Moment:
    """When a rank is looked at. ``here``: whether its processes and clock are this machine's."""

    now: float
    monotonic_ns: int
    here: bool

    def ago(self, then_ns: int) -> float | None:
        """Seconds since a time in a page; None where that cannot be known."""
        known = self.here and 0 < then_ns <= self.monotonic_ns
        return round((self.monotonic_ns - then_ns) / 1e9, 3) if known else None


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Seconds, as medians: ``step_s`` of the very last steps, ``own_step_s`` of enough to compare
    ranks by, without the waiting for others where the script reports that."""

    step_s: float | None = None
    own_step_s: float | None = None


def step_times(records: Iterable[ReceiptRecord]) -> StepTimes:
    """The times in the last records of a ``receipt.jsonl``.

    What was before a start is left out, and so are disturbed steps: the first after a start, and
    those with a declared phase in them.
    """
    seconds: deque[float] = deque(maxlen=WINDOW_STEPS)
    busy_s: deque[float] = deque(maxlen=WINDOW_STEPS)
    for record in records:
        if isinstance(record, StartRecord | IterationRecord):
            seconds.clear()
            busy_s.clear()
        if not isinstance(record, StepRecord) or record.disturbed:
            continue
        for times, value in ((seconds, record.seconds), (busy_s, record.busy_s)):
            if value is not None:
                times.append(value)
    own = busy_s if len(busy_s) == len(seconds) else seconds
    return StepTimes(
        step_s=round(median(list(seconds)[-_RECENT_STEPS:]), 6) if seconds else None,
        own_step_s=round(median(own), 6) if len(own) >= _RECENT_STEPS else None,
    )


def look(run_dir: Path, facts: RankFacts, moment: Moment) -> RankStatus:
    """The rank as it is at ``moment``."""
    page = progress.read(RunPaths(run_dir).rank(facts.rank).progress)
    if page is not None and _is_of_earlier_worker(page, facts, moment):
        page = None
    runs = facts.ended is None
    sight = _sight(run_dir, facts, page, moment)
    times = step_times(_last_records(run_dir, facts.rank))
    return RankStatus(
        rank=facts.rank,
        host=facts.host,
        phase=_phase(facts, page, sight.step),
        pid=facts.pid,
        iteration=0 if page is None else page.iteration,
        step=sight.step,
        step_s=times.step_s or sight.step_s,
        own_step_s=times.own_step_s,
        step_age_s=sight.age_s if runs else None,
        heartbeat_age_s=moment.ago(page.tick_ns) if page is not None and runs else None,
        memory_gib=_resident_gib(facts) if moment.here and runs else None,
        last_event=facts.last,
    )


def _phase(facts: RankFacts, page: Progress | None, step: int | None) -> str:
    if facts.ended is not None:
        return "ended" if facts.ended else "failed"
    if page is None:
        if step is not None or facts.warm:
            return "training"
        return "running" if facts.bootstrapped else "starting"
    if page.phase is not None:
        return page.phase
    if page.warmup is Warmup.RUNNING:
        return "warming-up"
    if page.steps or page.updates or step is not None or facts.warm:
        return "training"
    return "warming-up" if facts.bootstrapped else "starting"


@dataclass(frozen=True)
class _Sight:
    """The last step, how many seconds ago it ended, and how long steps take without receipts."""

    step: int | None
    age_s: float | None
    step_s: float | None = None


def _sight(run_dir: Path, facts: RankFacts, page: Progress | None, moment: Moment) -> _Sight:
    """The last step of the page, else as it was printed."""
    if page is not None and page.step is not None:
        return _Sight(page.step, moment.ago(page.step_ns))
    log = RunPaths(run_dir).rank(facts.rank).stdout_log
    printed, written = _printed_steps(log), _modified(log)
    step, at = facts.step, facts.step_at
    if printed and (step is not None or facts.bootstrapped or facts.warm):
        # Events record one step in ten seconds; the log has the newest.
        step, at = printed[-1].step, written
    age_s = None if at is None else round(max(0.0, moment.now - at), 3)
    return _Sight(step, age_s, _printed_s(printed) or facts.step_s or _mean_s(facts, step, at))


def _printed_steps(log: Path) -> list[Observation]:
    """The steps in the last lines of the log that carry a number."""
    lines = last_lines(log, _PRINTED_LINES, limit_bytes=16 << 10)
    if not lines:
        return []
    scan = LogScan(str(log))
    seen = (each for line in lines for each in scan.feed(line))
    return [each for each in seen if each.kind == "step" and each.step is not None]


def _printed_s(printed: Sequence[Observation]) -> float | None:
    """The seconds that the trainer itself prints, as Megatron-LM does."""
    seconds = [each.seconds for each in printed[-_RECENT_STEPS:] if each.seconds is not None]
    return round(median(seconds), 6) if seconds else None


def _mean_s(facts: RankFacts, step: int | None, at: float | None) -> float | None:
    """The mean since the first step that became an event, until there is a second one."""
    if facts.step is None or facts.step_at is None or step is None or at is None:
        return None
    steps = step - facts.step
    return round((at - facts.step_at) / steps, 6) if steps > 0 and at > facts.step_at else None


def _modified(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _last_records(run_dir: Path, rank: int) -> Iterator[ReceiptRecord]:
    path = RunPaths(run_dir).rank(rank).receipt
    for line in last_lines(path, _RECORDS, limit_bytes=_RECORDS * _RECORD_BYTES):
        if (record := receipt_records.decode(line)) is not None:
            yield record


def _is_of_earlier_worker(page: Progress, facts: RankFacts, moment: Moment) -> bool:
    age = moment.ago(page.started_ns)
    if age is None or facts.started is None:
        return False
    return moment.now - age < facts.started - _CLOCK_SLACK_S


def _resident_gib(facts: RankFacts) -> float | None:
    """None where the process has ended, also if its number is another one's by now."""
    stat = None if facts.pid is None else process_view.read_stat(Path(f"/proc/{facts.pid}"))
    if stat is None or stat.started_ticks != facts.started_ticks:
        return None
    return round(stat.rss_bytes / 2**30, 3)
