"""The one decision: the result of an attempt, and whether another one follows. Pure.

From how the attempt ended on each node; a single node is a list of one. The first row that holds:

    a launcher was killed          failed, not tried again
    asked to stop                  interrupted (by a signal) or stopped
    a spare that was not needed    stopped
    nothing failed                 completed, or no-receipt
    anything else                  failed; tried again if the retry policy or the operator allows

A request to stop that came after the attempt had failed changes nothing but that nothing follows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from ncclops.classify import wording
from ncclops.classify.model import Classification
from ncclops.classify.policy import PastAttempt
from ncclops.decision.next_action import next_action
from ncclops.decision.node_end import JobRules, NodeEnd
from ncclops.decision.outcome import SIGNAL_EXIT_BASE, describe_ending
from ncclops.decision.retrying import Escalated, NextAttempt, next_attempt
from ncclops.errors import EXIT_INTERNAL_ERROR
from ncclops.exit_codes import NextAction
from ncclops.rank_lists import ranks_named
from ncclops.record.event_values import GpuFault, NetworkUse, SlowRank
from ncclops.record.story_record import Story
from ncclops.record.verdict_record import FirstFailure, Outcome, WorkerEnding

Random = Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class AttemptDecision:
    """The result of an attempt. ``following`` is the attempt after it; None: the job has ended.

    ``failure`` and ``classification`` (JSON, with evidence) are what it was judged by, None where
    it did not fail (of a job that was stopped, ``failure`` is a rank's meanwhile); ``story`` tells
    it. ``ranks_lost`` are those without which a job that restarts in place has finished.
    ``gpu_faults``, ``slow_ranks`` and ``networks`` are those of all nodes, ``replaced`` the nodes,
    by their rank, that take no part in what follows. ``attempt`` is what the job's history has to
    remember, ``retry`` the retry policy's decision with the fields of a ``retry`` event.
    ``next_action`` is what may mend a job that has failed, None where it has not.
    """

    outcome: Outcome
    exit_code: int
    reason: str
    next_action: NextAction | None = None
    failure: FirstFailure | None = None
    ranks_lost: tuple[int, ...] = ()
    gpu_faults: tuple[GpuFault, ...] = ()
    slow_ranks: tuple[SlowRank, ...] = ()
    networks: tuple[NetworkUse, ...] = ()
    replaced: tuple[int, ...] = ()
    classification: dict[str, Any] | None = None
    story: Story | None = None
    attempt: PastAttempt | None = None
    retry: dict[str, Any] | None = None
    following: NextAttempt | None = None


def decide(nodes: Sequence[NodeEnd], rules: JobRules, *, random: Random) -> AttemptDecision:
    """The decision on the attempt that ended on ``nodes`` as described.

    ``random`` gives numbers from 0 to 1, for the pause before a retry.
    """
    decision = _decide(nodes, rules, random)
    slow = [rank for node in nodes for rank in node.slow_ranks]
    networks = tuple(node.network for node in nodes if node.network is not None)
    faults = tuple(_gpu_faults(nodes))
    return replace(decision, gpu_faults=faults, slow_ranks=tuple(slow), networks=networks)


def _decide(nodes: Sequence[NodeEnd], rules: JobRules, random: Random) -> AttemptDecision:
    present = [node for node in nodes if not node.idle]
    if orphan := next((node for node in nodes if node.launcher_lost), None):
        return AttemptDecision(
            outcome="failed",
            exit_code=rules.exit_codes.unknown,
            next_action="unknown",
            reason=f"the launcher was killed{_on(orphan, nodes)}; the agent stopped the workers",
            failure=orphan.failure,
            classification=orphan.classification,
        )
    if stopped := next((node for node in nodes if node.stop is not None), None):
        return _stopped(stopped, nodes)
    refused = next((node.cannot_start for node in present if node.cannot_start), None)
    if refused is not None and not refused.needed:
        return AttemptDecision(
            outcome="stopped", exit_code=refused.exit_code, reason=refused.reason
        )
    if _is_completed(present, rules):
        return _completed(present, nodes, rules)
    return _failed(present, nodes, rules, random)


def _stopped(asked: NodeEnd, nodes: Sequence[NodeEnd]) -> AttemptDecision:
    assert asked.stop is not None
    failures = [node.failure for node in nodes if node.failure is not None]
    failed = {failure.rank for failure in failures}
    request, on = asked.stop, _on(asked, nodes)
    # The exit code of a command to stop says so whenever a worker had to be ended.
    ends = [node.bad if request.signum is None else node.forced for node in nodes]
    bad = [ending.rank for endings in ends for ending in endings]
    how = "".join(
        f"; rank {each.rank} failed meanwhile ({each.message or describe_ending(each)})"
        for each in failures
    )
    if forced := [rank for rank in bad if rank not in failed]:
        how += f"; {ranks_named(forced)} did not exit cleanly"
    failure = next(iter(failures), None)
    if request.signum is not None:
        return AttemptDecision(
            outcome="interrupted",
            exit_code=SIGNAL_EXIT_BASE + request.signum,
            reason=f"stopped by {request.signum.name}{on}{how}",
            failure=failure,
        )
    return AttemptDecision(
        outcome="stopped",
        exit_code=1 if bad else 0,
        reason=f"requested{on}: {request.reason}{how}",
        failure=failure,
    )


def _is_completed(present: Sequence[NodeEnd], rules: JobRules) -> bool:
    if any(node.fatal or node.failed_first or node.cannot_start for node in present):
        return False
    if not any(node.lost is not None or node.failed or node.bad for node in present):
        return True
    return rules.losses_allowed and any(node.well for node in present)


def _completed(
    present: Sequence[NodeEnd], nodes: Sequence[NodeEnd], rules: JobRules
) -> AttemptDecision:
    well = sum(node.well for node in present)
    bad = [ending for node in present for ending in node.bad]
    gone = _gone_unseen(present)
    lost = tuple(sorted(gone.union(ending.rank for ending in bad)))
    parts = [
        f"{wording.describe_loss(node.name, node.lost)}, the others went on"
        for node in present
        if node.lost is not None
    ]
    why = {rank: why for node in present for rank, why in node.why_ended.items()}
    why |= {fault.rank: str(fault) for fault in _gpu_faults(present)}
    went_on = [*_alike(bad, why)]
    if gone and not any(node.lost is not None for node in present):
        went_on.append(_of_ranks(gone, "was lost"))
    parts += [f"{how}, the others went on" for how in went_on]
    after = [e for node in present for e in node.endings if e.ok and e.exit_code != 0]
    parts += [f"{how}, after the script had ended well" for how in _alike(after, {})]
    well -= len(after)
    finished = sum(node.lost is None for node in present)
    on = f" on {finished} node{'s' * (finished != 1)}" if len(nodes) > 1 else ""
    reason = "; ".join([*parts, f"{well} worker{'s' * (well != 1)} exited 0{on}"])
    if rules.require_receipt and not any(node.healthy for node in present):
        # Not judged is neither healthy nor missing, and has an exit code of its own.
        unjudged = any(node.healthy is None for node in present)
        if unjudged:
            reason += "; the receipt could not be judged, by an error of ncclops (see agent.log)"
        else:
            reason += "; --require-receipt asked for a healthy receipt, and there is none"
        code = EXIT_INTERNAL_ERROR if unjudged else rules.exit_codes.no_receipt
        return AttemptDecision(outcome="no-receipt", exit_code=code, reason=reason, ranks_lost=lost)
    return AttemptDecision(outcome="completed", exit_code=0, reason=reason, ranks_lost=lost)


def _gone_unseen(present: Sequence[NodeEnd]) -> set[int]:
    """Ranks that were lost to the others, and whose end no node has seen."""
    seen = {ending.rank for node in present for ending in node.endings}
    return {rank for node in present for rank in node.without} - seen


def _alike(endings: Sequence[WorkerEnding], why: Mapping[int, str]) -> Iterator[str]:
    """How ranks ended, those that ended alike together; ``why``: where that is known, by rank."""
    by_ending: dict[str, list[int]] = {}
    for ending in endings:
        because = f" ({why[ending.rank]})" if ending.rank in why else ""
        by_ending.setdefault(describe_ending(ending) + because, []).append(ending.rank)
    for how, ranks in by_ending.items():
        yield _of_ranks(ranks, how)


def _of_ranks(ranks: Collection[int], how: str) -> str:
    return f"{ranks_named(ranks)} {how if len(ranks) == 1 else how.replace('was ', 'were ', 1)}"


def _failed(
    present: Sequence[NodeEnd], nodes: Sequence[NodeEnd], rules: JobRules, random: Random
) -> AttemptDecision:
    blamed = _blamed(present)
    reason, classification = _what_failed(blamed, nodes), blamed.classification
    for fault in _gpu_faults(present):
        reason += f"; {fault}"
    if blamed.lost is not None:
        classification = wording.loss(reason).as_json() | {"evidence": []}
    story = _story(blamed, present)
    if broken := next((node for node in present if node.store_ended is not None), None):
        # A rank that misses its store fails because of that, whatever it says.
        store = f"the store server {broken.store_ended}{_on(broken, nodes)}"
        reason = f"{store}; {reason}"
        if story is not None:
            story = msgspec.structs.replace(story, what=f"{store}; {story.what}")
        said = "unknown" if classification is None else classification["class"]
        if blamed.lost is None and said in wording.STORE_MISSED:
            missed, evidence = wording.store_loss(store), (classification or {}).get("evidence", [])
            classification = missed.as_json() | {"evidence": evidence}
            story = None if story is None else _judged(story, missed)
    # What ends here has not been judged by the retry policy: the run is to end in any case.
    action: NextAction = "unknown" if blamed.cut_off is None else "retry"
    code = rules.exit_codes.of(action)
    if blamed.cannot_start is not None:
        refused, classification = blamed.cannot_start, None
        action, code = refused.next_action, refused.exit_code
    if blamed.cut_off is not None:
        reason += f"; {blamed.cut_off}"
    decided = AttemptDecision(
        outcome="failed",
        exit_code=code,
        reason=reason,
        next_action=action,
        failure=None if blamed.cannot_start else blamed.failure,
        classification=classification,
        story=story,
    )
    nothing_follows = blamed.cut_off is not None or blamed.cannot_start is not None
    if nothing_follows or any(node.stopping for node in nodes):
        return decided
    return _retried(decided, blamed, nodes, rules, random)


def _retried(
    decided: AttemptDecision,
    blamed: NodeEnd,
    nodes: Sequence[NodeEnd],
    rules: JobRules,
    random: Random,
) -> AttemptDecision:
    """``decided`` with the retry policy's decision, and the attempt that follows, if one does."""
    found = decided.classification
    verdict = _UNKNOWN if found is None else Classification.from_json(found)
    progressed = any(node.progressed for node in nodes)
    broken = tuple(rank for rank, node in enumerate(nodes) if node.gpu_faults)
    others_do, escalated = _others_do(nodes, rules), _escalated(blamed, nodes)
    retry, following = next_attempt(
        rules.retry,
        verdict,
        history=rules.history,
        granted_used=rules.granted_used,
        progressed=progressed,
        random=random,
        escalated=escalated,
        replaces=rules.replaceable and (blamed.lost is not None or (bool(broken) and others_do)),
    )
    action = next_action(
        verdict,
        retry,
        progressed=progressed,
        escalated=escalated,
        gpu_broken=bool(broken),
    )
    reason = decided.reason
    if following is not None and not rules.replaceable and any(n.lost is not None for n in nodes):
        following = None
        reason += "; no retry: with --rdzv-backend static no other node can take its place"
    if following is not None and broken:
        why = "; ".join([following.reason, *map(str, _gpu_faults(nodes))])
        # On a broken GPU no process is started again.
        following = replace(following, reason=why) if others_do else None
    return replace(
        decided,
        exit_code=rules.exit_codes.of(action),
        next_action=action,
        reason=reason,
        replaced=() if following is None else broken,
        attempt=PastAttempt.of(verdict, progressed=progressed),
        retry=retry.as_json(),
        following=following,
    )


def _others_do(nodes: Sequence[NodeEnd], rules: JobRules) -> bool:
    """Whether the job can go on without the nodes that have broken GPUs."""
    able = [node for node in nodes if node.lost is None and not node.gpu_faults]
    keeps_store = not any(node.hosts_store for node in nodes if node.gpu_faults)
    return rules.replaceable and keeps_store and len(able) >= rules.nodes_needed


_UNKNOWN = Classification(class_="unknown", confidence=0.0, summary="nothing was classified")


def _blamed(present: Sequence[NodeEnd]) -> NodeEnd:
    """The node to judge a failed attempt by."""
    ended = [node for node in present if node.lost is None]
    lost = next((node for node in present if node.lost is not None), None)
    first = next((node for node in present if node.failed_first), None)
    if first is not None and first.lost is None:
        return _nearest(first, present)
    if first is None and lost is not None:
        return lost
    # A node that ended with a cause of its own before one that only lost its peers.
    failed = [node for node in ended if node.failed] or [node for node in ended if node.bad]
    return max(failed, key=_confidence, default=lost or present[0])


def _escalated(blamed: NodeEnd, nodes: Sequence[NodeEnd]) -> Escalated | None:
    """What the workers of the blamed node ask for, or those of another who know more."""
    asked = blamed.escalated
    if asked is None or asked.knows_failure:
        return asked
    others = [node.escalated for node in nodes if node.escalated is not None]
    return next((other for other in others if other.knows_failure), asked)


def _nearest(first: NodeEnd, present: Sequence[NodeEnd]) -> NodeEnd:
    """The node of the rank that ``first`` tells of, where its log says more surely what failed."""
    if first.story is None:
        return first
    rank = first.story.rank
    of_rank = (node for node in present if rank in _ranks_of(node) and node.story is not None)
    found = next((node for node in of_rank if node.story and node.story.rank == rank), first)
    return max(first, found, key=_confidence)


def _story(blamed: NodeEnd, present: Sequence[NodeEnd]) -> Story | None:
    """The blamed node's, unless another one knows more: whom its ranks waited for, or the lines of
    the rank that it tells of."""
    if blamed.lost is not None or blamed.cannot_start is not None or blamed.story is None:
        return None
    rank = blamed.story.rank
    if blamed.story.waited:
        told = (node.story for node in present if node.story is not None)
        nearer = next((story for story in told if not story.waited), blamed.story)
        return _of_class(nearer, blamed.story)
    if rank in _ranks_of(blamed):
        return blamed.story
    owner = next((node for node in present if rank in _ranks_of(node)), None)
    if owner is None:
        return blamed.story
    if owner.story is None or owner.story.rank != rank:
        return msgspec.structs.replace(blamed.story, host=blamed.story.host or owner.name)
    return _of_class(owner.story, blamed.story)


def _judged(story: Story, found: Classification) -> Story:
    return msgspec.structs.replace(
        story,
        class_=found.class_,
        confidence=found.confidence,
        summary=found.summary,
        next_steps=list(found.remedy),
    )


def _of_class(story: Story, classified: Story) -> Story:
    """``story`` as a failure of the class of ``classified``, with what proves that."""
    fields = ("class_", "confidence", "summary", "proof")
    return msgspec.structs.replace(story, **{name: getattr(classified, name) for name in fields})


def _ranks_of(node: NodeEnd) -> set[int]:
    return {ending.rank for ending in node.endings}


def _confidence(node: NodeEnd) -> float:
    return float((node.classification or {}).get("confidence", 0.0))


def _what_failed(blamed: NodeEnd, nodes: Sequence[NodeEnd]) -> str:
    if blamed.lost is not None:
        return wording.describe_loss(blamed.name, blamed.lost)
    if blamed.cannot_start is not None:
        return f"{blamed.cannot_start.reason}{_on(blamed, nodes)}"
    if blamed.hang is not None:
        return f"hang: {blamed.hang}{_on(blamed, nodes)}"
    unasked = [each for each in blamed.bad if not each.asked_to_stop]
    ending = blamed.failure or next(iter([*unasked, *blamed.bad]), None)
    if ending is None:
        return f"a worker failed{_on(blamed, nodes)}"
    why = blamed.why_ended.get(ending.rank)
    because = "" if why is None else f" ({why})"
    return f"rank {ending.rank} {describe_ending(ending)}{because}{_on(blamed, nodes)}"


def _on(node: NodeEnd, nodes: Sequence[NodeEnd]) -> str:
    """Which node, where there are several."""
    return f" on {node.name}" if len(nodes) > 1 else ""


def _gpu_faults(nodes: Sequence[NodeEnd]) -> list[GpuFault]:
    return [fault for node in nodes for fault in node.gpu_faults]
