"""``verdict.json``: how a run ended. Written once, by the agent, and read here alone."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

import msgspec

from ncclops.exit_codes import NextAction
from ncclops.record.document_kind import DocumentKind
from ncclops.record.event_values import EvidenceLine, GpuFault, NetworkUse, RetryAdvice, SlowRank
from ncclops.record.story_record import Story

Outcome = Literal["completed", "no-receipt", "failed", "interrupted", "stopped"]

# No run takes longer; more does not fit into a timedelta.
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e13)]


class WorkerEnding(msgspec.Struct, frozen=True, kw_only=True):
    """How one worker ended in the last attempt. Both codes are None if it did not end at all.

    ``finished``: its script had ended well before, so that its death is no failure. ``left``: it
    exited 0, and its script had not ended: the others went on without it. ``script_failed``: it
    exited 0, and its script had left with an error, as where a callback at exit ends the process.
    """

    rank: int
    pid: int | None = None
    exit_code: int | None = None
    signal: str | None = None
    seconds: Seconds | None = None
    asked_to_stop: bool = False
    finished: bool = False
    left: bool = False
    script_failed: bool = False

    @property
    def ok(self) -> bool:
        exited_well = self.exit_code == 0 and not (self.left or self.script_failed)
        return exited_well or (self.finished and self.signal is not None)


class FirstFailure(msgspec.Struct, frozen=True, kw_only=True):
    """The worker that failed first, and what it left to read. ``log`` is a file of ``host``.

    ``caused_by`` is the rank that began it, where that is another one: it hung, was not there, or
    had ended.
    """

    message: str | None = None
    tail: list[str] = []
    log: str = ""
    host: str = ""
    rank: int
    pid: int | None = None
    exit_code: int | None = None
    signal: str | None = None
    seconds: Seconds | None = None
    asked_to_stop: bool = False
    caused_by: int | None = None

    @classmethod
    def of(
        cls, ending: WorkerEnding, *, message: str | None, tail: list[str], log: str, host: str
    ) -> Self:
        """The failure that ``ending`` is, with what the worker has left."""
        ended = msgspec.structs.asdict(ending)
        for name in ("finished", "left", "script_failed"):  # they say no more: it has failed
            del ended[name]
        return cls(message=message, tail=tail, log=log, host=host, **ended)


class RetryDecision(msgspec.Struct, frozen=True, kw_only=True):
    """What the retry policy decided, with the fields of a ``retry`` event."""

    action: str
    reason: str = ""
    attempt: int | None = None
    row: str | None = None
    init: str | None = None
    barrier: str | None = None
    watchdog: str | None = None
    cooldown_s: Seconds = 0.0


class FailureClass(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict of ``ncclops.classify/1``, the lines that prove it, and what was decided."""

    class_: str = msgspec.field(name="class")
    signature: str | None = None
    confidence: float = 0.0
    rank: int | None = None
    rank_began_it: bool = False
    phase: str | None = None
    summary: str = ""
    retry: RetryAdvice = RetryAdvice()
    remedy: list[str] = []
    evidence: list[EvidenceLine] = []
    decision: RetryDecision | None = None

    def to_json(self) -> dict[str, Any]:
        """As in the file."""
        document: dict[str, Any] = msgspec.to_builtins(self)
        return document


class RuleOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """One rule of a receipt: whether it holds, the line that satisfies or breaks it, and why."""

    rule: str
    ok: bool
    evidence: str | None = None
    note: str = ""


class JudgedReceipt(msgspec.Struct, frozen=True, kw_only=True):
    """``ncclops.receipt/1``: the judgement of the five rules. ``steady_rate`` is per second, in
    ``rate_unit``, without step 0.
    """

    schema: str = "ncclops.receipt/1"
    verdict: str
    rules: list[RuleOutcome] = []
    compile_warmup_s: float | None = None
    steps: int = 0
    first_real_step: int | None = None
    steady_rate: float | None = None
    rate_unit: str | None = None
    peak_memory_gib: float | None = None

    @property
    def healthy(self) -> bool:
        return self.verdict == "healthy"

    @property
    def shows_training(self) -> bool:
        """Whether anything was seen of training: a step, or the end of compile warm-up."""
        return bool(self.steps) or self.compile_warmup_s is not None

    def to_json(self) -> dict[str, Any]:
        """The document ``ncclops.receipt/1``."""
        document: dict[str, Any] = msgspec.to_builtins(self)
        return document


class GoodputFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time went: ``seconds`` by kind of span; ``ratio`` None if no training was seen."""

    ratio: float | None = None
    total_s: float = 0.0
    seconds: dict[str, float] = {}


class VerdictRecord(msgspec.Struct, frozen=True, kw_only=True):
    """``ncclops.verdict/1``. ``seconds`` is how long the run took; ``workers`` are this node's.

    ``next_action`` is what may mend a job that has failed (``ncclops.exit_codes``).
    ``classification`` and ``first_failure`` are None where nothing failed, ``receipt`` and
    ``goodput`` where they could not be made. ``ranks_lost`` are those, of all nodes, without which
    the job has finished, ``gpu_faults`` the GPUs, of all nodes, that made ranks fail,
    ``slow_ranks`` those that the others waited for in the last attempt. ``networks`` are those that
    NCCL has used, one for each node that said it; older runs do not have it. ``story`` tells how
    the job failed, where it did.
    """

    run_id: str
    outcome: Outcome
    exit_code: int
    reason: str
    attempts: int
    seconds: Seconds
    workers: list[WorkerEnding] = []
    classification: FailureClass | None = None
    receipt: JudgedReceipt | None = None
    goodput: GoodputFigures | None = None
    first_failure: FirstFailure | None = None
    ranks_lost: list[int] = []
    gpu_faults: list[GpuFault] = []
    slow_ranks: list[SlowRank] = []
    networks: list[NetworkUse] | msgspec.UnsetType = msgspec.UNSET
    story: Story | None = None
    next_action: NextAction | None = None

    @property
    def unmet_networks(self) -> list[NetworkUse]:
        """The networks that are not what the job was meant for."""
        known = [] if self.networks is msgspec.UNSET else self.networks
        return [use for use in known if use.met is False]


VERDICT = DocumentKind(
    "ncclops.verdict/1", VerdictRecord, "`ncclops diagnose` shows what else the run has left"
)
