"""The timeline as SVG: what the run spent its time on, and what happened when. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ncclops.goodput import Span
from ncclops.report.markup import escape
from ncclops.report.units import spell

_WIDTH, _BAR, _TOP, _HEIGHT = 1100, 34, 26, 92
_MARK_COLOURS = {"fault": "var(--bad)", "retry": "var(--warn)", "straggler": "var(--warn)"}
_OTHER_MARK = "var(--dim)"
_TICKS = 8


@dataclass(frozen=True)
class Mark:
    """Something that happened at one moment (seconds since the epoch)."""

    at: float
    kind: str
    text: str


def timeline(spans: Sequence[Span], marks: Sequence[Mark]) -> str:
    """One bar of ``spans`` with ``marks`` above it and the seconds since the start below."""
    if not spans:
        return ""
    start, end = spans[0].start, max(span.end for span in spans)
    scale = _WIDTH / max(end - start, 1e-3)

    def x(at: float) -> float:
        return round(min(max(at - start, 0.0), end - start) * scale, 2)

    parts = [_bar(span, x(span.start), x(span.end), start) for span in spans]
    parts += [_mark(mark, x(mark.at), start) for mark in marks]
    parts += [_tick(number, end - start) for number in range(_TICKS + 1)]
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="timeline of the run">'
        f"{''.join(parts)}</svg>"
    )


def _bar(span: Span, left: float, right: float, start: float) -> str:
    said = f"{span.kind}: {spell(span.end - span.start)}, from {spell(span.start - start)}"
    return (
        f'<rect class="span" data-kind="{escape(span.kind)}" x="{left}" y="{_TOP}"'
        f' width="{max(right - left, 0.5):.2f}" height="{_BAR}"'
        f' fill="var(--{escape(span.kind)}, var(--dim))"><title>{escape(said)}</title></rect>'
    )


def _mark(mark: Mark, x: float, start: float) -> str:
    colour = _MARK_COLOURS.get(mark.kind, _OTHER_MARK)
    said = f"{mark.kind} at {spell(mark.at - start)}: {mark.text}"
    return (
        f'<g class="mark" data-kind="{escape(mark.kind)}"><title>{escape(said)}</title>'
        f'<path d="M{x} {_TOP}l-5 -11h10z" fill="{colour}"/>'
        f'<path d="M{x} {_TOP}v{_BAR}" stroke="{colour}" stroke-width="1"/></g>'
    )


def _tick(number: int, seconds: float) -> str:
    x = _WIDTH * number / _TICKS
    anchor = "start" if number == 0 else "end" if number == _TICKS else "middle"
    y = _TOP + _BAR
    return (
        f'<path d="M{x} {y}v5" stroke="var(--line)"/><text x="{x}" y="{y + 18}"'
        f' text-anchor="{anchor}">{spell(seconds * number / _TICKS)}</text>'
    )
