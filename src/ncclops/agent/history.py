"""The attempts of a job, kept beside its runs, so that they outlive the agent that counted them.

A job that the scheduler starts again (Slurm's requeue) gets a new agent and a new run directory,
and must not get new retries with them. The job is identified by ``NCCLOPS_JOB_ID``, or by the
scheduler's number if it was requeued; several steps of one allocation are separate jobs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ncclops.classify.policy import PastAttempt
from ncclops.record.line_writer import LineWriter
from ncclops.record.lines import read_records
from ncclops.record.paths import job_history
from ncclops.schedulers.allocation import find_allocation

JOB_ID = "NCCLOPS_JOB_ID"
_FLUSH_LIMIT_S = 5.0


class JobHistory:
    """Failed attempts of one job, oldest first. Without a ``path`` it is kept in memory alone."""

    def __init__(self, path: Path | None, earlier: list[PastAttempt]) -> None:
        self.attempts = earlier
        self.earlier = len(earlier)  # of agents before this one
        self._writer = None if path is None else LineWriter(path, lambda error: None)  # noqa: ARG005

    @classmethod
    def of_job(cls, environ: Mapping[str, str], runs: Path) -> JobHistory:
        """The history of the job that ``environ`` names, in ``runs``/jobs."""
        explicit, allocation = environ.get(JOB_ID), find_allocation(environ)
        name = explicit or allocation.job
        if name is None:
            return cls(None, [])
        path = job_history(runs, re.sub(r"[^A-Za-z0-9._-]", "_", name))
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
        continues = explicit is not None or allocation.requeued
        if not continues:
            with suppress(OSError):
                path.unlink(missing_ok=True)  # an earlier step's, in the same allocation
        return cls(path, read_records(path, _decode) if continues else [])

    def adopt(self, attempts: list[PastAttempt]) -> None:
        """Take over what other agents of the job know, where that is more."""
        if len(attempts) > len(self.attempts):
            self.attempts = list(attempts)

    def add(self, attempt: PastAttempt) -> None:
        """Append ``attempt``. If the file cannot be written, later agents do not count it."""
        self.attempts.append(attempt)
        if self._writer is not None:
            self._writer.add(json.dumps(attempt.as_json()).encode() + b"\n")

    def flush(self) -> None:
        """Wait until it is in the file, as long as a disk that works takes at most."""
        if self._writer is not None:
            self._writer.flush(_FLUSH_LIMIT_S)


def _decode(line: bytes) -> PastAttempt | None:
    try:
        return PastAttempt.from_json(json.loads(line))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
