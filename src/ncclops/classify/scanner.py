"""The scanner: bytes of many ranks, and facts about them, in; hits of signatures out.

It is fed live by the launcher (``feed``) and from files by ``inputs.classify_paths``; both go
the same way. Memory is bounded: of equal hits of one rank in one source the first few and the
newest are kept, the rest is counted.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import datetime
from functools import partial

from ncclops.classify import line_ranks, stamps
from ncclops.classify.activity import NO_MARKS, WHOLE_BLOCK, Marks, Progress, read_marks
from ncclops.classify.blocks import BlockCutter
from ncclops.classify.candidates import likeliest
from ncclops.classify.loader import SignatureSet, standing_signatures
from ncclops.classify.matched_lines import (
    EVIDENCE_CHARS,
    LAST_ERROR,
    LAST_ERROR_REACH,
    Line,
    Match,
    accused,
    by_line,
    excerpt,
    holds_firm,
    is_of_ignored_exception,
    readings,
    strongest_on_line,
    with_last_errors,
    writer,
    writers,
)
from ncclops.classify.model import EXITS, HANGS, Evidence, Hit, Report, Signature, Stamp, Stats
from ncclops.classify.observations import Observations, SourceLife
from ncclops.classify.ranking import judge
from ncclops.classify.verdicts import ANY_WARNING, shows_nothing, verdict_at_work, verdict_by_words
from ncclops.process_ends import describe_exit

# How far back a line without a time looks for one.
_LOOK_BACK = 8192
# In a large file, how often signs of life are looked for where nothing failed.
_MARK_EVERY = 4 << 20
# Hits kept of one signature, rank and source; the last of them is replaced by newer ones.
_KEPT_HITS = 3
# A literal that has occurred so often in one source shows nothing new there.
_SATURATED = 5000
# The time that patterns take grows with the square of a line: a long one counts for many.
_LONG_LINE, _CHARS_A_LINE = 2048, 64
_KEPT_PROCESSES = 20_000
_KEPT_GROUPS = 200_000

# Signatures whose lines carry facts about ranks.
_COMMUNICATOR = "context-communicator-rank"
_SUMMARY_RANK = "context-elastic-rank"
_ROOT_CAUSE = "context-elastic-root-cause"
# Of lines between two runs of a job that wrote to the same file.
_RUN_OVER, _RUN_BEGINS = "context-run-over", "context-run-begins"
# Ids of signatures that know a line by what it speaks of: not by the kind of process that Ray and
# vLLM name in front of it.
_TOPICS = "topic-"
# Signatures of an exception of which nothing is known but that it is one.
_PLAIN_EXCEPTIONS = ("python-exception", "python-exception-other")


class _Source:
    """One stream of one rank, or one file."""

    def __init__(self, name: str, number: int, rank: int | None, attempt: int) -> None:
        self.name, self.number, self.rank = name, number, rank
        self.cutter, self.life = BlockCutter(), SourceLife(attempt)
        self.tail, self.tail_line = b"", 1
        # Bytes since signs of life were looked for; a new source is due at once.
        self.unmarked = 1 << 62
        self.literal_counts: dict[int, int] = {}
        self.summary_rank: int | None = None
        self.root_cause_next = False
        # Where the next block begins, up to where stamps were looked for, and the last one there.
        self.offset, self.dated_to = 0, 0
        self.stamp: Stamp | None = None
        # Steps counted on a line that has no end yet: it will be read again.
        self.provisional_steps = 0
        self.progress = Progress()
        # Whether the run that this source was showing is over, and what was found in those before.
        self.run_over = False
        self.earlier: list[Hit] = []

    def settle(self) -> None:
        """Forget what the unfinished line had added to the counts."""
        self.life.steps -= self.provisional_steps
        self.provisional_steps = 0

    def stamp_before(self, block: bytes, start: int) -> Stamp | None:
        """The stamp that a line without one inherits; no byte is searched twice."""
        begin = max(self.dated_to - self.offset, start - _LOOK_BACK)
        text = block[begin:start] if begin >= 0 else self.tail[begin:] + block[:start]
        self.dated_to = self.offset + start
        found = stamps.last_stamp(text.decode("utf-8", "replace"))
        self.stamp = found or self.stamp
        return self.stamp


class Scanner:
    """Finds what failed in output that arrives in pieces, from any number of ranks.

    Not safe for use from several threads at once; a verdict may be asked for at any time and
    does not end the scan.
    """

    def __init__(
        self,
        signatures: SignatureSet | None = None,
        *,
        clock: Callable[[], datetime] | None = None,
    ) -> None:
        """``clock`` is for live output: it dates the lines that bear no time of their own."""
        self._signatures = signatures or standing_signatures()
        self._clock = clock
        self._sources: dict[tuple[int | None, str], _Source] = {}
        self._ranks: list[int | None] = []
        self._hits: dict[tuple[str, int, int | None], list[Hit]] = {}
        self._process_ranks: dict[tuple[str, int], tuple[int, int]] = {}
        self._first_failed: int | None = None
        self._has_stepped = False
        self._order = 0
        self._bytes = 0
        self._is_empty = True
        self._began = time.monotonic()
        literals = self._signatures.literals
        self._last_error = literals.index(LAST_ERROR) if LAST_ERROR in literals else None

    def feed(self, rank: int | None, stream: str, data: bytes | str) -> None:
        """Read what ``rank`` has just written to ``stream``; ``data`` may end within a line.

        ``stream`` names the source in the evidence: a path, or ``stdout``. Text, such as that of an
        exception, may hold halves of characters (of names that are no UTF-8): they become ``?``.
        """
        if isinstance(data, str):
            data = data.encode(errors="replace")
        source = self._source(rank, stream)
        self._bytes += len(data)
        self._is_empty = self._is_empty and not data
        source.settle()
        for block, first_line in source.cutter.push(data):
            self._read_block(source, block, first_line)
            source.offset += len(block)

    def add_exit(self, rank: int, *, code: int | None = None, signal: str | None = None) -> None:
        """The process of ``rank`` has failed: with exit ``code``, or killed by ``signal``.

        ``signal`` is its name, such as ``SIGKILL``. Evidence like any line: a crash in native
        code leaves nothing else.
        """
        how = describe_exit(code, signal)
        self._add_fact(rank, EXITS, f"rank {rank} {how}", self._signatures.of_exit(code, signal))

    def add_hang(self, rank: int, reason: str) -> None:
        """The launcher has found that ``rank`` hangs; ``reason``: the evidence, for people."""
        self._add_fact(rank, HANGS, reason, self._signatures.of_hang())

    def add_steps(self) -> None:
        """The launcher knows of steps before the failure, whether or not a log shows any."""
        self._has_stepped = True

    def verdict(self, notes: Iterable[str] = (), *, starting_up: bool | None = None) -> Report:
        """The verdict on all that was fed so far, lines without an end included.

        ``starting_up`` says what the caller may know better than the log: that the first
        collective is still to come (True), or has completed (False).
        """
        for source in self._sources.values():
            if source.unmarked:
                marks = read_marks(source.tail, (), source.progress)
                source.life.note(marks, source.tail, source.tail_line)
                source.unmarked = 0
            source.settle()
            block, line = source.cutter.pending()
            if block:
                steps, progress = source.life.steps, source.progress.copy()
                self._read_block(source, block, line)
                source.provisional_steps = source.life.steps - steps
                source.progress = progress
        report = self._judge(tuple(notes), starting_up)
        if self._is_empty:
            return report
        if report.verdict.class_ == "unknown":
            return self._by_words(report)
        if report.verdict.signature in _PLAIN_EXCEPTIONS:
            return _by_words_of_exception(report)
        return report

    @property
    def steps(self) -> int:
        """Training steps that the output fed so far shows, of the source that shows most."""
        return max((source.life.steps for source in self._sources.values()), default=0)

    def _source(self, rank: int | None, stream: str) -> _Source:
        key = (rank, stream)
        if key not in self._sources:
            attempt = line_ranks.attempt_of_path(stream)
            self._sources[key] = _Source(stream, len(self._sources), rank, attempt)
            self._ranks.append(rank)
        return self._sources[key]

    def _stats(self) -> Stats:
        lines = 0
        for source in self._sources.values():
            unfinished, line = source.cutter.pending()
            lines += line - 1 + bool(unfinished)
        seconds = time.monotonic() - self._began
        return Stats(len(self._sources), lines, self._bytes, seconds)

    def _is_harmless(self, line: str, besides: str = "") -> bool:
        return any(
            signature.role == "benign"
            and signature.id != besides
            and not signature.id.startswith("context-")
            for signature in self._signatures.match_line(line)
        )

    def _by_words(self, report: Report) -> Report:
        """The report on a failure that no signature knows, by the words of its lines."""
        # Most failures are explained.
        from ncclops.classify.last_words import BY_WORDS, are_at_work, guess

        sources = list(self._sources.values())
        tails = [_last_part(source) for source in sources]
        found = guess(tails, self._is_harmless)
        if found is None:
            known = partial(self._is_harmless, besides=ANY_WARNING)
            if shows_nothing(report.verdict) and are_at_work(tails, known):
                return replace(report, verdict=verdict_at_work())
            return replace(report, candidates=likeliest(tails))
        source = sources[found.source]
        unfinished, line = source.cutter.pending()
        number = (line if unfinished else line - 1) - found.line_from_end
        rank = line_ranks.rank_of_line(found.text)
        rank = source.rank if rank is None else rank
        text = excerpt(found.text, 0)
        evidence = Evidence(source.name, number, text, BY_WORDS, "cause", rank)
        return replace(report, verdict=verdict_by_words(found, rank), evidence=(evidence,))

    def _begin_run(self, source: _Source, line: int, steps: int) -> None:
        """Another run of the job begins: what was found until now is of an earlier one."""
        groups = [group for group in self._hits if group[1] == source.number]
        ended = [hit for group in groups for hit in self._hits.pop(group)]
        if _hold_failure(ended) or not _hold_failure(source.earlier):
            source.earlier = ended
        source.life.begin_run(line, steps)
        source.run_over, self._first_failed = False, None

    def _judge(self, notes: tuple[str, ...], starting_up: bool | None) -> Report:
        """The verdict on the last run where logs show several, if it is known how that went."""
        again = [source for source in self._sources.values() if source.life.run_line is not None]
        stats = self._stats()
        if not again:
            return judge(self._observations(starting_up), stats, notes)
        report = judge(self._observations(starting_up, last_run=True), stats, notes)
        verdict = report.verdict
        says_how = verdict.names_failure and verdict.class_ != "peer-exit"
        after_none = not any(_hold_failure(source.earlier) for source in again)
        if all(source.life.of_last_run().has_come_up for source in again) or (
            (says_how or after_none) and not verdict.eligible
        ):
            on = "the verdict is on the last"
        else:
            # It may be no run of its own, but another host of the one before, which was late.
            report = judge(self._observations(starting_up), stats, notes)
            on = "and nothing shows how it went; the verdict is on it and the one before"
        told = (f"{s.name}:{s.life.run_line}: another run of the job begins, {on}" for s in again)
        return replace(report, notes=(*report.notes, *told))

    def _observations(self, starting_up: bool | None, *, last_run: bool = False) -> Observations:
        """What was found; ``last_run``: without that of earlier runs in the same log."""
        found = [hit for group in self._hits.values() for hit in group]
        sources = list(self._sources.values())
        lives = [source.life for source in sources]
        if last_run:
            before = [life.steps_of_earlier_runs for life in lives]
            found = [h._replace(steps_before=h.steps_before - before[h.source]) for h in found]
            lives = [life.of_last_run() for life in lives]
        else:
            found += [hit for source in sources for hit in source.earlier]
        named = [(source.name, source.rank) for source in self._sources.values()]
        trusted = line_ranks.files_are_ranks(
            named, [(h.source, h.rank) for h in found if not h.accuses]
        )
        hits = [self._with_rank(hit, trusted) for hit in found]
        return Observations(
            hits=hits,
            lives=lives,
            first_failed_rank=self._first_failed,
            starting_up=starting_up,
            has_stepped=self._has_stepped,
            is_empty=self._is_empty,
        )

    def _with_rank(self, hit: Hit, files_are_ranks: bool) -> Hit:
        """The hit with the rank of its file or process, where its own line gives none to go by."""
        of_file = self._ranks[hit.source]
        if hit.accuses or (hit.rank is not None and not (files_are_ranks and of_file is not None)):
            return hit
        rank = of_file if files_are_ranks else None
        if rank is None and hit.process is not None:
            known = self._process_ranks.get(hit.process)
            rank = known[0] if known else None
        if rank is None:
            rank = of_file
        return hit if rank is None else hit._replace(rank=rank)

    def _read_block(self, source: _Source, block: bytes, first_line: int) -> None:
        found = self._signatures.matcher(block)
        marks = NO_MARKS
        source.unmarked += len(block)
        if found or source.unmarked >= _MARK_EVERY or len(block) <= WHOLE_BLOCK:
            marks = read_marks(block, found, source.progress)
            source.unmarked = 0
        line, counted = first_line, 0
        asked = with_last_errors(block, source.tail, found, self._last_error)
        for start, stop, literals in by_line(block, self._unsaturated(source, asked)):
            line += block.count(b"\n", counted, start)
            counted = max(counted, start)
            self._read_line(source, block, (start, stop), line, literals, marks)
        source.life.note(marks, block, first_line)
        source.tail = (source.tail + block[-_LOOK_BACK:])[-_LOOK_BACK:]
        source.tail_line = source.cutter.line - source.tail.count(b"\n")

    def _unsaturated(
        self, source: _Source, found: Iterable[tuple[int, int]]
    ) -> Iterator[tuple[int, int]]:
        counts = source.literal_counts
        for end, literal in found:
            count = counts[literal] = counts.get(literal, 0) + 1
            if count <= _SATURATED:
                yield end, literal

    def _read_line(
        self,
        source: _Source,
        block: bytes,
        span: tuple[int, int],
        line: int,
        literals: set[int],
        marks: Marks,
    ) -> None:
        text = block[span[0] : span[1]].decode("utf-8", "replace").strip("\r\n")
        if len(text) > _LONG_LINE:
            for literal in literals:
                source.literal_counts[literal] += len(text) // _CHARS_A_LINE
        parts = writers(text) if "[rank" in text else [text]
        before = [_before(source, block, span[0])] + [b""] * len(parts)
        matched = [
            (part, self._match(readings(part, above), literals))
            for part, above in zip(parts, before, strict=False)
        ]
        if not any(found for _, found in matched):
            return
        if is_of_ignored_exception(_before(source, block, span[0], _LOOK_BACK)):
            matched = [(part, _without_script_s(found)) for part, found in matched]
        stamp = stamps.first_stamp(text[:EVIDENCE_CHARS])
        if stamp is None:
            now = self._clock() if self._clock else None
            stamp = stamps.stamp_of(now) if now else source.stamp_before(block, span[0])
        steps = source.life.steps + bisect_left(marks.steps, span[0])
        ids = {match.signature.id for _, found in matched for match in found}
        if _RUN_BEGINS in ids:
            if source.run_over:
                self._begin_run(source, line, steps)
            source.life.begin_line, source.life.steps_at_begin = line, steps
        source.run_over = source.run_over or _RUN_OVER in ids
        for part, found in matched:
            seen = Line(part, line, line_ranks.rank_of_line(part), stamp, steps)
            for match in found:
                self._learn(source, match.signature, part)
                self._keep(source, match, seen)

    def _match(self, texts: list[str], literals: set[int]) -> list[Match]:
        """The signatures that match one line in one of its readings."""
        signatures = self._signatures
        by_literal = signatures.signatures_of_literal
        candidates = {number for literal in literals for number in by_literal[literal]}
        weak = candidates & signatures.dropped_beside_firm
        matched = {number: self._found(number, texts) for number in candidates - weak}
        # Those left out until then are weak and outrank weak ones only: no line is firm by them.
        firm = holds_firm(filter(None, matched.values()))
        if not firm:
            matched |= {number: self._found(number, texts) for number in weak}
        in_order = (matched[number] for number in sorted(matched))
        return strongest_on_line([match for match in in_order if match is not None], firm)

    def _found(self, number: int, texts: list[str]) -> Match | None:
        compiled = self._signatures.compiled[number]
        of_topic = compiled.signature.id.startswith(_TOPICS)
        for text in texts[-1:] if of_topic and texts[0].startswith("(") else texts:
            if (found := compiled.match(text)) is not None:
                return Match(compiled.signature, found.start(), accused(found), writer(found))
        return None

    def _add_fact(self, rank: int, name: str, text: str, signatures: list[Signature]) -> None:
        self._is_empty = False
        now = self._clock() if self._clock else None
        fact = Line(text, 1, rank, stamps.stamp_of(now) if now else None, steps_before=0)
        matched = [Match(each, 0, None) for each in signatures]
        for match in strongest_on_line(matched, holds_firm(matched)):
            self._keep(self._source(rank, name), match, fact)

    def _learn(self, source: _Source, signature: Signature, text: str) -> None:
        if signature.id == _COMMUNICATOR:
            self._learn_process(text)
        elif signature.id == _ROOT_CAUSE:
            source.root_cause_next = True
        elif signature.id == _SUMMARY_RANK:
            source.summary_rank = line_ranks.rank_of_summary(text)
            if source.root_cause_next:
                self._first_failed, source.root_cause_next = source.summary_rank, False

    def _learn_process(self, text: str) -> None:
        process, place = line_ranks.process_of_line(text), line_ranks.rank_in_communicator(text)
        if process is None or place is None or len(self._process_ranks) >= _KEPT_PROCESSES:
            return
        # Sub-groups number their members anew: the largest communicator is the world.
        known = self._process_ranks.get(process)
        if known is None or place[1] > known[1]:
            self._process_ranks[process] = place

    def _keep(self, source: _Source, match: Match, line: Line) -> None:
        signature = match.signature
        rank = line.rank if match.culprit is None else match.culprit
        if rank is None:
            rank = match.writer
        if rank is None and signature.exits:
            rank = source.summary_rank
        group = (signature.id, source.number, rank)
        if group not in self._hits and len(self._hits) >= _KEPT_GROUPS:
            return
        kept = self._hits.setdefault(group, [])
        if any(hit.line == line.number for hit in kept):
            return
        self._order += 1
        hit = Hit(
            signature=signature,
            source=source.number,
            file=source.name,
            line=line.number,
            text=excerpt(line.text, match.start),
            rank=rank,
            stamp=line.stamp,
            steps_before=line.steps_before,
            order=self._order,
            accuses=match.culprit is not None,
            process=line_ranks.process_of_line(line.text),
        )
        if len(kept) < _KEPT_HITS:
            kept.append(hit)
        else:
            kept[-1] = hit


def _by_words_of_exception(report: Report) -> Report:
    """The report on an exception of the script's, or of what its words speak of beyond doubt."""
    from ncclops.classify.last_words import of_exception

    verdict = report.verdict
    lines = (line.text for line in report.evidence if line.signature == verdict.signature)
    if (found := of_exception(next(lines))) is None:
        return report
    said = verdict_by_words(found, verdict.rank)
    return replace(report, verdict=replace(said, rank_began_it=verdict.rank_began_it))


def _last_part(source: _Source) -> str:
    return (source.tail + source.cutter.pending()[0][:_LOOK_BACK]).decode("utf-8", "replace")


def _hold_failure(hits: Iterable[Hit]) -> bool:
    return any(hit.signature.role != "benign" for hit in hits)


def _without_script_s(found: Iterable[Match]) -> list[Match]:
    """``found`` without what the script has raised; that its GPU has failed, say, it may show."""
    return [match for match in found if match.signature.class_ != "user-error"]


def _before(source: _Source, block: bytes, start: int, reach: int = LAST_ERROR_REACH) -> bytes:
    """The bytes that end where a line begins, of the block before where it begins this one."""
    earlier = source.tail[-reach:] if start < reach else b""
    return earlier + block[max(0, start - reach) : start]
