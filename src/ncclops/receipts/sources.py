"""Facts from files: a log, a rank's ``receipt.jsonl``, or a whole run directory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from ncclops.errors import UsageError
from ncclops.receipts.log_formats import Form
from ncclops.receipts.log_scan import LogScan
from ncclops.receipts.observation import Observation, Where, parse_record
from ncclops.receipts.receipt_facts import Facts, Tally, by_steps, combine_ranks, fill_gaps
from ncclops.record import event_log, progress, receipt_records
from ncclops.record.events import WorkerExitedEvent, WorkerStartedEvent
from ncclops.record.paths import RankPaths, RunPaths
from ncclops.record.tail import read_lines
from ncclops.record.verdict_record import VERDICT

# Steps that a page may tell of which no record does: a page of random bytes tells of 2**63.
_MOST_UNRECORDED = 1_000_000
_BLOCK_BYTES = 1 << 16


def load(path: Path, *, extra_forms: Sequence[Form] = ()) -> Facts:
    """What ``path`` shows. Raises ``UsageError`` if it cannot be read or is no log and no run."""
    try:
        if path.is_dir():
            return _load_run(path, extra_forms)
        return _load_file(path, str(path), extra_forms, buffered=True)
    except OSError as error:
        raise UsageError(f"cannot read {path} ({error.strerror}): name a log or a run") from error


def _load_run(run: Path, extra_forms: Sequence[Form]) -> Facts:
    ranks = _ranks(run)
    if not ranks:
        raise UsageError(f"{run} holds no ranks/: name a log, a receipt.jsonl or a run directory")
    logs = [path for rank in ranks for path in (rank.stdout_log, rank.stderr_log) if path.exists()]
    facts = of_run(run, (_load_file(path, _shown(path, run), extra_forms) for path in logs))
    return replace(facts, failure=_failure(run))


def _failure(run: Path) -> str | None:
    """What the verdict tells of a failure."""
    try:
        verdict = VERDICT.read(RunPaths(run).verdict)
    except UsageError:
        return None
    if verdict is None or verdict.outcome != "failed":
        return None
    return verdict.reason if verdict.story is None else verdict.story.what


def of_run(run: Path, logs: Iterable[Facts]) -> Facts:
    """What all ranks' records show; what they leave open, from their ``logs``.

    Ranks that report nothing are not held against the run: many scripts report on rank 0 only. Nor
    are those that were lost: the others went on without them.
    """
    lost = _lost(run)
    receipts = [rank.receipt for rank in _ranks(run) if int(rank.root.name) not in lost]
    records = combine_ranks(
        load_records(path, _shown(path, run)) for path in receipts if path.is_file()
    )
    printed = fill_gaps(by_steps(logs))
    return fill_gaps([records, printed] if records.steps else [printed, records])


def _lost(run: Path) -> set[int]:
    """The ranks that ended badly in the last attempt, where others ended well."""
    ended: dict[int, bool] = {}
    for event in event_log.read(RunPaths(run).events):
        if isinstance(event, WorkerStartedEvent) and event.rank is not None:
            ended.pop(event.rank, None)
        elif isinstance(event, WorkerExitedEvent) and event.rank is not None:
            ended[event.rank] = event.exit_code == 0
    return {rank for rank, well in ended.items() if not well} if any(ended.values()) else set()


def _ranks(run: Path) -> list[RankPaths]:
    paths = RunPaths(run)
    return [paths.rank(number) for number in paths.rank_numbers()]


def load_records(path: Path, shown: str | None = None) -> Facts:
    """What a rank's ``receipt.jsonl`` shows, and the progress page next to it."""
    tally = Tally()
    for observation in _records(path, shown or str(path)):
        tally.add(observation)
    return tally.facts


def _records(path: Path, shown: str) -> Iterable[Observation]:
    number = recorded = 0
    for number, line in enumerate(read_lines(path), start=1):
        observation = parse_record(line, shown, number)
        if observation is None:
            continue
        recorded = 0 if observation.kind == "start" else recorded + (observation.kind == "step")
        yield observation
    yield from _unrecorded(path.with_name("progress"), recorded, Where(shown, number, ""))


def _unrecorded(page_path: Path, recorded: int, where: Where) -> Iterable[Observation]:
    """Steps that a process which was killed had done, but not yet recorded.

    ``recorded`` is how many steps of the last iteration are.
    """
    page = progress.read(page_path)
    if page is None or page.step is None:
        return
    missing = min(page.steps - recorded, page.step + 1, _MOST_UNRECORDED)
    for step in range(page.step - missing + 1, page.step + 1):
        where = replace(where, text=f"step {step} ended (from the progress page)")
        yield Observation(kind="step", where=where, step=step)


def _load_file(
    path: Path, shown: str, extra_forms: Sequence[Form], *, buffered: bool = False
) -> Facts:
    if _holds_records(path):
        return load_records(path, shown)
    scan = LogScan(shown, extra_forms=extra_forms, buffered=buffered)
    block = bytearray()
    for line in read_lines(path):
        block += line
        if len(block) >= _BLOCK_BYTES:
            scan.feed_block(bytes(block))
            block.clear()
    scan.feed_block(bytes(block))
    return scan.facts


def _holds_records(path: Path) -> bool:
    return receipt_records.decode(next(read_lines(path), b"")) is not None


def _shown(path: Path, run: Path) -> str:
    return str(path.relative_to(run))
