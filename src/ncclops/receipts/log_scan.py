"""Reads a training log as it comes, line by line, and knows at any time what it shows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from ncclops.receipts.log_formats import (
    Form,
    LineKind,
    Pattern,
    Values,
    epoch_of,
    observe,
    shipped_forms,
)
from ncclops.receipts.observation import LONGEST_EVIDENCE, Observation, Where
from ncclops.receipts.receipt_facts import Facts, Tally, by_steps, fill_gaps
from ncclops.receipts.tables import Table, may_be_row, table_under

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
# torchrun's and the trainers' own ways to say which rank a line is from; srun -l has the task's.
_RANK_PREFIX = re.compile(r"\s*(?:\[(?:rank|default|\w+:)?(?P<rank>\d+)\]:|(?P<task>\d+): )\s?")
# What trainers print is shorter; a regex on megabytes of garbage could take minutes.
_LONGEST_LINE = 2000
# Ranks that lines name, for each form: each costs a kilobyte or two, and a script may print any.
_MOST_STREAMS = 100_000
_MOST_EPOCHS = 10_000
# What Python holds back of the output to a file, and writes when it ends.
_BUFFERED_BYTES = 8192

_Stream = tuple[str, int | None]  # a form and a rank

# Kinds for which another one's steps make a fallback needless, too.
_STANDS_FOR: dict[LineKind, LineKind] = {"table": "step"}

_Patterns = list[tuple[Form, Pattern]]


class LogScan:
    """What a log shows. Feed it every line of one file, or of a worker's output as it passes.

    ``file`` is what evidence calls the log. ``extra_forms`` (a profile's) are asked before
    ``forms``, by default those of the package. Of ranks that lines name, ``most_streams`` count, a
    rank for each form. ``buffered``: output and errors went to one file, so that what stands close
    behind a failure may have been printed before it.
    """

    def __init__(
        self,
        file: str,
        *,
        extra_forms: Sequence[Form] = (),
        forms: Sequence[Form] | None = None,
        most_streams: int = _MOST_STREAMS,
        buffered: bool = False,
    ) -> None:
        self._file = file
        self._buffered = buffered
        self._most_streams = most_streams
        self._lines = 0
        self._forms = (*extra_forms, *(shipped_forms() if forms is None else forms))
        self._patterns = [(form, each) for form in self._forms for each in form.patterns]
        self._contained = {literal for _, each in self._patterns for literal in each.contained}
        self._literals = _literals(self._patterns)
        # In a line one search for all of them is quicker than one for each, in a block it is not.
        self._quick = re.compile(b"|".join(map(re.escape, self._literals)))
        self._tallies: dict[_Stream, Tally] = {}
        self._totals: dict[_Stream, str | None] = {}
        self._epochs: dict[_Stream, _Epochs] = {}
        self._ended: dict[int | None, set[Tally]] = {}  # by rank; those that may have an end marker
        self._noise = -1  # the last line after which a traceback is harmless
        self._bytes = 0
        self._failed: tuple[int, Where] | None = None  # the last failure, and the bytes up to it
        self._unproven: Where | None = None
        self._table: tuple[Form, Pattern, Table] | None = None  # the last one that has begun
        self._warmup: Observation | None = None

    def feed(self, line: bytes | str, *, ends: bool = True) -> list[Observation]:
        """Take the next line (with or without its newline); what it shows, at most one of a kind.

        A line with carriage returns is a bar that was redrawn; each drawing counts, in order.
        ``ends`` is False for a part of a line that goes on, such as one such drawing.
        """
        raw = line.encode(errors="replace") if isinstance(line, str) else line
        return self._feed_line(raw, ends, self._patterns)

    def feed_block(self, block: bytes) -> list[Observation]:
        """Take many lines, and drawings of bars, each with its end; as ``feed`` of each.

        What a trainer prints is little of a flood: patterns of which the block holds no literal
        are not asked for each line.
        """
        lowered = block.lower()
        if self._table is None and not any(literal in lowered for literal in self._literals):
            self._lines += block.count(b"\n")
            self._bytes += len(block)
            return []
        # Forms share many of their literals: each is looked for once.
        missing = {literal for literal in self._contained if literal not in lowered}
        patterns = [
            (form, pattern)
            for form, pattern in self._patterns
            if not missing.issuperset(pattern.contained)
        ]
        return [
            seen
            for line in block.splitlines(keepends=True)
            for seen in self._feed_line(line, line.endswith(b"\n"), patterns)
        ]

    def _feed_line(self, raw: bytes, ends: bool, patterns: _Patterns) -> list[Observation]:
        number = self._lines + 1
        self._lines += ends
        self._bytes += len(raw)
        if self._quick.search(raw.lower()) is None and (self._table is None or not may_be_row(raw)):
            return []
        text = raw.decode(errors="replace")
        if "\x1b" in text:
            text = _ANSI.sub("", text)
        seen: list[Observation] = []
        for drawing in text.replace("\n", "").split("\r"):
            seen += self._feed_drawing(drawing[:_LONGEST_LINE], number, patterns)
        return seen

    @property
    def facts(self) -> Facts:
        """What the lines so far show."""
        found = {form.name: self._facts_of(form) for form in self._forms}
        views = [
            (form, fill_gaps(by_steps(ranks)))
            for form in self._forms
            if (ranks := found[form.name]) and (form.only_with is None or found.get(form.only_with))
        ]
        # Stable: of formats that match equally much, the one that is asked first.
        views.sort(key=lambda view: (view[1].steps == 0, view[0].fallback, -view[1].steps))
        facts = fill_gaps(replace(facts, says_warmup=form.says_warmup) for form, facts in views)
        return replace(facts, unproven=self._unproven)

    def _facts_of(self, form: Form) -> list[Facts]:
        return [tally.facts for (name, _), tally in self._tallies.items() if name == form.name]

    def _feed_drawing(self, text: str, number: int, patterns: _Patterns) -> list[Observation]:
        prefix = _RANK_PREFIX.match(text)
        rank = int(prefix["rank"] or prefix["task"]) if prefix else None
        body = text[prefix.end() :] if prefix else text
        where = Where(self._file, number, text.strip()[:LONGEST_EVIDENCE])
        lowered = body.lower()
        seen: dict[str, Observation] = {}
        matched: set[tuple[str, str]] = set()
        settled: set[str] = set()  # kinds for which no fallback is needed
        if self._table is not None and (row := self._table[2].row(body)) is not None:
            form, pattern, _ = self._table
            pattern.complete(row, body)
            return self._observe(form, pattern, rank, row, where)
        for form, pattern in patterns:
            if form.fallback and settled and _STANDS_FOR.get(pattern.kind, pattern.kind) in settled:
                continue
            if (form.name, pattern.kind) in matched:
                continue
            values = pattern.match(body, lowered)
            if values is None or (pattern.continues and not self._has_begun(form, rank)):
                continue
            matched.add((form.name, pattern.kind))
            if pattern.kind == "noise":
                self._noise = number
                continue
            if pattern.kind == "failed":
                if number != self._noise + 1:
                    self._failed = (self._bytes, where)
                    self._take_back_ends(list(self._ended))
                continue
            if pattern.kind == "table":
                if (table := table_under(body)) is not None:
                    self._table = (form, replace(pattern, kind="step"), table)
                continue
            for observation in self._observe(form, pattern, rank, values, where):
                if not form.fallback and self._counts(form, rank):
                    settled.add(observation.kind)
                seen.setdefault(observation.kind, observation)
        return list(seen.values())

    def _has_begun(self, form: Form, rank: int | None) -> bool:
        """Whether ``rank``'s steps that any script may print are this form's; see ``Pattern``."""
        own = self._tallies.get((form.name, rank))
        if own is not None and own.has_steps:
            return True
        return self._warmup is not None and not any(
            tally.has_steps for (_, of), tally in self._tallies.items() if of == rank
        )

    def _observe(
        self, form: Form, pattern: Pattern, rank: int | None, values: Values, where: Where
    ) -> list[Observation]:
        stream = (form.name, rank)
        if stream not in self._totals and len(self._totals) >= self._most_streams:
            return []
        total = values.get("total", [None])[0] if "epoch" not in values else None
        if total != self._totals.setdefault(stream, total):
            return []  # another bar: evaluation has one of its own
        observations = observe(pattern, values, where)
        epoch = epoch_of(values)
        if epoch is not None and observations[0].step is not None:
            epochs = self._epochs.setdefault(stream, _Epochs())
            step = epochs.count_on(epoch, observations[0].step)
            if step != observations[0].step:
                observations[0] = replace(observations[0], step=step)
        if pattern.kind == "step" and observations[0].step == 0 and not form.zero_based:
            observations = [replace(observations[0], kind="begun", step=None)]
        for observation in observations:
            self._add(form, stream, observation)
        return observations

    def _add(self, form: Form, stream: _Stream, seen: Observation) -> None:
        if stream not in self._tallies:
            self._tallies[stream] = Tally(zero_based=form.zero_based)
            if self._warmup is not None:
                self._tallies[stream].add(self._warmup)
        if seen.kind == "warmup":  # whichever rank prints it, it is over for all
            self._warmup = seen
            for tally in self._tallies.values():
                tally.add(seen)
            return
        tally, rank = self._tallies[stream], stream[1]
        if seen.kind == "end":
            if self._may_be_older():
                self._unproven = self._failed[1] if self._failed else None
                return
            self._unproven = None
            self._ended.setdefault(rank, set()).add(tally)
        before = tally.last_step
        if seen.step is not None and before is not None and seen.step < before:
            self._failed = None  # another start
        tally.add(seen)
        # Bars draw their last step again after the end.
        if rank in self._ended and tally.last_step != before and self._counts(form, rank):
            self._take_back_ends([rank])

    def _may_be_older(self) -> bool:
        """Whether the last line may have been printed before the last failure."""
        if not self._buffered or self._failed is None:
            return False
        return self._bytes - self._failed[0] <= _BUFFERED_BYTES

    def _counts(self, form: Form, rank: int | None) -> bool:
        """Whether steps of ``form``, for a fallback those of ``rank``, are the run's."""
        if form.only_with is not None:
            return any(name == form.only_with for name, _ in self._tallies)
        return not form.fallback or not any(
            tally.has_steps
            for other in self._forms
            if other is not form and other.only_with is None
            if (tally := self._tallies.get((other.name, rank))) is not None
        )

    def _take_back_ends(self, ranks: Iterable[int | None]) -> None:
        """The run, or one of its ranks, has gone on or failed after what was said to be its end."""
        for rank in ranks:
            for tally in self._ended.pop(rank):
                tally.take_back_end()


class _Epochs:
    """Counts the steps of one stream on where they begin again with each epoch."""

    def __init__(self) -> None:
        self._before: dict[int, int] = {}  # by epoch, the steps before it
        self._latest = -1
        self._last = -1

    def count_on(self, epoch: int, step: int) -> int:
        """The step of the run that is ``step`` of ``epoch``."""
        if epoch not in self._before:
            if len(self._before) >= _MOST_EPOCHS:
                return step
            before = self._before.get(self._latest, 0)
            if epoch > self._latest >= 0 and step + before <= self._last:
                before = self._last + 1
            self._before[epoch] = before
        number = self._before[epoch] + step
        if epoch > self._latest:
            self._latest, self._last = epoch, number
        elif epoch == self._latest and number > self._last:  # ranks need not print in step
            self._last = number
        return number


def _literals(patterns: _Patterns) -> tuple[bytes, ...]:
    """A line that any pattern can match holds one of these: most hold none, and this is quick."""
    found = {literal for _, pattern in patterns for literal in pattern.contained}
    # Those that contain another one add nothing.
    return tuple(sorted(each for each in found if not any(o in each for o in found - {each})))
