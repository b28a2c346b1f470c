"""Which nodes take no part in a job, after the check of all of them; pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ncclops.preflight import hand_over
from ncclops.preflight.edges.model import Cause, Verdict
from ncclops.preflight.edges.sentences import tell

_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class Conclusion:
    """``left_out`` are the nodes that take no part, by rank, and why. ``refused``: why the job
    cannot start at all, in one line; None if it can, without them."""

    left_out: Mapping[int, str] = field(default_factory=dict)
    refused: str | None = None


def conclude(
    verdict: Verdict,
    names: Sequence[str],
    *,
    active: int,
    serving: int | None,
    replaceable: bool,
    lost: Collection[int] = (),
) -> Conclusion:
    """What follows from ``verdict`` on the nodes ``names`` (by rank), of which ``active`` train.

    ``serving`` is the node that serves the job's store (None: none of them), without which there
    is no job. ``replaceable``: a spare may take another's place. ``lost`` nodes were lost during
    the check.
    """
    rank_of = [each.rank for each in verdict.hosts]
    why = dict.fromkeys(lost, "it was lost during the check")
    for absent in {*range(len(names))} - {*rank_of, *why}:
        why[absent] = "it took no part in the check: its nodes.log says more"
    for host, rank in zip(verdict.hosts, rank_of, strict=True):
        if rank is not None and (reason := hand_over.reason(host.findings)):
            why.setdefault(rank, reason.removeprefix("ncclops: "))
    open_causes: list[tuple[Cause, str]] = []
    for cause, told in zip(verdict.causes, tell(verdict), strict=True):
        if cause.severity != "FAIL" or cause.kind == "missing":
            continue
        convicted = [rank_of[each] for each in _convicted(cause)]
        for rank in convicted:
            if rank is not None:
                why.setdefault(rank, told.what)
        if not convicted:
            open_causes.append((cause, told.what))
    edges = [(rank_of[c.a[0]], rank_of[c.b[0]], what) for c, what in open_causes if _is_edge(c)]
    why |= _one_of_each(edges, {*why}, serving)
    if nobody := next((what for cause, what in open_causes if not _is_edge(cause)), None):
        return Conclusion(refused=f"{nobody}; no single node can be left out for that")
    return _possible(why, names, active=active, serving=serving, replaceable=replaceable)


def _possible(
    why: Mapping[int, str],
    names: Sequence[str],
    *,
    active: int,
    serving: int | None,
    replaceable: bool,
) -> Conclusion:
    if not why:
        return Conclusion()
    listed = [f"{names[rank]}: {text}" for rank, text in sorted(why.items())]
    more = f" (and {len(listed) - _SHOWN} more)" if len(listed) > _SHOWN else ""
    first = "; ".join(listed[:_SHOWN]) + more
    left = len(names) - len(why)
    if serving in why:
        return Conclusion(refused=f"{first}; {names[serving or 0]} serves the job's store")
    if not replaceable:
        return Conclusion(refused=f"{first}; with --rdzv-backend static no other node replaces it")
    if left < active:
        return Conclusion(refused=f"{first}; {left} nodes are left, and the job needs {active}")
    return Conclusion(left_out=dict(sorted(why.items())))


def _convicted(cause: Cause) -> tuple[int, ...]:
    """The hosts that are to blame, or the one that is all that the cause is about."""
    if not cause.hosts and len(cause.a) == 1 and not cause.b:
        return cause.a
    return cause.hosts


def _is_edge(cause: Cause) -> bool:
    return not cause.hosts and len(cause.a) == 1 and len(cause.b) == 1


def _one_of_each(
    edges: Sequence[tuple[int | None, int | None, str]], out: set[int], serving: int | None
) -> dict[int, str]:
    """A node of each edge that does not work, as few as a simple choice gets.

    First the one with most such edges; of two alike the later one, which is the spare.
    """
    chosen = dict[int, str]()
    left = [(a, b, what) for a, b, what in edges if a is not None and b is not None]
    while left := [each for each in left if not {each[0], each[1]} & (out | chosen.keys())]:
        nodes = {node for a, b, _ in left for node in (a, b) if node != serving}
        worst = max(nodes, key=lambda node: (sum(node in each[:2] for each in left), node))
        what = next(each[2] for each in left if worst in each[:2])
        chosen[worst] = f"{what}; one of both is left out"
    return chosen
