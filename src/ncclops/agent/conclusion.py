"""The verdict of a run, from what is left of its last attempt; written down before it is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ncclops.agent import verdict_report
from ncclops.agent.attempt import RunningAttempt
from ncclops.agent.coordinator import Settled
from ncclops.agent.job import Job
from ncclops.agent.live_scan import Diagnosis
from ncclops.classify import Report
from ncclops.classify.model import Evidence
from ncclops.decision.outcome import FirstFailure, StopRequest, Verdict, judge
from ncclops.errors import ReceiptMissing
from ncclops.record.events import VerdictEvent

_EVIDENCE_LINES = 5


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A run of which nothing runs any more. ``receipt`` is ``ncclops.receipt/1``, if it could be
    judged, ``stopped_by`` the request to stop where that decided the outcome."""

    job: Job
    last: RunningAttempt
    diagnosis: Diagnosis
    settled: Settled
    receipt: dict[str, Any] | None
    stopped_by: StopRequest | None
    launcher_lost: bool
    seconds: float


def conclude(ended: Ended) -> Verdict:
    """The verdict, in ``verdict.json`` and ``events.jsonl``."""
    job, last = ended.job, ended.last
    in_order = last.team.endings()
    outcome, code, reason = judge(
        in_order,
        stopped_by=ended.stopped_by,
        launcher_lost=ended.launcher_lost,
        losses_allowed=job.restarts_in_process,
        cannot_start=last.cannot_start,
        hung=None if last.hang is None else f"hang: {last.hang.reason}",
    )
    agreed = ended.settled.agreed
    if agreed is not None and ended.stopped_by is None:
        outcome, code, reason = agreed.outcome, agreed.exit_code, agreed.reason
    elif outcome == "completed" and job.require_receipt and not is_healthy(ended.receipt):
        outcome, code = "no-receipt", ReceiptMissing.exit_code
        reason += "; --require-receipt asked for a healthy receipt, and there is none"
    if outcome == "failed" and ended.settled.alone:
        reason += f"; {ended.settled.alone}"
    failed = outcome == "failed" and last.cannot_start is None
    verdict = Verdict(
        run_id=job.run.run_id,
        outcome=outcome,
        exit_code=code,
        reason=reason,
        attempts=last.number + 1,
        seconds=round(ended.seconds, 3),
        first_failure=_first_failure(ended) if failed else None,
        workers=sorted(in_order, key=lambda ending: ending.rank),
        classification=_classification(ended) if failed else None,
        receipt=ended.receipt,
        goodput=verdict_report.measure_goodput(job.run),
    )
    job.run.write_verdict(verdict.to_json())
    job.run.add(VerdictEvent(outcome=outcome, exit_code=code, reason=reason))
    return verdict


def evidence(found: Report) -> list[dict[str, Any]]:
    """The lines that prove ``found``, as many as are worth repeating."""
    return [line.as_json() for line in proofs(found)]


def proofs(found: Report) -> Sequence[Evidence]:
    """The same, as the classifier has them."""
    return found.evidence[:_EVIDENCE_LINES]


def is_healthy(receipt: dict[str, Any] | None) -> bool:
    return receipt is not None and receipt["verdict"] == "healthy"


def _first_failure(ended: Ended) -> FirstFailure | None:
    """The failure to show first: the one that all nodes have agreed on, or our own."""
    agreed, last = ended.settled.agreed, ended.last
    if agreed is not None:
        return agreed.failure
    return verdict_report.first_failure(ended.job.run, last.team.blamed_first(), last.number)


def _classification(ended: Ended) -> dict[str, Any]:
    decided = {"decision": ended.settled.decided}
    if ended.settled.verdict is not None:
        return {**ended.settled.verdict, **decided}
    found = ended.diagnosis.report
    return found.verdict.as_json() | {"evidence": evidence(found)} | decided
