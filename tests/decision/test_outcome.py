"""The verdict as a document."""

from __future__ import annotations

from typing import Any

from ncclops.record.verdict_record import VERDICT, FirstFailure, VerdictRecord, WorkerEnding


def ending(rank: int, exit_code: int | None = 0, **more: Any) -> WorkerEnding:
    defaults = {"pid": 100 + rank, "signal": None, "seconds": 1.0}
    return WorkerEnding(rank=rank, exit_code=exit_code, **(defaults | more))


def test_the_document_carries_the_failure_flat() -> None:
    failed = ending(1, 1)
    verdict = VerdictRecord(
        run_id="r",
        outcome="failed",
        exit_code=1,
        reason="rank 1 exited with code 1",
        attempts=1,
        seconds=2.0,
        first_failure=FirstFailure.of(failed, message="KeyError: 'x'", tail=[], log="l", host="n1"),
        workers=[ending(0), failed],
    )
    document = VERDICT.to_json(verdict)
    assert document["schema"] == "ncclops.verdict/1"
    assert document["first_failure"]["rank"] == 1
    assert document["first_failure"]["message"] == "KeyError: 'x'"
    assert [worker["rank"] for worker in document["workers"]] == [0, 1]
