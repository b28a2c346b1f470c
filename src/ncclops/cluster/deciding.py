"""What a job of several nodes comes to when an attempt has ended on all of them. Pure.

One agent decides and all others read it, so a decision is a record: values and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from ncclops.agent.coordinator import Agreed, Choose, Settled
from ncclops.classify.model import Verdict
from ncclops.classify.policy import Attempt
from ncclops.cluster.round_state import RoundState
from ncclops.cluster.shared_log import Record
from ncclops.decision.outcome import SIGNAL_EXIT_BASE, Ending, FirstFailure
from ncclops.decision.retrying import Escalated, NextAttempt
from ncclops.errors import ReceiptMissing


def decide(
    round_state: RoundState,
    *,
    in_process: bool,
    require_receipt: bool,
    replaceable: bool,
    choose: Choose,
) -> dict[str, Any]:
    """The fields of the ``decision`` record; every living node has ended by now.

    ``replaceable``: a node that is lost may be replaced by a spare in another round.
    """
    if round_state.stop is not None:
        return _stopped(round_state, round_state.stop)
    well = sum(record["well"] for record in round_state.ended.values())
    if _completed(round_state, in_process, well):
        return _completed_decision(round_state, well, require_receipt)
    return _failed(round_state, replaceable, choose)


def _stopped(round_state: RoundState, stop: Record) -> dict[str, Any]:
    where = round_state.name(stop["node"])
    if stop["signal"] is not None:
        reason = f"stopped by {stop['reason']} on {where}"
        return _end("interrupted", SIGNAL_EXIT_BASE + int(stop["signal"]), reason)
    forced = any(record["failed"] for record in round_state.ended.values())
    return _end("stopped", int(forced), f"stopped on {where}: {stop['reason']}")


def _completed(round_state: RoundState, in_process: bool, well: int) -> bool:
    if round_state.failed is not None:
        return False
    if in_process:
        return well > 0
    lost = [rank for rank in round_state.lost if rank not in round_state.idle]
    return not lost and not any(record["failed"] for record in round_state.ended.values())


def _completed_decision(
    round_state: RoundState, well: int, require_receipt: bool
) -> dict[str, Any]:
    lost = "".join(
        f"; {round_state.name(rank)} was lost ({record['why']}), the others went on"
        for rank, record in round_state.lost.items()
        if rank not in round_state.idle
    )
    nodes = len(round_state.ended)
    reason = f"{well} worker{'s' * (well != 1)} exited 0 on {nodes} node{'s' * (nodes != 1)}{lost}"
    if require_receipt and not any(record["healthy"] for record in round_state.ended.values()):
        reason += "; --require-receipt asked for a healthy receipt, and there is none"
        return _end("no-receipt", ReceiptMissing.exit_code, reason)
    return _end("completed", 0, reason)


def _failed(round_state: RoundState, replaceable: bool, choose: Choose) -> dict[str, Any]:
    blamed = round_state.blamed()
    lost = next(iter(round_state.lost), None)
    if lost is not None and round_state.failed is None:
        reason = f"{round_state.name(lost)} was lost: {round_state.lost[lost]['why']}"
        verdict, failure, escalated = _verdict_of_loss(reason), None, None
    elif blamed is None:
        return _end("failed", 1, "no node has a failure to show, and none finished")
    else:
        verdict, failure, escalated = blamed["verdict"], blamed["failure"], blamed["escalated"]
        reason = f"{_what_failed(failure)} on {round_state.name(blamed['node'])}"
    progressed = any(record["progressed"] for record in round_state.ended.values())
    decision, following = choose(
        verdict,
        escalated=None if escalated is None else Escalated.of(escalated),
        progressed=progressed,
        replaces=replaceable and failure is None,
    )
    if round_state.lost and not replaceable and following is not None:
        following = None
        reason += "; with --rdzv-backend static nobody can take its place, so there is no retry"
    attempt = Attempt.of(Verdict.from_json(verdict), progressed=progressed).as_json()
    return _end("failed", 1, reason) | {
        "failure": failure,
        "history": attempt,
        "decided": decision.as_json(),
        "verdict": verdict,
        "following": None if following is None else _following_json(following),
    }


def _what_failed(failure: Mapping[str, Any] | None) -> str:
    if failure is None:
        return "a worker failed"
    return f"rank {failure['ending']['rank']} {Ending(**failure['ending']).how()}"


def _verdict_of_loss(reason: str) -> dict[str, Any]:
    return Verdict(
        class_="peer-exit",
        confidence=0.9,
        summary=reason,
        retry_policy="replace-node",
        retry_reason="a node was lost, and another one may take its place",
        remedy=("look at the host's own log, its network and its scheduler",),
    ).as_json() | {"evidence": []}


def _end(outcome: str, code: int, reason: str) -> dict[str, Any]:
    return {
        "outcome": outcome,
        "exit_code": code,
        "reason": reason,
        "failure": None,
        "history": None,
        "decided": None,
        "verdict": None,
        "following": None,
    }


def settled(record: Record) -> Settled:
    """What a ``decision`` record means to an agent."""
    following = record["following"]
    return Settled(
        following=None
        if following is None
        else NextAttempt(
            reason=following["reason"],
            cooldown=timedelta(seconds=following["cooldown_s"]),
            environ=following["environ"],
        ),
        agreed=Agreed(
            outcome=record["outcome"],
            exit_code=record["exit_code"],
            reason=record["reason"],
            failure=failure_from(record["failure"]),
        ),
        attempt=None if record["history"] is None else Attempt.from_json(record["history"]),
        decided=record["decided"],
        verdict=record["verdict"],
    )


def failure_json(failure: FirstFailure | None) -> dict[str, Any] | None:
    return None if failure is None else asdict(failure)


def failure_from(data: Mapping[str, Any] | None) -> FirstFailure | None:
    """The inverse of ``failure_json``."""
    return None if data is None else FirstFailure(**{**data, "ending": Ending(**data["ending"])})


def _following_json(following: NextAttempt) -> dict[str, Any]:
    return {
        "reason": following.reason,
        "cooldown_s": following.cooldown.total_seconds(),
        "environ": following.environ,
    }
