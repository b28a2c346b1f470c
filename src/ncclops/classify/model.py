"""The classifier's values: classes, roles, retry policies, signatures, hits, reports.

Nothing here reads a file, contains a pattern or takes a decision; the signatures are data
(``signatures/*.toml``) and the ranking is in ``ranking``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args

SCHEMA = "ncclops.classify/1"
# The ``file`` of evidence that was given as a value: how ranks ended, hangs, what the kernel tells.
EXITS, HANGS, KERNEL = "exit status", "hang watch", "kernel"

FailureClass = Literal[
    "bootstrap",
    "store-rendezvous",
    "plugin-env",
    "watchdog-timeout",
    "watchdog-compile",
    "straggler",
    "collective-mismatch",
    "coalesced-unsupported",
    "network-transport",
    "gpu-hardware",
    "cuda-error",
    "gpu-oom",
    "host-oom",
    "driver-version",
    "invalid-usage",
    "nvls-multicast",
    "process-crash",
    "peer-exit",
    "user-error",
    "preempted",
]
FAILURE_CLASSES: tuple[str, ...] = get_args(FailureClass)
# What a log without a failure comes to. Whether the job is healthy, its receipt says.
NO_FAILURE_SEEN, BENIGN = "no-failure-seen", "benign"
CLASSES: tuple[str, ...] = (NO_FAILURE_SEEN, BENIGN, "unknown", *FAILURE_CLASSES)

Role = Literal["cause", "symptom", "victim", "benign"]
ROLES: tuple[str, ...] = get_args(Role)

RetryPolicy = Literal[
    "retry-once-lazy", "retry-after-cooldown", "replace-node", "fix-config", "fix-code", "none"
]
RETRY_POLICIES: tuple[str, ...] = get_args(RetryPolicy)
ELIGIBLE_POLICIES = frozenset({"retry-once-lazy", "retry-after-cooldown", "replace-node"})

# The phases of NCCL's start, in their order: the c10d store answers, rank 0 publishes the
# unique id, every rank reaches the out-of-band sockets, topologies are exchanged, channels
# are connected.
PHASES: tuple[str, ...] = ("store", "unique-id", "socket", "topology", "transport")

# How sure one line makes us: of the answers given with a number, about that share is right on
# labelled excerpts that nobody looked at (`scripts/score_classify.py`, docs/classify-scores.md).
CERTAINTY: dict[str, float] = {"definite": 0.95, "likely": 0.9, "weak": 0.75}

_TIER_BY_ROLE = {"cause": 0, "symptom": 2, "victim": 3, "benign": 9}


class Signature(NamedTuple):
    """One way in which one piece of software words one condition.

    ``literals``: byte-exact fragments, any of which brings the line to ``pattern``.
    ``pattern``: searched in the line; named group ``rank`` names the culprit, not the writer.
    ``unless``: the line does not count where this is found.
    ``requires``: ids of which at least one must have been seen (and no step completed since).
    ``requires_all``: ids all of which must have been.
    ``absent``: ids none of which may have been seen anywhere.
    ``tier``: what competes with what; lower wins, ties are settled by time (see ``ranking``).
    ``cleared_by``: evidence after the line that proves it harmless: ``init``, ``step``, nothing
    short of a whole run of steps (the default), or ``never``.
    ``teardown``: a consequence when any other failure precedes it in the same log.
    ``echo_of``: ids; a consequence when one of them precedes it in any log of the job.
    ``exits``: how a worker ended, given as a value and not as a line: signal names, exit codes,
    ``nonzero`` (any code but 0), or ``other-signal`` (one that no signature names).
    ``hang``: a hang that the launcher has found, given the same way.
    ``compares``: the line counts where its operation is another one than a different rank's.
    ``explains_line``: ids that give way where they match the same line, and there only.
    ``condition``: of a harmless line, in words, what must follow or be absent for it to be so.
    """

    id: str
    class_: str
    role: str
    literals: tuple[str, ...]
    summary: str
    examples: tuple[str, ...]
    near_misses: tuple[str, ...]
    tier: int
    certainty: str = "likely"
    pattern: str = ""
    unless: str = ""
    phase: str | None = None
    requires: frozenset[str] = frozenset()
    requires_all: frozenset[str] = frozenset()
    absent: frozenset[str] = frozenset()
    outranks: frozenset[str] = frozenset()
    explains_line: frozenset[str] = frozenset()
    echo_of: frozenset[str] = frozenset()
    cleared_by: str = ""
    teardown: bool = False
    retry: str = "none"
    retry_after_progress: str = "none"
    remedy: tuple[str, ...] = ()
    references: tuple[str, ...] = ()
    exits: frozenset[str] = frozenset()
    hang: bool = False
    compares: bool = False
    condition: str = ""
    origin: str = "shipped"

    @staticmethod
    def default_tier(role: str, certainty: str) -> int:
        """A weak cause competes with echoes, by time; a firm one beats them whenever it came."""
        tier = _TIER_BY_ROLE[role]
        return tier + 1 if role == "cause" and certainty == "weak" else tier

    def outranks_signature(self, other: Signature) -> bool:
        return other.id in self.outranks or f"class:{other.class_}" in self.outranks

    def explains_on_line(self, other: Signature) -> bool:
        """Whether ``other`` gives way where both are found in one line."""
        return other.id in self.explains_line or self.outranks_signature(other)


class CompiledSignature:
    """A signature with its patterns, compiled when the first line asks for them."""

    def __init__(self, signature: Signature) -> None:
        self.signature = signature

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        source = self.signature.pattern or "|".join(map(re.escape, self.signature.literals))
        return re.compile(source)

    @cached_property
    def _unless(self) -> re.Pattern[str] | None:
        return re.compile(self.signature.unless) if self.signature.unless else None

    def match(self, line: str) -> re.Match[str] | None:
        found = self._pattern.search(line)
        if found is None or (self._unless is not None and self._unless.search(line)):
            return None
        return found


# (year or None, month, day, seconds of the day): what a line says about its time.
Stamp = tuple[int | None, int, int, float]


class Hit(NamedTuple):
    """A line on which a signature matched, or a fact that it names.

    ``rank`` is who the line is about (None: it does not say), ``steps_before`` the number of
    step marks this source had shown by then, ``process`` the (host, pid) that NCCL prints.
    """

    signature: Signature
    source: int
    file: str
    line: int
    text: str
    rank: int | None
    stamp: Stamp | None
    steps_before: int
    order: int
    accuses: bool = False
    """Whether the line itself names ``rank`` as the one to blame."""
    process: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True)
class Evidence:
    """A line that supports the verdict; ``line`` is 1-based.

    A fact that was given as a value has the name of its source as ``file`` (``exit status``,
    ``hang watch``) and ``line`` 1.
    """

    file: str
    line: int
    text: str
    signature: str
    role: str
    rank: int | None

    def as_json(self) -> dict[str, Any]:
        return {
            "file": self.file,
            "line": self.line,
            "text": self.text,
            "signature": self.signature,
            "role": self.role,
            "rank": self.rank,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Classification:
    """What failed, which rank began it, and whether it may be tried again."""

    class_: str
    signature: str | None = None
    confidence: float
    rank: int | None = None
    rank_began_it: bool = False
    """False: ``rank`` is only the first that reported it (or None)."""
    phase: str | None = None
    summary: str
    retry_policy: str = "none"
    retry_reason: str = ""
    remedy: tuple[str, ...] = ()

    @property
    def eligible(self) -> bool:
        return self.retry_policy in ELIGIBLE_POLICIES

    @property
    def shows_failure(self) -> bool:
        """Whether something failed, as far as can be said: ``unknown`` may be a failure."""
        return self.class_ not in (NO_FAILURE_SEEN, BENIGN)

    @property
    def names_failure(self) -> bool:
        """Whether it is known what failed."""
        return self.shows_failure and self.class_ != "unknown"

    @property
    def exit_code(self) -> int:
        """The status ``ncclops classify --exit-code`` leaves with."""
        if not self.shows_failure:
            return 0
        if self.class_ == "unknown":
            return 12
        return 10 if self.eligible else 11

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Classification:
        """The inverse of ``as_json``; what was added to the document is left out."""
        retry = data["retry"]
        return cls(
            class_=data["class"],
            signature=data["signature"],
            confidence=data["confidence"],
            rank=data["rank"],
            rank_began_it=data["rank_began_it"],
            phase=data["phase"],
            summary=data["summary"],
            retry_policy=retry["policy"],
            retry_reason=retry["reason"],
            remedy=tuple(data["remedy"]),
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "class": self.class_,
            "signature": self.signature,
            "confidence": round(self.confidence, 2),
            "rank": self.rank,
            "rank_began_it": self.rank_began_it,
            "phase": self.phase,
            "summary": self.summary,
            "retry": {
                "eligible": self.eligible,
                "policy": self.retry_policy,
                "reason": self.retry_reason,
            },
            "remedy": list(self.remedy),
        }


@dataclass(frozen=True, slots=True)
class Candidate:
    """A class that an unexplained failure may be of, and what would decide whether it is."""

    class_: str
    decide: str

    def as_json(self) -> dict[str, str]:
        return {"class": self.class_, "decide": self.decide}


@dataclass(slots=True)
class Stats:
    """How much was read, and in how long (``seconds``, wall clock)."""

    files: int = 0
    lines: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        return {
            "files": self.files,
            "lines": self.lines,
            "bytes": self.bytes,
            "seconds": round(self.seconds, 3),
        }


@dataclass(frozen=True, slots=True)
class Report:
    """The verdict with the lines that prove it."""

    verdict: Classification
    evidence: tuple[Evidence, ...]
    stats: Stats
    notes: tuple[str, ...] = field(default=())
    candidates: tuple[Candidate, ...] = ()
    """Of an ``unknown`` failure: the likeliest classes, the likeliest first."""

    def as_json(self) -> dict[str, Any]:
        """The document CONTRACTS promises as ``ncclops.classify/1``."""
        return {
            "schema": SCHEMA,
            "verdict": self.verdict.as_json(),
            "evidence": [item.as_json() for item in self.evidence],
            "stats": self.stats.as_json(),
            "notes": list(self.notes),
            "candidates": [item.as_json() for item in self.candidates],
        }
