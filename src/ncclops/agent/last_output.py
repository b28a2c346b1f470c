"""What the output of an attempt shows, once its workers have ended: read in time, and judged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta

from ncclops.agent import backlog
from ncclops.agent.condition import Condition
from ncclops.agent.in_thread import InThread
from ncclops.agent.live_scan import LiveDiagnosis, LiveScan, unread
from ncclops.agent.stop_requests import StopRequests
from ncclops.record.error_file import read_error
from ncclops.record.run_directory import RunDirectory

# `backlog.Patience` ends the reading before; beyond this the file system does not answer.
LIMIT_S = 60.0
_WHEN_STOPPED_S = 3.0
_IN_A_HURRY_S = 1.0


async def read(
    scan: LiveScan,
    finish: Callable[[], LiveDiagnosis],
    run: RunDirectory,
    condition: Condition,
    stop: StopRequests,
    say: Callable[[str], None],
) -> LiveDiagnosis:
    """What ``finish``, which calls ``scan.finish``, makes of the output; tells what was left out.

    Less is read where the run is asked to stop: ranks may have written more than can be read
    before a scheduler's SIGKILL.
    """
    reading = InThread(finish, condition)
    await condition.until(lambda: reading.is_done or stop.asked, timedelta(seconds=LIMIT_S))
    if stop.asked:
        scan.hasten(_WHEN_STOPPED_S)
        limit = timedelta(seconds=2 * _WHEN_STOPPED_S)
        await condition.until(lambda: reading.is_done or stop.hurry, limit)
    if stop.hurry:
        scan.hasten(0)
        await condition.until(lambda: reading.is_done, timedelta(seconds=_IN_A_HURRY_S))
    try:
        diagnosis = reading.get()
    except TimeoutError:
        scan.give_up()
        diagnosis = unread("its file system does not answer")
        say(diagnosis.report.verdict.summary)
    else:
        backlog.tell(run, say, diagnosis.passed_over)
    return diagnosis


def last_words(run: RunDirectory, attempt: int, ranks: Iterable[int]) -> dict[int, str]:
    """What the scripts of ranks that failed have handed to ``sys.exit``, where that is text."""
    errors = {rank: read_error(run.paths.rank(rank).error(attempt)) for rank in ranks}
    return {
        rank: error.headline
        for rank, error in errors.items()
        if error is not None and error.headline is not None and error.is_system_exit
    }


def unwritten(run: RunDirectory, attempt: int, raised: Mapping[int, str]) -> dict[int, str]:
    """Those of the exceptions that ranks have ``raised`` of which no file of theirs has anything.

    The disk was full, most likely: then the traceback is missing in the log as well.
    """
    return {
        rank: text
        for rank, text in raised.items()
        if read_error(run.paths.rank(rank).error(attempt)) is None
    }
