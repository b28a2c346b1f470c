"""The last hour of a run: as a bar of one line, and as a list of what happened. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from itertools import groupby

from ncclops.goodput import Span, SpanKind
from ncclops.live_view.history import Happening, Past
from ncclops.live_view.lines import Line, Style, line
from ncclops.live_view.words import duration

WINDOW_S = 3600.0
# Shorter than this nothing is drawn as a whole bar: a run that starts would be one colour.
_LEAST_S = 60.0
_FAULT: tuple[str, Style] = ("×", "red")
# Told apart without colour too.
_CELLS: dict[SpanKind, tuple[str, Style]] = {
    "steps": ("█", "green"),
    "redone": ("▓", "yellow"),
    "compile": ("▒", "cyan"),
    "unmeasured": ("▒", ""),
    "start-up": ("░", "cyan"),
    "restart": ("│", "yellow"),
    "cool-down": ("─", "yellow"),
    "end": ("·", "dim"),
}
_NAMES: dict[SpanKind, str] = {
    "steps": "steps",
    "redone": "steps done again",
    "compile": "compile",
    "unmeasured": "no steps seen",
    "start-up": "start-up",
    "restart": "restart",
    "cool-down": "pause",
    "end": "end",
}


def bar(past: Past, columns: int) -> Line:
    """One line of ``columns``: what the run's time went into, and where it had faults."""
    if past.began is None or columns < 20:
        return Line()
    end, begin = _window(past)
    label = f"last {duration(end - begin)} "
    cells = columns - len(label) - 2
    if cells < 8:
        return Line()
    shown = _cells(past, begin, end, cells)
    drawn = line(label, "dim").add("│", "dim")
    for style, group in groupby(shown, key=lambda cell: cell[1]):
        drawn = drawn.add("".join(glyph for glyph, _ in group), style)
    return drawn.add("│", "dim")


def page(past: Past, columns: int) -> list[Line]:
    """What the last hour was spent on, and what happened in it, the newest first."""
    if past.began is None:
        return [line("no event has been read yet", "dim")]
    end, begin = _window(past)
    shown = [bar(past, columns), *_axis(begin, end, columns), Line(), *_spent(past)]
    recent = [each for each in past.happenings if each.ts >= begin - 1]
    before = len(past.happenings) - len(recent)
    shown += [Line(), line(f"what happened in the last {duration(end - begin)}", "bold")]
    if not recent:
        shown.append(line("nothing but training", "dim"))
    for happening in reversed(recent):
        shown += _row(happening, columns)
    if before:
        shown.append(line(f"and {before} before (events.jsonl has all)", "dim"))
    return shown


def newest(past: Past, columns: int, most: int) -> list[Line]:
    """What has happened last, in ``most`` lines: the newest first, and a line each."""
    found = list(past.happenings)[-most:] if most > 0 else []
    return [
        line(f"{clock(each.ts)} ", "dim").add(each.text, each.style).fit(columns)
        for each in reversed(found)
    ]


def clock(ts: float) -> str:
    """The reader's time of day; ``?`` for what no calendar has."""
    try:
        return f"{datetime.fromtimestamp(ts).astimezone():%H:%M:%S}"
    except (OverflowError, ValueError, OSError):
        return "?"


def _window(past: Past) -> tuple[float, float]:
    """End and beginning, in seconds since the epoch: an hour, or as long as the run has lasted."""
    end = past.now if past.ended is None else past.ended
    began = end if past.began is None else past.began
    return end, end - min(WINDOW_S, max(_LEAST_S, end - began))


def _cells(past: Past, begin: float, end: float, cells: int) -> list[tuple[str, Style]]:
    width = (end - begin) / cells
    seconds = _seconds_by_cell(past.spans, begin, width, cells)
    drawn: list[tuple[str, Style]] = []
    for spent in seconds:
        kind = max(spent, key=lambda each: spent[each], default=None)
        drawn.append((" ", "") if kind is None else _CELLS[kind])
    for happening in past.happenings:
        if happening.is_fault and begin <= happening.ts <= end:
            drawn[min(cells - 1, int((happening.ts - begin) / width))] = _FAULT
    return drawn


def _seconds_by_cell(
    spans: Sequence[Span], begin: float, width: float, cells: int
) -> list[dict[SpanKind, float]]:
    found: list[dict[SpanKind, float]] = [{} for _ in range(cells)]
    for span in spans:
        first, last = (span.start - begin) / width, (span.end - begin) / width
        for number in range(max(0, int(first)), min(cells, int(last) + 1)):
            share = min(last, number + 1) - max(first, number)
            if share > 0:
                found[number][span.kind] = found[number].get(span.kind, 0.0) + share * width
    return found


def _axis(begin: float, end: float, columns: int) -> list[Line]:
    """The times of day below the bar, where there is room."""
    label = len(f"last {duration(end - begin)} ") + 1
    room = columns - label - 1
    left, right = clock(begin), clock(end)
    if room < len(left) + len(right) + 2:
        return []
    gap = " " * (room - len(left) - len(right))
    return [line(" " * label + left + gap + right, "dim")]


def _spent(past: Past) -> list[Line]:
    """A line for each kind of time in the window: also the legend of the bar."""
    end, begin = _window(past)
    sums: dict[SpanKind, float] = {}
    for span in past.spans:
        if (seconds := min(span.end, end) - max(span.start, begin)) > 0:
            sums[span.kind] = sums.get(span.kind, 0.0) + seconds
    total = sum(sums.values())
    rows = []
    for kind, seconds in sorted(sums.items(), key=lambda each: -each[1]):
        glyph, style = _CELLS[kind]
        share = f"{seconds / total:6.1%}" if total else ""
        rows.append(
            line(glyph * 2, style).add(f" {_NAMES[kind]:<17}{duration(seconds):>8} {share}")
        )
    faults = sum(each.is_fault and begin <= each.ts <= end for each in past.happenings)
    if faults:
        rows.append(line(*_FAULT).add(f"  {'faults':<17}{faults:>8}"))
    return rows


def _row(happening: Happening, columns: int) -> list[Line]:
    at = line(f"{clock(happening.ts)} ", "dim")
    return at.add(happening.text, happening.style).wrapped(columns, indent=9)
