"""What is printed at the end of a run: the outcome in a line, and how it came to that."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from ncclops.diagnose import story_text
from ncclops.errors import NetworkRefused
from ncclops.goodput import Goodput, describe, measure, spans
from ncclops.plain_text import plain
from ncclops.rank_lists import ranks_named
from ncclops.receipts.log_receipts import PrintedReceipts
from ncclops.record import answer, event_log
from ncclops.record.error_file import read_error
from ncclops.record.run_directory import RunDirectory
from ncclops.record.tail import last_lines
from ncclops.record.verdict_record import (
    VERDICT,
    FirstFailure,
    JudgedReceipt,
    VerdictRecord,
    WorkerEnding,
)

log = logging.getLogger(__name__)

# Steps of time servers are shorter, or change no figure by much.
_SAME_CLOCK_S = 5.0
_TAIL_LINES = 25  # a traceback with its cause, on one screen


def first_failure(
    run: RunDirectory,
    in_order: Sequence[WorkerEnding],
    attempt: int,
    raised: Mapping[int, str] = MappingProxyType({}),
) -> FirstFailure | None:
    """The first of ``in_order`` (order of ending) that failed without being asked to stop.

    ``raised`` is what ranks have reported of it, in case that they could write it nowhere.
    """
    first = next((e for e in in_order if not e.ok and not e.asked_to_stop), None)
    if first is None:
        return None
    output = run.paths.rank(first.rank).stderr_log
    tail = last_lines(output, _TAIL_LINES)
    if not tail:
        output = run.paths.rank(first.rank).stdout_log
        tail = last_lines(output, _TAIL_LINES)
    error = read_error(run.paths.rank(first.rank).error(attempt))
    return FirstFailure.of(
        first,
        message=raised.get(first.rank) if error is None else error.headline,
        tail=tail,
        log=run.shown(output),
        host=run.node,
    )


def judge_receipt(run: Path, printed: PrintedReceipts, failure: str | None = None) -> JudgedReceipt:
    """The liveness contract applied to the run, which has failed with ``failure`` if it has.

    From what the output has shown while it was written, and the ranks' own records.
    """
    from ncclops.receipts import judge, sources

    facts = sources.load(run) if printed.broken else sources.of_run(run, printed.facts())
    return judge.judge(replace(facts, failure=failure)).to_record()


def clock_offset() -> float:
    """How far this host's clock is ahead of its monotonic one, in seconds: changes only where
    somebody sets it, or the machine slept."""
    return time.time() - time.monotonic()


def measure_goodput(run: RunDirectory, offset_at_start: float) -> Goodput | None:
    """Where the time of the run went, from its events.

    None where the host's clock was set since it had ``offset_at_start``: what lay between two
    events is not known then.
    """
    set_by_s = clock_offset() - offset_at_start
    if abs(set_by_s) > _SAME_CLOCK_S:
        log.warning("no goodput: the clock of this host was set by %.0f s meanwhile", set_by_s)
        return None
    return measure(spans(event_log.read(run.paths.events), now=time.time()))


def _receipt(receipt: JudgedReceipt) -> str:
    """The judgement in one line: healthy and its figures, or the rules that are broken."""
    if not receipt.shows_training:
        how = "`receipt.step(n)` in the script reports one, or a printed `step N loss X`"
        return f"receipt: none ({receipt.verdict}): no step was reported; {how}"
    if not receipt.healthy:
        broken = [rule for rule in receipt.rules if not rule.ok]
        if receipt.verdict == "rumour":  # that there are too few steps says most
            broken.sort(key=lambda rule: rule.rule != "three-steps")
        parts = [f"{rule.rule}: {rule.note}" for rule in broken[:1]]
        parts += [rule.rule for rule in broken[1:]]
        return ": ".join(filter(None, (f"receipt: {receipt.verdict}", "; ".join(parts))))
    figures = [f"{receipt.steps} steps reported"]
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
    which ranks the job has lost, and which node is to be replaced.
    """
    lines = [] if quiet and verdict.exit_code == 0 else _described(verdict)
    lost = f"; finished without {ranks_named(verdict.ranks_lost)}" if verdict.ranks_lost else ""
    broken = "".join(f"; rank {fault.rank}: {fault}" for fault in verdict.gpu_faults)
    lines.append(f"verdict: {_where(run)}{lost}{broken}")
    with suppress(OSError):  # a terminal that has gone does not change the verdict
        sys.stderr.write("".join(f"ncclops: {plain(line)}\n" for line in lines))
        sys.stderr.flush()
        if as_json:
            json.dump(VERDICT.to_json(verdict), sys.stdout, indent=2)
            sys.stdout.write("\n")
            sys.stdout.flush()


def print_crash(verdict: VerdictRecord, run: RunDirectory) -> None:
    """Print on stderr how the agent ended, where it could not go on."""
    answer.tell(
        f"ncclops: {verdict.outcome}: {plain(verdict.reason)}\n"
        f"ncclops: verdict: {plain(_where(run))}\n"
    )


def _where(run: RunDirectory) -> str:
    where = run.shown(run.paths.verdict)
    if run.verdict_problem is None:
        return where
    return f"cannot be written ({run.verdict_problem}) to {where}"


def _described(verdict: VerdictRecord) -> list[str]:
    """The outcome and the story of a failure, the receipt, where the time went."""
    without = f" without {ranks_named(verdict.ranks_lost)}" if verdict.ranks_lost else ""
    story = verdict.story
    why = verdict.reason if story is None else story.what
    lines = [f"{verdict.outcome}{without} after {verdict.seconds:.1f}s: {story_text.shown(why)}"]
    if story is not None:
        lines += [f"  {label:<8} {text}" for label, text in story_text.rows(story)]
    lines += [str(slow) for slow in verdict.slow_ranks]
    if not verdict.reason.startswith(NetworkRefused.option):  # then it is the reason already
        lines += [f"network: {use}" for use in verdict.unmet_networks]
    if verdict.receipt is not None and _is_ours_to_show(verdict.receipt, verdict):
        lines.append(_receipt(verdict.receipt))
    if verdict.goodput is not None and (goodput := describe(verdict.goodput)) is not None:
        lines.append(goodput)
    return lines
