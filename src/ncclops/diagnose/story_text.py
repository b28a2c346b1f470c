"""A story as lines for people: the same on the terminal, in `ncclops diagnose` and the report."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

from ncclops.rank_lists import ranks_named
from ncclops.record.story_record import CodeLine, Story, TriedStep

_MOST_STEPS = 3


def rows(told: Story) -> Iterator[tuple[str, str]]:
    """What follows ``told.what``: label and text, the label once where several texts follow it."""
    if told.host is not None and told.host not in told.what:
        yield "rank", f"{told.rank} on {told.host}"
    yield from _labelled("code", _code(told.code))
    yield from _labelled("output", told.output)
    if told.operation is not None:
        yield "in", f"{told.operation}, the last operation that this rank entered"
    if told.class_ is not None:
        yield "class", f"{told.class_} ({told.confidence or 0:.2g}): {told.summary}"
    yield from _labelled("proof", map(shown, told.proof))
    if steps := tried(told.tried):
        yield "tried", steps
    if told.ended and told.ended not in told.what:
        yield "ended", told.ended
    if told.stopped:
        yield "stopped", told.stopped
    yield from _labelled("do", map(shown, told.next_steps[:_MOST_STEPS]))
    there = f" on {told.log_host}" if told.log_host else ""
    if told.log is not None:
        yield "log", shown(told.log) + there
    yield "next", shown(told.next_command) + (f"  #{there}" if there else "")


def shown(text: str) -> str:
    """``text`` with paths below the current directory as a person would type them from here."""
    try:
        return text.replace(f"{Path.cwd()}{os.sep}", "")
    except OSError:  # the current directory is gone
        return text


def _labelled(label: str, texts: Iterable[str]) -> Iterator[tuple[str, str]]:
    for number, text in enumerate(texts):
        yield ("" if number else label), text


def _code(lines: Sequence[CodeLine]) -> Iterator[str]:
    for line in lines:
        function = f" in {line.function}" if line.function else ""
        text = f": {line.text}" if line.text else ""
        yield f"{shown(line.file)}:{line.line}{function}{text}"
        if line.calls is not None:
            yield f"... {line.calls}"


def tried(steps: Sequence[TriedStep]) -> str:
    """Such as ``3 restarts in place (without rank 2), new processes, 1 restart in place``."""
    counted = []
    for kind, group in groupby((each for each in steps if each.kind != "escalation"), _kind):
        alike = list(group)
        if kind == "attempt":
            counted += ["new processes"] * len(alike)
            continue
        lost = {rank for step in alike for rank in step.lost}
        without = f" (without {ranks_named(lost)})" if lost else ""
        counted.append(f"{len(alike)} restart{'s' * (len(alike) != 1)} in place{without}")
    return ", ".join(counted)


def _kind(step: TriedStep) -> str:
    return step.kind
