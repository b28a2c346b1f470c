"""Runs a script under the restart core: after a fault it starts again in the same processes."""

from __future__ import annotations

import builtins
import json
import os
import re
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from ncclops import restart
from ncclops.receipts import recorder
from ncclops.restart.exception import RestartAbort, RestartError
from ncclops.restart.incident import Incident
from ncclops.worker import fresh, orders, record, script, stopping
from ncclops.worker.variables import RUN_DIR, STARTED, TIMEOUTS_S

# The same exception at the same place so often in a row is the script's own.
_SAME_FAILURE_LIMIT = 3
# Exceptions that a mistake in the script raises, and hardly anything else. Early in a run one is
# enough; later, hours of training are worth the attempts.
_MISTAKES = (
    NameError,
    AttributeError,
    TypeError,
    LookupError,
    ImportError,
    SyntaxError,
    NotImplementedError,
)
_UNKNOWN = "unknown place"
_EARLY_S = 300.0
# NCCL's words for a communicator that did not come up: the playbook's list of what a new process
# with lazy communicators gets over.
_STARTUP_WORDS = (
    "ncclRemoteError",
    "remote process exited",
    "socketPollConnect",
    "Connection refused",
)


def run(start: Callable[[], None]) -> None:
    """Run the script with ``start`` until it ends well on all ranks.

    Raises what this rank leaves with.

    ``SystemExit`` with code 0 is a good end. With another code, and for exceptions that no
    restart can mend, the rank leaves and its exit code says so.
    """
    timeouts = json.loads(os.environ[TIMEOUTS_S])
    repetition = StopRepeating(started=float(os.environ[STARTED]))
    recorder.current()  # starts a thread, which an interruption must not meet half-way
    before: fresh.Snapshot | None = None
    fresh.atexit_callbacks.watch()
    stop = stopping.StopRequest()
    stop.watch()

    def on_incident(incident: Incident) -> None:
        if not repetition.is_final:  # otherwise it is our own leaving, and no news
            repetition.count(incident)
            _tell(incident)

    def attempt(call: restart.CallWrapper) -> None:
        nonlocal before
        recorder.current().begin_iteration(call.iteration)
        if before is None:
            before = fresh.Snapshot.take()  # here, with what the restart core has set up
            record.tell("entered")
        else:
            before.restore()
            repetition.check()
        stop.enter(call)
        orders.on("restart", lambda order: call.request_restart(order["reason"], order["hung"]))
        try:
            start()
        except SystemExit as end:
            if end.code not in (None, 0):
                raise
        recorder.current().leave()

    wrapper = restart.Wrapper(
        soft_timeout=timedelta(seconds=timeouts["soft"]),
        hard_timeout=timedelta(seconds=timeouts["hard"]),
        barrier_timeout=timedelta(seconds=timeouts["barrier"]),
        completion_timeout=timedelta(seconds=timeouts["completion"]),
        on_incident=on_incident,
        incident_dir=str(Path(os.environ[RUN_DIR]) / "incidents"),
    )
    attempt.__annotations__["call"] = restart.CallWrapper
    try:
        wrapper(attempt)()  # type: ignore[call-arg]
    except RestartAbort as abort:
        record.tell("gave-up", reason=str(abort))
        _show_own_failure(abort.__cause__)
        sys.exit(f"ncclops: {abort}")


def _show_own_failure(cause: BaseException | None) -> None:
    """The exception that this rank itself raised, if it did, as it would look without us."""
    if isinstance(cause, Exception) and not isinstance(cause, RestartError):
        show = script.without_our_frames(sys.excepthook)
        show(type(cause), cause, cause.__traceback__)


class StopRepeating:
    """Stops the job when a restart in place will not mend it: the same exception from the same
    line again and again, and early in the run (``started``, seconds since the epoch) a plain
    mistake in the script, or a failure to start, which new processes may get over.

    All ranks get the same incidents, so all come to the same decision.
    """

    def __init__(self, started: float) -> None:
        self._started = started
        self._last: tuple[str, str] | None = None
        self._times = 0
        self._verdict: str | None = None

    def count(self, incident: Incident) -> None:
        """Take note of how an iteration ended."""
        if incident.exception is None:
            self._last = None
            return
        this = _place(incident)
        self._times = self._times + 1 if _is_same(this, self._last) else 1
        self._last = this
        early = incident.at - self._started < _EARLY_S
        if early and _is_mistake(incident.exception):
            self._verdict = "a mistake in the script"
        elif early and incident.iteration == 0 and _is_startup_failure(incident):
            self._verdict = "a failure to start"
        elif self._times >= _SAME_FAILURE_LIMIT:
            self._verdict = f"{self._times} times in a row at the same place"

    @property
    def is_final(self) -> bool:
        return self._verdict is not None

    def check(self) -> None:
        """Raise ``RestartAbort`` if the next iteration would end as the last one did."""
        if self._verdict is not None and self._last is not None:
            what, where = self._last
            raise RestartAbort(
                f"{what} ({where}): {self._verdict}, which no restart in place mends"
            )


def _is_same(this: tuple[str, str], last: tuple[str, str] | None) -> bool:
    """Whether two failures are one; where a place is unknown, by the exception alone."""
    if last is None or this[0] != last[0]:
        return False
    return this[1] == last[1] or _UNKNOWN in (this[1], last[1])


def _is_mistake(exception: str) -> bool:
    # A syntax error comes with its place in front: `File "train.py", line 3 … SyntaxError: …`.
    named = re.findall(r"\b([A-Z]\w+):", exception)
    name = named[-1] if exception.startswith("File ") and named else exception.partition(":")[0]
    kind = getattr(builtins, name, None)
    return isinstance(kind, type) and issubclass(kind, _MISTAKES)


def _is_startup_failure(incident: Incident) -> bool:
    text = f"{incident.exception} {incident.traceback}"
    return any(words in text for words in _STARTUP_WORDS)


def _place(incident: Incident) -> tuple[str, str]:
    """The exception's name, and where it was raised."""
    lines = [line.strip() for line in (incident.traceback or "").splitlines()]
    places = [line for line in lines if line.startswith("File ")]
    return str(incident.exception), places[-1] if places else _UNKNOWN


def _tell(incident: Incident) -> None:
    """The incident as events of the run: each rank its own fault, one rank the restart."""
    if incident.first_faulty_rank == incident.initial_rank:
        record.tell("fault", cause=incident.summary, kind=incident.cause)
    if incident.rank == 0:
        record.tell(
            "restart",
            iteration=incident.iteration + 1,
            cause=incident.summary,
            faulty_ranks=list(incident.faulty_ranks),
            ranks_lost=list(incident.ranks_lost),
            world_size=incident.world_size,
            phases_ms=dict(incident.phases_ms),
        )
