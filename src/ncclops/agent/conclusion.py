"""The verdict of a run that has ended: the decision on its last attempt, and what there is to show.

Written down before it is printed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ncclops.agent.job import Job
from ncclops.classify import Report
from ncclops.classify.model import Evidence
from ncclops.decision.deciding import AttemptDecision
from ncclops.errors import NcclopsError
from ncclops.exhausted import advice, described
from ncclops.exit_codes import DEFAULT, ExitCodes
from ncclops.goodput import Goodput
from ncclops.record import event_log
from ncclops.record.events import VerdictEvent
from ncclops.record.regular_file import is_there
from ncclops.record.run_directory import RunDirectory
from ncclops.record.story_record import Story
from ncclops.record.verdict_record import (
    FailureClass,
    FirstFailure,
    JudgedReceipt,
    VerdictRecord,
    WorkerEnding,
)

_EVIDENCE_LINES = 5


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A run of which nothing runs any more. ``attempts`` is how many there were, ``endings`` how
    this node's workers of the last one ended, ``decision`` what was decided on that; ``receipt`` is
    there if it could be judged, ``goodput`` if it could be measured."""

    job: Job
    attempts: int
    endings: Sequence[WorkerEnding]
    decision: AttemptDecision
    receipt: JudgedReceipt | None
    goodput: Goodput | None
    seconds: float


def _first_failure(failure: FirstFailure | None, story: Story | None) -> FirstFailure | None:
    """``failure`` with the rank that the story blames, where that is another one."""
    if failure is None or story is None or story.rank in (None, failure.rank):
        return failure
    return msgspec.structs.replace(failure, caused_by=story.rank)


def _complete(story: Story, ended: Ended) -> Story:
    from ncclops.diagnose.story import complete  # not loaded for nothing

    run, decision = ended.job.run, ended.decision
    return complete(
        story,
        event_log.read(run.paths.events),
        decision.gpu_faults,
        node=run.node,
        ended=decision.reason,
        why=(decision.retry or {}).get("reason", ""),
    )


def conclude(ended: Ended, *, with_story: bool = True) -> VerdictRecord:
    """The verdict, in ``verdict.json`` and ``events.jsonl``.

    What is told of a failure is made from the run's files.
    """
    job, decision = ended.job, ended.decision
    classification, story = decision.classification, decision.story if with_story else None
    if with_story and decision.outcome == "failed" and story is None and classification is not None:
        from ncclops.diagnose.story import tell  # not loaded for nothing

        story = tell(
            job.run.path, None, None, classification, node=job.run.node, attempt=ended.attempts - 1
        )
    verdict = VerdictRecord(
        run_id=job.run.run_id,
        outcome=decision.outcome,
        exit_code=decision.exit_code,
        next_action=decision.next_action,
        reason=decision.reason,
        attempts=ended.attempts,
        seconds=round(ended.seconds, 3),
        first_failure=_first_failure(decision.failure, story),
        ranks_lost=list(decision.ranks_lost),
        gpu_faults=list(decision.gpu_faults),
        slow_ranks=list(decision.slow_ranks),
        networks=list(decision.networks),
        workers=sorted(ended.endings, key=lambda ending: ending.rank),
        classification=None
        if classification is None
        else msgspec.convert(classification | {"decision": decision.retry}, FailureClass),
        receipt=ended.receipt,
        goodput=None if ended.goodput is None else ended.goodput.to_record(),
        story=None if story is None else _complete(story, ended),
    )
    return _write(job.run, verdict)


def conclude_crash(
    run: RunDirectory,
    error: Exception,
    *,
    codes: ExitCodes = DEFAULT,
    attempts: int,
    endings: Sequence[WorkerEnding],
    seconds: float,
) -> VerdictRecord:
    """The verdict where ``error`` ended the agent before there was one.

    An ``OSError`` is no mistake of ncclops, nor an error that it knows (the agent was killed), nor
    is a want of memory, processes or space.
    """
    is_ours = not isinstance(error, OSError | NcclopsError) and advice(error) is None
    what = f"{type(error).__name__}: {error}" if is_ours else described(error)
    where = f"; see {run.shown(run.paths.agent_log)}" if is_there(run.paths.agent_log) else ""
    reason = f"internal error: {what}{where}, and report it"
    verdict = VerdictRecord(
        run_id=run.run_id,
        outcome="failed",
        exit_code=codes.unknown,
        next_action="unknown",
        reason=reason if is_ours else f"the agent could not go on: {what}",
        attempts=attempts,
        seconds=round(seconds, 3),
        first_failure=None,
        workers=sorted(endings, key=lambda ending: ending.rank),
    )
    return verdict if is_there(run.paths.verdict) else _write(run, verdict)


def _write(run: RunDirectory, verdict: VerdictRecord) -> VerdictRecord:
    run.write_verdict(verdict)
    run.add(
        VerdictEvent(
            outcome=verdict.outcome,
            exit_code=verdict.exit_code,
            reason=verdict.reason,
            what=verdict.story.what if verdict.story and verdict.outcome == "failed" else "",
        )
    )
    return verdict


def evidence(found: Report) -> list[dict[str, Any]]:
    """The lines that prove ``found``, as many as are worth repeating."""
    return [line.as_json() for line in proofs(found)]


def proofs(found: Report) -> Sequence[Evidence]:
    """The same, as the classifier has them."""
    return found.evidence[:_EVIDENCE_LINES]


def is_healthy(receipt: JudgedReceipt | None) -> bool | None:
    """Whether ``receipt`` is healthy; None where it could not be judged."""
    return None if receipt is None else receipt.healthy
