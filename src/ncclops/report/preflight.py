"""What was found before the start: hosts against checks, a picture of the edges, remedies. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from ncclops.record.preflight_record import CheckFound, EdgesChecked, PreflightRecord
from ncclops.report.markup import escape

# A letter of ``EdgesChecked.matrix``: its word, and its colour.
_STATES = {
    ".": ("passes", "var(--steps)"),
    "x": ("dead", "var(--bad)"),
    "p": ("ports blocked", "var(--bad)"),
    "m": ("large packets lost", "var(--bad)"),
    "l": ("connections lost", "var(--bad)"),
    "b": ("little bandwidth", "var(--warn)"),
    "s": ("slow", "var(--warn)"),
    "?": ("unknown", "var(--cool-down)"),
}
_BAD = ("FAIL", "WARN")
_LABEL, _LETTER, _TOP, _LEAST_WIDTH = 16, 6.5, 14, 320
_ROWS_SHOWN = 64
_MOST_CELLS = 10_000  # 1.5 MB of the page


def section(record: PreflightRecord) -> str:
    """The part of the page."""
    found, edges = record.findings(), record.edges
    rows = _findings(found)
    if edges is not None:
        rows = [
            ("edges", each.severity, each.kind, "", f"{each.what} {each.evidence}", each.remedy)
            for each in edges.causes
        ] + rows
    titles = ("host", "", "check", "of", "read", "what to do")
    parts = [
        f"<h2>Preflight: {escape(record.status)}</h2>",
        _summary(found, edges),
        _hosts_against_checks(found),
        "" if edges is None else _picture(edges),
        _table(titles, rows) if rows else "",
    ]
    return "".join(parts)


def _summary(found: dict[str, tuple[CheckFound, ...]], edges: EdgesChecked | None) -> str:
    text = f"{len(found)} host{'s' * (len(found) != 1)}"
    if edges is not None:
        text += f", {edges.edges} edges between them: {edges.failed_edges} fail"
        text += f", {edges.unknown_edges} were not looked at" if edges.unknown_edges else ""
        text += f"; usual round trip {edges.rtt_ms:.2f} ms" if edges.rtt_ms >= 0 else ""
    return f'<p class="dim">{escape(text)}</p>'


def _findings(found: dict[str, tuple[CheckFound, ...]]) -> list[tuple[str, ...]]:
    return [
        (host, each.status, each.check, each.subject, _read(each), each.remedy)
        for status in _BAD
        for host, findings in found.items()
        for each in findings
        if each.status == status
    ]


def _read(found: CheckFound) -> str:
    return f"{found.read} (wanted: {found.wanted})" if found.wanted else found.read


def _hosts_against_checks(found: dict[str, tuple[CheckFound, ...]]) -> str:
    """A column for each check that is not well somewhere."""
    worst = {host: _worst(findings) for host, findings in found.items()}
    checks = sorted({check for each in worst.values() for check in each})
    if not checks:
        return ""
    hosts = [host for host in found if worst[host]] if len(found) > _ROWS_SHOWN else [*found]
    rest = len(found) - len(hosts)
    rows = [(host, *(worst[host].get(check, "") for check in checks)) for host in hosts]
    more = f'<p class="dim">{rest} hosts without a finding are left out.</p>' if rest else ""
    return _table(("host", *checks), rows) + more


def _worst(findings: Iterable[CheckFound]) -> dict[str, str]:
    """By check: FAIL, else WARN, with how many subjects show it."""
    made: dict[str, str] = {}
    listed = [each for each in findings if each.status in _BAD]
    for check in {each.check for each in listed}:
        counts = [sum((e.check, e.status) == (check, status) for e in listed) for status in _BAD]
        status, count = next((s, n) for s, n in zip(_BAD, counts, strict=True) if n)
        made[check] = status if count == 1 else f"{status} ({count})"
    return made


def _picture(edges: EdgesChecked) -> str:
    """A square for each edge: from the host of its row to that of its column."""
    names = [each.name for each in edges.hosts]
    if not edges.matrix or len(names) < 2:
        return ""
    left = max(map(len, names)) * _LETTER + 8
    side = min(24.0, max(8.0, 900 / len(names)))
    # One bar below each row for what passes: a rectangle for each edge were a page of megabytes.
    cells = [
        f'<rect x="{left:.1f}" y="{_TOP + number * side:.1f}" width="{side * len(names):.1f}"'
        f' height="{side - 1:.1f}" fill="{_STATES["."][1]}" opacity="0.35"/>'
        for number in range(min(len(names), len(edges.matrix)))
    ]
    drawn = islice(_not_passing(edges.matrix, len(names)), _MOST_CELLS + 1)
    bad = [
        _cell(names[src], names[dst], state, left + dst * side, _TOP + src * side, side)
        for src, dst, state in drawn
    ]
    cells += bad[:_MOST_CELLS]
    cut = f"Only the first {_MOST_CELLS:,} edges that do not pass are drawn."
    labels = [
        f'<text x="{left - 6:.1f}" y="{_TOP + (number + 0.7) * side:.1f}" text-anchor="end">'
        f"{escape(name)}</text>"
        for number, name in enumerate(names)
        if len(names) <= _LABEL * 2 or set("".join(edges.matrix[number : number + 1])) - set("-.")
    ]
    width = max(_LEAST_WIDTH, left + side * len(names) + 4)
    height = _TOP + side * len(names) + 4
    legend = "".join(
        f'<span><i style="background:{colour}"></i>{word}</span>'
        for letter, (word, colour) in _STATES.items()
        if any(letter in row for row in edges.matrix)
    )
    return (
        f'<svg class="edges" viewBox="0 0 {width:.0f} {height:.0f}" style="max-width:{width:.0f}px"'
        f' role="img" aria-label="edges between hosts">{"".join(labels)}{"".join(cells)}</svg>'
        f'<div class="legend">{legend}</div>'
        + (f'<p class="dim">{cut}</p>' if len(bad) > _MOST_CELLS else "")
    )


def _not_passing(matrix: Sequence[str], size: int) -> Iterator[tuple[int, int, str]]:
    """From, to, and the letter: row by row."""
    for src, row in enumerate(matrix[:size]):
        for dst, state in enumerate(row[:size]):
            if state in _STATES and state != ".":
                yield src, dst, state


def _cell(src: str, dst: str, state: str, x: float, y: float, side: float) -> str:
    word, colour = _STATES[state]
    return (
        f'<rect class="edge" x="{x:.1f}" y="{y:.1f}" width="{side - 1:.1f}"'
        f' height="{side - 1:.1f}" fill="{colour}">'
        f"<title>{escape(f'{src} to {dst}: {word}')}</title></rect>"
    )


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(value)}</td>" for value in row) + "</tr>" for row in rows
    )
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'
