"""Whether a job hangs or is only slow. A verdict needs two independent kinds of stale evidence.

What counts as evidence depends on where a rank is:

- A rank inside a collective waits for the others. Its CPU may spin and its GPU be 100 % busy
  doing that, so neither proves progress, and the rank is not judged as long as another rank works.
- A rank outside any collective that uses CPU or GPU works, unless its interpreter is stuck as
  well: a thread that never releases the GIL may use CPU for ever.
- A rank outside, or not known to be inside, that is idle while its interpreter runs (a slow file
  server, a data loader) has the long window: much that looks like this ends by itself. As long as
  another rank is in a declared phase, it may also wait for that one, and is not judged.
- A rank on which the script has ended is not waited for, unless all others wait in a collective
  that it has not come to: then the script has ended there too early.
- Compile warm-up and declared phases have windows of their own. Nobody compiles where every rank
  is known to be inside a collective, so there the long window is enough.

The two kinds must be independent. Outside a collective neither the collective counters nor the GPU
can change without a step, so there the three count as one, and the second must be about the process
itself: its CPU time, its main thread, its interpreter, or a phase that outlasts its declared limit.
Inside one, an operation that stays pending is a separate fact.

What cannot be read is neither stale nor fresh. With fewer than two kinds that can be read, the
answer is never "hung". A process that has ended needs no inference at all.

``assess`` looks at one rank and ``judge`` at all ranks of the job. Pure functions over
:class:`ncclops.health.evidence.Sample`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Literal

from ncclops.durations import format_duration
from ncclops.health.evidence import WARMUP_PHASE, Kind, Sample
from ncclops.rank_lists import ranks_named
from ncclops.record.progress import UNUSUAL_STEPS

_INDEPENDENT_KINDS_NEEDED = 2
_MOVE_WITH_STEPS = {Kind.STEP, Kind.COLLECTIVE, Kind.GPU}

State = Literal["working", "waiting", "stuck", "dead", "ended", "unclear"]


@dataclass(frozen=True, kw_only=True)
class HangLimits:
    """How long a counter may not change before it counts as stale.

    ``hang`` is NCCL's default for a collective (10 minutes), ``quiet`` torch's default for groups
    of other backends (30 minutes), ``compile`` as ``ncclops.timeouts`` has it. A step may take
    ``slow_steps`` times its usual time. ``moving`` is for an idle rank whose main thread runs
    Python, as in a loop that looks for something.
    """

    hang: timedelta = timedelta(minutes=10)
    quiet: timedelta = timedelta(minutes=30)
    moving: timedelta = timedelta(minutes=30)
    compile: timedelta = timedelta(minutes=90)
    slow_steps: float = UNUSUAL_STEPS

    def at_most(self, longest: timedelta) -> HangLimits:
        """With no window of a rank that has warmed up longer than ``longest``, but ``moving``."""
        return replace(self, hang=min(self.hang, longest), quiet=min(self.quiet, longest))


@dataclass(frozen=True, kw_only=True)
class HangFinding:
    """What is thought of one rank and why. ``stale`` names what has not moved for ``window``.

    ``collectives`` is how many it has enqueued, None where that is unknown; ``awaited`` the rank
    that it waits for in a message; ``phase`` the declared phase that it is in, within the limit.
    """

    rank: int
    state: State
    stale: tuple[Kind, ...] = ()
    window: timedelta | None = None
    reason: str = ""
    in_collective: bool | None = None
    collectives: int | None = None
    awaited: int | None = None
    phase: str | None = None

    @property
    def frozen(self) -> bool:
        """Whether not even its interpreter runs."""
        return Kind.INTERPRETER in self.stale


@dataclass(frozen=True, kw_only=True)
class HangVerdict:
    """``hung`` says that a rank may be killed; ``culprits`` are the ranks to blame for it."""

    hung: bool
    culprits: tuple[int, ...]
    reason: str
    findings: tuple[HangFinding, ...]


def assess(sample: Sample, limits: HangLimits) -> HangFinding:
    """What one rank's evidence says about it alone: ``stuck`` needs two stale kinds."""
    if sample.alive is False:
        return HangFinding(rank=sample.rank, state="dead", reason="its process has ended")
    if (limit := _phase_limit(sample, limits)) is not None and _within(sample, limit):
        reason = f"in {sample.phase}, declared for up to {_text(limit)}"
        return HangFinding(rank=sample.rank, state="working", reason=reason, phase=sample.phase)
    window = _window(sample, limits)
    stale = [kind for kind in Kind if _is_stale(sample, kind, window)]
    if limit is not None:
        stale.append(Kind.PHASE)  # the limit that it declared has passed
    names = _listed(stale) or "nothing that can be read"
    reason = f"{names} stale for more than {_text(window)}"
    state: State = "stuck"
    if alive_by := _proof_of_life(sample, window):
        state, reason = "working", alive_by
    elif _independent(stale, sample.in_collective) < _INDEPENDENT_KINDS_NEEDED:
        state, reason = "unclear", f"{reason}: too little evidence"
    return HangFinding(
        rank=sample.rank,
        state=state,
        stale=tuple(stale),
        window=window,
        reason=reason,
        in_collective=sample.in_collective,
        collectives=sample.collectives,
        awaited=sample.awaited,
    )


def judge(findings: Sequence[HangFinding], *, world_size: int) -> HangVerdict:
    """Whether the job hangs, from what is thought of each rank of which anything is known.

    Ranks that wait in a collective are hung only if no rank is left to wait for: every rank of
    ``world_size`` on which the script has not ended is known, and is stuck too. A rank stuck
    outside hangs by itself.
    """
    if dead := _ranks(findings, "dead"):
        return _verdict(findings, dead, f"{ranks_named(dead)} {_has(dead)} ended")
    phase = any(finding.phase is not None for finding in findings)
    outside = [
        f
        for f in findings
        if f.state == "stuck" and f.in_collective is False
        if f.frozen or not phase
    ]
    if outside:
        culprits = tuple(finding.rank for finding in outside)
        return _verdict(findings, culprits, f"{ranks_named(culprits)}: {outside[0].reason}")
    stuck = [finding for finding in findings if finding.state == "stuck"]
    if stuck and len(stuck) == world_size:
        if early := _ended_early(findings, stuck):
            where = f"all others wait in a collective that {ranks_named(early)} did not come to"
            return _verdict(findings, early, f"{where}: the script has ended there")
        if awaited := _awaited(stuck, world_size):
            where = f"all ranks wait, and messages wait for {ranks_named(awaited)}"
            return _verdict(findings, awaited, f"{where}: {stuck[0].reason}")
        culprits = _most_stuck(_behind(stuck))
        first = next(finding for finding in stuck if finding.rank == culprits[0])
        inside = all(finding.in_collective for finding in stuck)
        where = "wait in a collective" if inside else "are stuck"
        reason = f"all ranks {where}; {ranks_named(culprits)}: {first.reason}"
        return _verdict(findings, culprits, reason)
    waiting = [_as_waiting(f) if f.state == "stuck" else f for f in findings]
    return HangVerdict(hung=False, culprits=(), reason=_excuse(waiting), findings=tuple(waiting))


def _phase_limit(sample: Sample, limits: HangLimits) -> timedelta | None:
    """How long the phase may take that the rank has declared, if it is in one."""
    if sample.phase == WARMUP_PHASE:
        return limits.compile
    return None if sample.phase is None else sample.phase_limit


def _within(sample: Sample, limit: timedelta) -> bool:
    return sample.phase_age is None or sample.phase_age <= limit


def _window(sample: Sample, limits: HangLimits) -> timedelta:
    if sample.warming_up:
        if sample.in_collective:
            return min(limits.quiet, limits.compile)
        moves = _is_fresh(sample, Kind.MAIN_THREAD, limits.compile)
        return max(limits.compile, limits.moving) if moves else limits.compile
    usual = sample.step_time or timedelta()
    window = max(limits.hang, usual * limits.slow_steps)
    if sample.in_collective or _is_stale(sample, Kind.INTERPRETER, window):
        return window
    # It may only wait for something outside the job.
    moves = _is_fresh(sample, Kind.MAIN_THREAD, window)
    return max(window, limits.moving if moves else limits.quiet)


def _listed(names: Sequence[str]) -> str:
    return " and ".join(part for part in (", ".join(names[:-1]), *names[-1:]) if part)


def _independent(stale: Sequence[Kind], in_collective: bool | None) -> int:
    """How many independent facts the stale kinds show."""
    if in_collective:
        return len(stale)
    about_process = [kind for kind in stale if kind not in _MOVE_WITH_STEPS]
    # A rank that has never made a step may not train at all: a service that is not used.
    return len(about_process) + (Kind.STEP in stale)


def _is_stale(sample: Sample, kind: Kind, window: timedelta) -> bool:
    age = sample.ages.get(kind)
    return age is not None and age > window


def _is_fresh(sample: Sample, kind: Kind, window: timedelta) -> bool:
    age = sample.ages.get(kind)
    return age is not None and age <= window


def _proof_of_life(sample: Sample, window: timedelta) -> str | None:
    for kind in (Kind.STEP, Kind.COLLECTIVE):
        if _is_fresh(sample, kind, window):
            return f"{kind} moved within {_text(window)}"
    if sample.in_collective or _is_stale(sample, Kind.INTERPRETER, window):
        return None
    for kind in (Kind.CPU, Kind.GPU):
        if _is_fresh(sample, kind, window):
            return f"{kind} within {_text(window)}, and it is not known to wait for others"
    return None


def _verdict(
    findings: Sequence[HangFinding], culprits: tuple[int, ...], reason: str
) -> HangVerdict:
    return HangVerdict(hung=True, culprits=culprits, reason=reason, findings=tuple(findings))


def _ranks(findings: Sequence[HangFinding], state: State) -> tuple[int, ...]:
    return tuple(finding.rank for finding in findings if finding.state == state)


def _behind(findings: Sequence[HangFinding]) -> Sequence[HangFinding]:
    """The ranks that have come least far in their collectives: those that others wait for."""
    known = [finding.collectives for finding in findings if finding.collectives is not None]
    if len(known) < len(findings):
        return findings
    return [finding for finding in findings if finding.collectives == min(known)]


def _awaited(stuck: Sequence[HangFinding], world_size: int) -> tuple[int, ...]:
    """The ranks that others wait for in messages, and that wait in none; or wait in a circle.

    How many operations a rank has enqueued tells nothing there: each sends and receives as many as
    its place in a pipeline wants. Messages have the numbers that ranks have now: where one has been
    lost, these are not the job's.
    """
    waits = {finding.rank: finding.awaited for finding in stuck if finding.awaited is not None}
    numbers = set(range(world_size))
    if {finding.rank for finding in stuck} != numbers or not numbers.issuperset(waits.values()):
        return ()
    if roots := set(waits.values()) - set(waits):
        return tuple(sorted(roots))
    # Each waits for one that waits: those that are left after so many steps are in the circles.
    left = set(waits)
    for _ in waits:
        left = {waits[rank] for rank in left}
    return tuple(sorted(left))


def _ended_early(findings: Sequence[HangFinding], stuck: Sequence[HangFinding]) -> tuple[int, ...]:
    """Ranks on which the script has ended before a collective in which all that are left wait."""
    waiting = [f.collectives for f in stuck if f.in_collective and f.collectives is not None]
    if len(waiting) < len(stuck):
        return ()
    return tuple(
        f.rank
        for f in findings
        if f.state == "ended" and f.collectives is not None and f.collectives < min(waiting)
    )


def _most_stuck(findings: Sequence[HangFinding]) -> tuple[int, ...]:
    """Those of which not even the interpreter runs, if there are such ones."""
    frozen = [finding for finding in findings if finding.frozen]
    return tuple(finding.rank for finding in frozen or findings)


def _as_waiting(finding: HangFinding) -> HangFinding:
    return replace(finding, state="waiting")


def _excuse(findings: Sequence[HangFinding]) -> str:
    waiting = _ranks(findings, "waiting")
    if not waiting:
        return "no rank is stuck"
    others = [finding for finding in findings if finding.state != "waiting"]
    if not others:
        return f"{ranks_named(waiting)} waiting for ranks that cannot be seen from here"
    return f"{ranks_named(waiting)} waiting; {ranks_named((others[0].rank,))}: {others[0].reason}"


def _has(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def _text(duration: timedelta | None) -> str:
    if duration is None:
        return "-"
    return format_duration(timedelta(seconds=round(duration.total_seconds())))
