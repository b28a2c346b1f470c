"""The one authority over liveness: each node's part in finding that the job hangs.

A node looks at its own ranks, tells the other nodes what it thinks of them where that bears on
theirs, and judges all ranks of the job. All nodes come to the same verdict; the node of the first
culprit acts. Pure: readings and times come in, findings and verdicts go out (the edges are
``ncclops.agent.hang_watch`` and, between nodes, a coordinator).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

from ncclops.health.evidence import Reading, Tracker
from ncclops.health.hang import HangFinding, HangLimits, HangVerdict, assess, judge
from ncclops.health.training import Training, shows_steps

# So often per window, within these bounds: a look costs a few reads of /proc for each process.
_LOOKS_PER_WINDOW = 20
_SELDOM, _OFTEN = timedelta(seconds=30), timedelta(milliseconds=100)
# Of the time between two looks that were further apart, only so many pauses count: the machine or
# the agent stood still, and what did not move meanwhile had no chance to.
_COUNTED_PAUSES = 2
# Where there are other nodes, a verdict holds for so many looks before anything is done: they have
# to have time to tell of a phase that ranks of this node wait for.
_CONFIRMING_LOOKS = 3


@dataclass(frozen=True, kw_only=True)
class NodeView:
    """What a node says of its ranks to the other nodes of a job.

    ``ranks`` is on how many the script has not ended. ``findings`` are those that bear on the ranks
    of other nodes: of ranks that are stuck, in a declared phase, or on which it has ended.
    ``shows_steps``: a rank has completed steps.
    """

    ranks: int
    findings: tuple[HangFinding, ...] = ()
    shows_steps: bool = False

    @classmethod
    def of(cls, findings: Sequence[HangFinding], *, shows_steps: bool = False) -> NodeView:
        """The view of a node whose ranks are as in ``findings``."""
        telling = tuple(f for f in findings if f.state in ("stuck", "ended") or f.phase is not None)
        return cls(ranks=_not_ended(findings), findings=telling, shows_steps=shows_steps)

    @property
    def has_stuck_ranks(self) -> bool:
        """Whether a rank of the node is stuck."""
        return any(finding.state == "stuck" for finding in self.findings)

    def is_news(self, told: NodeView | None, others: Sequence[NodeView]) -> bool:
        """Whether the node, which has ``told`` the others what it last thought, tells them this."""
        # That a job trains, one node tells. Once any rank is stuck, all nodes answer.
        matters = any(each.has_stuck_ranks for each in [*others, self])
        matters |= self.shows_steps and not any(each.shows_steps for each in others)
        return (matters or told is not None) and self != told


@dataclass(frozen=True)
class Elsewhere:
    """The ranks of the other nodes: how many may be waited for, and what is known of some.

    ``show_steps``: one of them has completed steps.
    """

    ranks: int = 0
    findings: tuple[HangFinding, ...] = ()
    show_steps: bool = False

    @classmethod
    def of(cls, views: Sequence[NodeView], *, silent: int = 0) -> Elsewhere:
        """What the nodes with ``views`` say; of ``silent`` ranks nothing is known."""
        return cls(
            ranks=sum(view.ranks for view in views) + silent,
            findings=tuple(finding for view in views for finding in view.findings),
            show_steps=any(view.shows_steps for view in views),
        )


class Liveness:
    """One node's part, with one ``look`` and one ``verdict`` every ``pause``."""

    def __init__(self, limits: HangLimits) -> None:
        self._limits = limits
        self.pause = min(_SELDOM, max(_OFTEN, limits.hang / _LOOKS_PER_WINDOW))
        self._trackers: dict[int, tuple[Tracker, Training]] = {}
        self._shows_steps = self._others_show_steps = False
        self._looked_at: float | None = None
        self._observed_s = 0.0
        self._confirmed = 0  # looks in a row with a hang

    def act_before(self, longest: timedelta) -> None:
        """From now on, no rank that has warmed up is given more than ``longest``."""
        self._limits = self._limits.at_most(longest)

    def look(self, readings: Sequence[Reading], now: float) -> list[HangFinding]:
        """What ``readings`` say, of this node's ranks whose processes run.

        ``now`` is in seconds of any one clock that does not go back.
        """
        since = 0.0 if self._looked_at is None else now - self._looked_at
        self._looked_at = now
        self._observed_s += min(since, _COUNTED_PAUSES * self.pause.total_seconds())
        self._shows_steps = any(shows_steps(reading) for reading in readings)
        return [self._assess(reading) for reading in readings]

    def _assess(self, reading: Reading) -> HangFinding:
        if reading.ended:
            reason, collectives = "its script has ended", reading.enqueued
            return HangFinding(
                rank=reading.rank, state="ended", reason=reason, collectives=collectives
            )
        if reading.rank not in self._trackers:
            self._trackers[reading.rank] = Tracker(), Training(self._limits)
        tracker, training = self._trackers[reading.rank]
        anywhere = self._shows_steps or self._others_show_steps
        if training.saw(reading, self._observed_s, others_show_steps=anywhere):
            reading = replace(reading, warming_up=False)
        return assess(tracker.add(reading, self._observed_s), self._limits)

    def view(self, findings: Sequence[HangFinding]) -> NodeView:
        """What this node says of its ranks, which are as in ``findings``."""
        return NodeView.of(findings, shows_steps=self._shows_steps)

    def verdict(self, findings: Sequence[HangFinding], elsewhere: Elsewhere) -> HangVerdict | None:
        """The hang that this node has to act on, if there is one."""
        self._others_show_steps = elsewhere.show_steps
        known = sorted([*findings, *elsewhere.findings], key=lambda finding: finding.rank)
        verdict = judge(known, world_size=_not_ended(findings) + elsewhere.ranks)
        self._confirmed = self._confirmed + 1 if verdict.hung else 0
        needed = _CONFIRMING_LOOKS if elsewhere.ranks else 1
        if self._confirmed < needed:
            return None
        ours = {finding.rank for finding in findings}
        return verdict if verdict.culprits[0] in ours else None


def _not_ended(findings: Sequence[HangFinding]) -> int:
    return sum(finding.state != "ended" for finding in findings)
