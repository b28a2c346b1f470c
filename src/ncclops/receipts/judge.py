"""The five rules of liveness, applied to the facts of a run.

1. compile-warmup         warm-up is over, as a line says or the end of the first step shows
2. step-0-contaminated    the first step contains the compile and is never a data point
3. three-steps            three steps after it: fewer prove nothing
4. peak-memory            peak memory is reported
5. end-marker             the end marker is there

Trainers that count from 1, or print every tenth step only, have no line for step 0: there the
first line reported is the contaminated one, and the three steps are the next three lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ncclops.receipts.observation import Where
from ncclops.receipts.receipt_facts import Facts
from ncclops.record.verdict_record import JudgedReceipt, RuleOutcome

Verdict = Literal["healthy", "startup-stall", "compile-stall", "rumour", "incomplete"]
RuleName = Literal[
    "compile-warmup", "step-0-contaminated", "three-steps", "peak-memory", "end-marker"
]

_STEPS_NEEDED = 3

MEANING: dict[Verdict, str] = {
    "healthy": "all five rules hold",
    "startup-stall": "no sign of training at all, by `receipt.step()` or in a printed line",
    "compile-stall": "it died or went silent before compile warm-up was over",
    "rumour": f"fewer than {_STEPS_NEEDED} steps that count",
    "incomplete": "steps are there, but not everything that makes a receipt",
}


@dataclass(frozen=True)
class Rule:
    """One rule: whether it holds, the line that satisfies or breaks it, and why in words."""

    rule: RuleName
    ok: bool
    evidence: Where | None
    note: str


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """The judgement of a run."""

    verdict: Verdict
    rules: Sequence[Rule]
    facts: Facts

    @property
    def meaning(self) -> str:
        """What the verdict says, in words, and of a job that had failed before, how."""
        if self.failure is not None:
            return f"the job failed before its first step: {self.failure}"
        if self.verdict == "compile-stall" and self.rules[0].ok:
            return "warm-up is over, and no step followed"
        return MEANING[self.verdict]

    @property
    def failure(self) -> str | None:
        """What a run has failed with that made no step; None where it did, or of a log."""
        return None if self.facts.steps else self.facts.failure

    @property
    def steady_rate(self) -> float | None:
        """Per second, in ``rate_unit``, without step 0; None unless all five rules carry it."""
        return self.facts.steady_rate if self.verdict == "healthy" else None

    @property
    def rate_unit(self) -> str | None:
        """What is counted by ``steady_rate``."""
        return None if self.steady_rate is None else self.facts.rate_unit

    def to_record(self) -> JudgedReceipt:
        """As in ``verdict.json``."""
        facts = self.facts
        return JudgedReceipt(
            verdict=self.verdict,
            rules=[
                RuleOutcome(
                    rule=rule.rule,
                    ok=rule.ok,
                    evidence=None if rule.evidence is None else str(rule.evidence),
                    note=rule.note,
                )
                for rule in self.rules
            ],
            compile_warmup_s=facts.warmup_seconds,
            steps=facts.steps,
            first_real_step=facts.first_real_step,
            steady_rate=self.steady_rate,
            rate_unit=self.rate_unit,
            peak_memory_gib=facts.peak_gib,
        )

    def to_json(self) -> dict[str, Any]:
        """The document ``ncclops.receipt/1``."""
        return self.to_record().to_json() | {"failure": self.failure}


def judge(facts: Facts) -> Receipt:
    """Apply the rules to ``facts``."""
    rules = (
        _compile_warmup(facts),
        _step_0_contaminated(facts),
        _three_steps(facts),
        _peak_memory(facts),
        _end_marker(facts),
    )
    return Receipt(verdict=_verdict(facts, rules), rules=rules, facts=facts)


def _verdict(facts: Facts, rules: Sequence[Rule]) -> Verdict:
    if facts.empty:
        return "startup-stall"
    if facts.steps == 0:
        return "compile-stall"
    if facts.real_steps < _STEPS_NEEDED:
        return "rumour"
    return "healthy" if all(rule.ok for rule in rules) else "incomplete"


def _compile_warmup(facts: Facts) -> Rule:
    if facts.warmup is not None:
        return Rule("compile-warmup", True, facts.warmup, "warm-up is over")
    first = facts.first or next(iter(facts.real), None)
    if first is not None and not facts.says_warmup:
        note = "nothing says how long warm-up took; it was over when the first step ended"
        return Rule("compile-warmup", True, first, note)
    if first is not None:
        return Rule("compile-warmup", False, first, "steps without a compile_warmup time before")
    if facts.begun is not None:
        return Rule("compile-warmup", False, facts.begun, "begun here; nothing says that it ended")
    return Rule("compile-warmup", False, None, "no sign of training")


def _step_0_contaminated(facts: Facts) -> Rule:
    if facts.steps == 0:
        note = "no step, by `receipt.step()` or in a printed line"
        return Rule("step-0-contaminated", False, None, note)
    if facts.real_steps == 0:
        note = "the only step there is contains the compile: its numbers say nothing"
        return Rule("step-0-contaminated", False, facts.first, note)
    if facts.first is not None:
        return Rule("step-0-contaminated", True, facts.first, "contains the compile; left out")
    note = "no step 0 is reported, and warm-up came before the first step"
    return Rule("step-0-contaminated", True, facts.warmup, note)


def _three_steps(facts: Facts) -> Rule:
    if facts.real_steps >= _STEPS_NEEDED:
        note = f"{facts.real_steps} steps after warm-up; this is the third"
        return Rule("three-steps", True, facts.real[_STEPS_NEEDED - 1], note)
    note = f"{facts.real_steps} of the {_STEPS_NEEDED} steps after warm-up that make a receipt"
    return Rule("three-steps", False, facts.last, note)


def _peak_memory(facts: Facts) -> Rule:
    if facts.peak is not None:
        return Rule("peak-memory", True, facts.peak, "the highest reported")
    note = "not reported, by `receipt.peak_memory()` or in a printed line"
    return Rule("peak-memory", False, None, note)


def _end_marker(facts: Facts) -> Rule:
    if facts.failure is not None:
        note = f"the job failed: {facts.failure}"
        return Rule("end-marker", False, facts.end or facts.last, note)
    if facts.end is not None:
        return Rule("end-marker", True, facts.end, "ended cleanly")
    if facts.unproven is not None:
        note = "an end marker follows this at once: of buffered output it may be the older one"
        return Rule("end-marker", False, facts.unproven, note)
    return Rule("end-marker", False, facts.last, "no end marker; this is the last step")
