"""Whether a rank is hung or only slow. A verdict needs two independent kinds of stale evidence.

What counts as evidence depends on where a rank is:

- A rank inside a collective waits for the others. Its CPU may spin and its GPU be 100 % busy
  doing that, so neither proves progress, and the rank is not judged as long as another rank works.
- A rank outside any collective that uses CPU or GPU works, unless its interpreter is stuck as
  well: a thread that never releases the GIL may use CPU for ever.
- A rank outside, or not known to be inside, that is idle while its interpreter runs (a slow file
  server, a data loader) has the long window: much that looks like this ends by itself.
- Compile warm-up and declared phases have windows of their own.

The two kinds must be independent. Outside a collective neither the collective counters nor the GPU
can change without a step, so there the three count as one, and the second must be about the process
itself: its CPU time, its interpreter, or a phase that outlasts its declared limit. Inside one, an
operation that stays pending is a separate fact.

What cannot be read is neither stale nor fresh. With fewer than two kinds that can be read, the
answer is never "hung". A process that has ended needs no inference at all.

Pure functions over :class:`ncclops.health.evidence.Sample`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Literal

from ncclops.durations import format_duration
from ncclops.health.evidence import Kind, Sample
from ncclops.rank_lists import ranks_named

_INDEPENDENT_KINDS_NEEDED = 2
_MOVE_WITH_STEPS = {Kind.STEP, Kind.COLLECTIVE, Kind.GPU}

State = Literal["working", "waiting", "stuck", "dead", "unclear"]


@dataclass(frozen=True, kw_only=True)
class HangLimits:
    """How long a counter may not change before it counts as stale.

    ``hang`` is NCCL's default for a collective (10 minutes), ``quiet`` torch's default for groups
    of other backends (30 minutes), ``compile`` 2 hours (cold compiles of large models
    take 15 to 20 minutes). A step may take ``slow_steps`` times its usual time.
    """

    hang: timedelta = timedelta(minutes=10)
    quiet: timedelta = timedelta(minutes=30)
    compile: timedelta = timedelta(hours=2)
    slow_steps: float = 10.0


@dataclass(frozen=True, kw_only=True)
class HangFinding:
    """What is thought of one rank and why. ``stale`` names what has not moved for ``window``."""

    rank: int
    state: State
    stale: tuple[Kind, ...] = ()
    window: timedelta | None = None
    reason: str = ""
    in_collective: bool | None = None


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
    if _within_phase(sample):
        reason = f"in {sample.phase}, declared for up to {_text(sample.phase_limit)}"
        return HangFinding(rank=sample.rank, state="working", reason=reason)
    window = _window(sample, limits)
    stale = _stale(sample, window)
    names = " and ".join(stale) or "nothing that can be read"
    reason = f"{names} stale for more than {_text(window)}"
    state: State = "stuck"
    if alive_by := _proof_of_life(sample, window):
        state, reason = "working", alive_by
    elif _independent(stale, sample.in_collective) < _INDEPENDENT_KINDS_NEEDED:
        state, reason = "unclear", f"{reason}: too little evidence"
    return HangFinding(
        rank=sample.rank,
        state=state,
        stale=stale,
        window=window,
        reason=reason,
        in_collective=sample.in_collective,
    )


def judge(samples: Sequence[Sample], limits: HangLimits, *, world_size: int) -> HangVerdict:
    """Whether the job hangs, from one sample of each rank that can be seen.

    Ranks that wait in a collective are hung only if no rank is left to wait for: every rank of
    ``world_size`` has been seen, and is stuck too. A rank stuck outside hangs by itself.
    """
    findings = [assess(sample, limits) for sample in samples]
    if dead := _ranks(findings, "dead"):
        return _verdict(findings, dead, f"{ranks_named(dead)} {_has(dead)} ended")
    outside = [f for f in findings if f.state == "stuck" and f.in_collective is False]
    if outside:
        culprits = tuple(finding.rank for finding in outside)
        return _verdict(findings, culprits, f"{ranks_named(culprits)}: {outside[0].reason}")
    stuck = _ranks(findings, "stuck")
    if stuck and len(stuck) == world_size:
        culprits = _most_stuck(_behind(samples), findings)
        first = next(finding for finding in findings if finding.rank == culprits[0])
        inside = all(sample.in_collective for sample in samples)
        where = "wait in a collective" if inside else "are stuck"
        reason = f"all ranks {where}; {ranks_named(culprits)}: {first.reason}"
        return _verdict(findings, culprits, reason)
    waiting = [_as_waiting(f) if f.state == "stuck" else f for f in findings]
    return HangVerdict(hung=False, culprits=(), reason=_excuse(waiting), findings=tuple(waiting))


def _within_phase(sample: Sample) -> bool:
    if sample.phase is None or sample.phase_limit is None:
        return False
    return sample.phase_age is None or sample.phase_age <= sample.phase_limit


def _window(sample: Sample, limits: HangLimits) -> timedelta:
    if sample.warming_up:
        return limits.compile
    usual = sample.step_time or timedelta()
    window = max(limits.hang, usual * limits.slow_steps)
    if sample.in_collective or _is_stale(sample, Kind.INTERPRETER, window):
        return window
    return max(window, limits.quiet)  # it may only wait for something outside the job


def _stale(sample: Sample, window: timedelta) -> tuple[Kind, ...]:
    stale = [kind for kind in Kind if _is_stale(sample, kind, window)]
    if sample.phase is not None and not _within_phase(sample):
        stale.append(Kind.PHASE)  # the limit that it declared has passed
    return tuple(stale)


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


def _behind(samples: Sequence[Sample]) -> tuple[int, ...]:
    """The ranks that have come least far in their collectives: those that others wait for."""
    known = [sample.collectives for sample in samples if sample.collectives is not None]
    if len(known) < len(samples):
        return tuple(sample.rank for sample in samples)
    return tuple(sample.rank for sample in samples if sample.collectives == min(known))


def _most_stuck(ranks: tuple[int, ...], findings: Sequence[HangFinding]) -> tuple[int, ...]:
    """Those of ``ranks`` of which not even the interpreter runs, if there are such ones."""
    frozen = {finding.rank for finding in findings if Kind.INTERPRETER in finding.stale}
    return tuple(rank for rank in ranks if rank in frozen) or ranks


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
