"""How a run ended, for Python: ``verdict.json`` as a typed value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from os import PathLike
from pathlib import Path
from typing import Any

from ncclops.errors import UsageError
from ncclops.exit_codes import NextAction
from ncclops.given_path import given_path
from ncclops.record.document_kind import load_object
from ncclops.record.paths import RunPaths
from ncclops.record.verdict_record import VERDICT, Outcome, VerdictRecord

__all__ = ["Outcome", "RunVerdict", "read_verdict"]


@dataclass(frozen=True, kw_only=True)
class RunVerdict:
    """The result of a run; ``ncclops.verdict/1`` in the contracts describes ``document``.

    ``failed_rank`` is the rank that began a failure, ``failure_class`` and ``remedy`` are of that;
    ``failure_class`` is one of ``ncclops classify --list``. ``receipt`` is the judgement of the
    five rules (``"healthy"`` or what is missing), None where none could be made. ``goodput`` is the
    share of the time that went into training, from 0 to 1, None where the run does not show it.
    ``ranks_lost`` are those without which a job that restarts in place has finished. ``what`` says
    in one sentence who failed, how and where, and ``next_action`` what may mend it; both are None
    of a job that has not failed, and in what older versions have written.
    """

    run_dir: Path
    run_id: str
    outcome: Outcome
    exit_code: int
    reason: str
    attempts: int
    duration: timedelta
    failed_rank: int | None
    failure_class: str | None
    remedy: tuple[str, ...]
    receipt: str | None
    goodput: float | None
    ranks_lost: tuple[int, ...]
    what: str | None = None
    next_action: NextAction | None = None
    document: Mapping[str, Any]

    @property
    def ok(self) -> bool:
        """Whether the job completed, with its receipt where one was required."""
        return self.outcome == "completed"


def read_verdict(run_dir: str | PathLike[str]) -> RunVerdict:
    """The verdict of the run in ``run_dir``; any thread.

    Raises ``UsageError`` where there is none (the run has not ended, or its agent was killed), and
    where it cannot be read or is damaged.
    """
    path = RunPaths(given_path(run_dir, "a run directory")).verdict
    document = load_object(path, VERDICT.advice)
    if document is None:
        raise UsageError(
            f"{run_dir} has no verdict: `ncclops status {run_dir}` shows whether the run goes on"
        )
    return _of_record(path.parent.resolve(), VERDICT.parse(document, path), document)


def _failed_rank(record: VerdictRecord) -> int | None:
    first = record.first_failure
    if first is None:
        return None
    return first.rank if first.caused_by is None else first.caused_by


def _of_record(run_dir: Path, record: VerdictRecord, document: Mapping[str, Any]) -> RunVerdict:
    found = record.classification
    return RunVerdict(
        run_dir=run_dir,
        run_id=record.run_id,
        outcome=record.outcome,
        exit_code=record.exit_code,
        reason=record.reason,
        attempts=record.attempts,
        duration=timedelta(seconds=record.seconds),
        failed_rank=_failed_rank(record),
        failure_class=None if found is None else found.class_,
        remedy=() if found is None else tuple(found.remedy),
        receipt=None if record.receipt is None else record.receipt.verdict,
        goodput=None if record.goodput is None else record.goodput.ratio,
        ranks_lost=tuple(record.ranks_lost),
        what=None if record.story is None else record.story.what,
        next_action=record.next_action,
        document=document,
    )
