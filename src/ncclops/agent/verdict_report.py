"""What is printed at the end of a run: the first failure in full, the outcome in a line."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ncclops.decision.outcome import headline
from ncclops.goodput import Goodput, describe, measure, spans
from ncclops.rank_lists import ranks_named
from ncclops.receipts.log_receipts import PrintedReceipts
from ncclops.record import event_log
from ncclops.record.error_file import read_error
from ncclops.record.run_directory import RunDirectory
from ncclops.record.tail import last_lines
from ncclops.record.verdict_record import (
    VERDICT,
    FailureClass,
    FirstFailure,
    JudgedReceipt,
    VerdictRecord,
    WorkerEnding,
)

_PROOF_CHARS = 200
_TAIL_LINES = 25  # a traceback with its cause, on one screen


def first_failure(
    run: RunDirectory, in_order: Sequence[WorkerEnding], attempt: int
) -> FirstFailure | None:
    """The first of ``in_order`` (order of ending) that failed without being asked to stop."""
    first = next((e for e in in_order if not e.ok and not e.asked_to_stop), None)
    if first is None:
        return None
    log = run.paths.rank(first.rank).stderr_log
    tail = last_lines(log, _TAIL_LINES)
    if not tail:
        log = run.paths.rank(first.rank).stdout_log
        tail = last_lines(log, _TAIL_LINES)
    error = read_error(run.paths.rank(first.rank).error(attempt))
    return FirstFailure.of(
        first,
        message=None if error is None else error.headline,
        tail=tail,
        log=run.shown(log),
        host=run.node,
    )


def _classified(found: FailureClass, run: RunDirectory) -> list[str]:
    """The class, the line that proves it, whether it may be retried, and what to do."""
    lines = [f"class: {found.class_} (confidence {found.confidence:.2g}): {found.summary}"]
    for proof in found.evidence[:1]:
        path = Path(proof.file)
        where = f"{run.shown(path)}:{proof.line}" if path.is_absolute() else proof.file
        lines.append(f"proof: {where}: {proof.text[:_PROOF_CHARS]}")
    if found.decision is not None:
        lines.append(f"retry: {found.decision.reason}")
    lines += [f"remedy: {remedy}" for remedy in found.remedy]
    return lines


def judge_receipt(run: Path, printed: PrintedReceipts) -> JudgedReceipt:
    """The liveness contract applied to the run.

    From what the output has shown while it was written, and the ranks' own records.
    """
    from ncclops.receipts import judge, sources

    facts = sources.load(run) if printed.broken else sources.of_run(run, printed.facts())
    return judge.judge(facts).to_record()


def measure_goodput(run: RunDirectory) -> Goodput:
    """Where the time of the run went, from its events."""
    return measure(spans(event_log.read(run.paths.events), now=time.time()))


def _receipt(receipt: JudgedReceipt) -> str:
    """The judgement in one line: healthy and its figures, or the first rule that is broken."""
    if not receipt.shows_training:
        return f"receipt: none, the output shows no training ({receipt.verdict})"
    if not receipt.healthy:
        broken = next((rule for rule in receipt.rules if not rule.ok), None)
        return f"receipt: {receipt.verdict}" + (f": {broken.note}" if broken else "")
    figures = [f"{receipt.steps} steps"]
    if receipt.compile_warmup_s is not None:
        figures.append(f"warm-up {receipt.compile_warmup_s:.2f}s")
    if receipt.steady_rate is not None:
        figures.append(f"{receipt.steady_rate:,.0f} {receipt.rate_unit}")
    if receipt.peak_memory_gib is not None:
        figures.append(f"peak {receipt.peak_memory_gib:.2f} GiB")
    return f"receipt: healthy ({', '.join(figures)})"


def _is_ours_to_show(receipt: JudgedReceipt, verdict: VerdictRecord) -> bool:
    """Of several nodes only that of rank 0 is expected to show training."""
    if verdict.outcome not in ("completed", "no-receipt", "stopped"):
        return False
    return receipt.shows_training or any(worker.rank == 0 for worker in verdict.workers)


def print_verdict(
    verdict: VerdictRecord, run: RunDirectory, *, as_json: bool, quiet: bool = False
) -> None:
    """Print the outcome on stderr, and the document on stdout if ``as_json``.

    With ``quiet`` a good end is one line, with the path of the verdict. That line says as well
    which ranks the job has lost.
    """
    lines = [] if quiet and verdict.exit_code == 0 else _described(verdict, run)
    lost = f"; finished without {ranks_named(verdict.ranks_lost)}" if verdict.ranks_lost else ""
    lines.append(f"verdict: {run.shown(run.paths.verdict)}{lost}")
    with suppress(OSError):  # a terminal that has gone does not change the verdict
        sys.stderr.write("".join(f"ncclops: {line}\n" for line in lines))
        sys.stderr.flush()
        if as_json:
            json.dump(VERDICT.to_json(verdict), sys.stdout, indent=2)
            sys.stdout.write("\n")
            sys.stdout.flush()


def _described(verdict: VerdictRecord, run: RunDirectory) -> list[str]:
    """The outcome, the first failure in full, its class, the receipt, where the time went."""
    failure = verdict.first_failure
    why = verdict.reason if failure is None else headline(failure)
    lines = [f"{verdict.outcome} after {verdict.seconds:.1f}s: {why}"]
    if failure is not None:
        where = "" if failure.host == run.node else f" on {failure.host}"
        lines += [*(f"    {line}" for line in failure.tail), f"log: {failure.log}{where}"]
    if verdict.classification is not None:
        lines += _classified(verdict.classification, run)
    if verdict.receipt is not None and _is_ours_to_show(verdict.receipt, verdict):
        lines.append(_receipt(verdict.receipt))
    if verdict.goodput is not None and (goodput := describe(verdict.goodput)) is not None:
        lines.append(goodput)
    return lines
