"""The page: the parts of a run as HTML, the most important first. Pure."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Sequence
from importlib import resources
from string import Template
from typing import Any

import msgspec

from ncclops._version import __version__
from ncclops.diagnose import story_text
from ncclops.goodput import losses, spans
from ncclops.rank_lists import ranks_named
from ncclops.record.events import (
    EscalationEvent,
    Event,
    FaultEvent,
    GroupTimeoutEvent,
    RestartEvent,
    RetryEvent,
    StopRequestedEvent,
    StragglerEvent,
    fields_of,
    name_of,
)
from ncclops.record.incident_record import IncidentRecord
from ncclops.record.preflight_record import PreflightRecord
from ncclops.report import incidents, preflight
from ncclops.report.drawing import Mark, timeline
from ncclops.report.heat import Heat, heat_of, slowest
from ncclops.report.markup import escape
from ncclops.report.records import Records
from ncclops.report.units import moment, spell

# What the events table shows: a run of weeks has more than a browser likes.
_EVENTS_SHOWN = 500
_SLOWEST_SHOWN = 3
_MARKED: tuple[type[Event], ...] = (
    FaultEvent,
    RetryEvent,
    StragglerEvent,
    GroupTimeoutEvent,
    StopRequestedEvent,
    EscalationEvent,
)
_GOOD_OUTCOMES = ("completed", "stopped")
_ALWAYS = ("ts", "event", "rank", "node")


def render(records: Records) -> str:
    """The whole page as one HTML document that loads nothing."""
    heat = heat_of(records.steps)
    sections = (
        _head(records),
        _story(records),
        "" if records.preflight is None else preflight.section(records.preflight),
        _timeline(records),
        _losses(records),
        _incidents(records),
        _restarts(records),
        _heat(heat),
        _receipt(records),
        _workers(records),
        _environment(records),
        _events(records),
    )
    return _page(f"ncclops report: {_run_id(records)}", sections, heat)


def render_preflight(record: PreflightRecord) -> str:
    """A page of its own for a check outside a run, likewise."""
    return _page("ncclops preflight", [preflight.section(record)], None)


def _page(title: str, sections: Iterable[str], heat: Heat | None) -> str:
    # A `<` in the data must not end the script element that holds it.
    data = json.dumps(None if heat is None else heat.to_json()).replace("<", "\\u003c")
    script = f"\n{_asset('heat.js')}\n"  # to the byte what stands in the element
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return Template(_asset("page.html")).substitute(
        title=escape(title),
        style=_asset("style.css"),
        script=script,
        digest=digest,
        heat=data,
        body="\n".join(filter(None, sections)),
        version=escape(__version__),
    )


def _head(records: Records) -> str:
    verdict, run = records.verdict, records.run
    outcome: str = (
        "still running, or its end is not on record" if verdict is None else verdict.outcome
    )
    good = outcome in _GOOD_OUTCOMES
    if verdict is not None and verdict.ranks_lost:
        outcome += f" without {ranks_named(verdict.ranks_lost)}"
    badge = f'<span class="badge {"good" if good else "bad"}">{escape(outcome)}</span>'
    versions = " | ".join(f"{name} {value}" for name, value in run.stack.items() if value)
    lines = [
        f"<h1>{escape(_run_id(records))}{badge}</h1>",
        f"<p>{escape(_sentence(records))}</p>",
        f'<p class="dim mono">{escape(" ".join(run.argv))}</p>',
        f'<p class="dim">{escape(versions)}</p>',
        f'<div class="facts">{"".join(_fact(*fact) for fact in _facts(records))}</div>',
    ]
    return "\n".join(lines)


def _sentence(records: Records) -> str:
    if records.story is not None:
        return records.story.what
    return "" if records.verdict is None else records.verdict.reason


def _facts(records: Records) -> Iterable[tuple[str, str]]:
    verdict, run = records.verdict, records.run
    yield "started", moment(run.started)
    yield "took", spell(None if verdict is None else verdict.seconds)
    yield "ranks", _known(run.world_size)
    yield "profile", _known(None if run.profile is None else run.profile.name)
    yield "attempts", _known(None if verdict is None else verdict.attempts)
    restarts = [event for event in records.of(RestartEvent) if event.instead is None]
    yield "restarts in process", str(len(restarts))
    if verdict is None:
        return
    if verdict.goodput is not None and verdict.goodput.ratio is not None:
        yield "goodput", f"{verdict.goodput.ratio:.1%}"
    if verdict.receipt is not None and verdict.receipt.steady_rate is not None:
        rate, unit = verdict.receipt.steady_rate, verdict.receipt.rate_unit or ""
        yield "steady rate", f"{rate:,.{0 if rate >= 100 else 2}f} {unit}"


def _known(value: object) -> str:
    return "?" if value is None else str(value)


def _fact(name: str, value: str) -> str:
    return f'<div><span class="dim">{escape(name)}</span><b>{escape(value)}</b></div>'


def _timeline(records: Records) -> str:
    parts = spans(records.events)
    if not parts:
        return ""
    marks = [Mark(event.ts, name_of(event), _fields(event)) for event in records.of(*_MARKED)]
    seconds: dict[str, float] = {}
    for span in parts:
        seconds[span.kind] = seconds.get(span.kind, 0.0) + span.end - span.start
    legend = "".join(
        f'<span><i style="background:var(--{escape(kind)}, var(--dim))"></i>'
        f"{escape(kind)} {spell(total)}</span>"
        for kind, total in seconds.items()
    )
    return f'<h2>Timeline</h2>{timeline(parts, marks)}<div class="legend">{legend}</div>'


def _losses(records: Records) -> str:
    found = losses(spans(records.events), records.events)
    if found is None or not found.lost:
        return ""
    rows = [
        (cause, spell(seconds), f"{seconds / found.total:.2%}")
        for cause, seconds in sorted(found.lost.items(), key=lambda each: -each[1])
    ]
    sentence = (
        f"{spell(found.useful)} of {spell(found.total)} are steps that lasted"
        f" ({found.useful / found.total:.1%}); without faults it would have been"
        f" {found.useful / max(found.ideal, 1e-9):.1%}, in {spell(found.ideal)}."
    )
    table = _table(("lost to", "time", "of the run"), rows)
    return f"<h2>Time lost to faults</h2><p>{escape(sentence)}</p>{table}"


def _incidents(records: Records) -> str:
    parts = [
        f"<h3>{escape(report['sentence'])}</h3>"
        f'<p class="dim">incident {report["number"]}, {moment(report["at"])}</p>'
        + _table((), incidents.facts(report))
        for report in records.incident_reports
    ]
    return "<h2>Incidents</h2>" + "".join(parts) if parts else ""


def _story(records: Records) -> str:
    told = records.story
    if told is None:
        return ""
    return "<h2>What happened</h2>" + _table((), story_text.rows(told))


def _restarts(records: Records) -> str:
    restarts = records.of(RestartEvent)
    if not restarts:
        return ""
    began = records.events[0].ts
    rows = []
    for event in restarts:
        phases = event.phases_ms
        phases_text = ", ".join(f"{name} {ms:.0f}" for name, ms in phases.items() if ms >= 0.5)
        rows.append(
            (
                spell(event.ts - began),
                event.iteration,
                event.cause,
                _ranks(event.faulty_ranks),
                _ranks(event.ranks_lost),
                _ranks(event.ranks_returned),
                event.world_size,
                f"{sum(phases.values()):.0f} ms ({phases_text})"
                if event.instead is None
                else f"not restarted: {event.instead}",
            )
        )
    titles = ("at", "iteration", "cause", "faulty", "lost", "new processes", "ranks after", "took")
    return "<h2>Restarts in process</h2>" + _table(titles, rows) + _tracebacks(records.incidents)


def _tracebacks(incidents: Sequence[IncidentRecord]) -> str:
    return "".join(
        f"<details><summary>iteration {incident.iteration}, rank"
        f" {incident.first_faulty_rank}: traceback</summary>"
        f"<pre>{escape(incident.traceback)}</pre></details>"
        for incident in incidents
        if incident.traceback
    )


def _heat(heat: Heat | None) -> str:
    if heat is None:
        return (
            "<h2>Step times</h2><p class='dim'>No step was timed: the script does not call"
            " <code>ncclops.receipt.step</code>.</p>"
        )
    slow = ", ".join(f"rank {rank} {ratio:.2f}" for rank, ratio in slowest(heat)[:_SLOWEST_SHOWN])
    last = heat.first_step + heat.width * len(heat.medians) - 1
    return f"""<h2>Step times</h2>
<p class="dim">One row a rank ({len(heat.ranks)}), steps {heat.first_step} to {last} from left to
right; red is slower and blue faster than
<select id="heat-mode" aria-label="reference"><option value="ranks">the median of the ranks</option>
<option value="run">the median of the run</option></select>.
Slowest, as a ratio to the median of the ranks: {escape(slow)}.</p>
<div class="heat"><canvas id="heat" aria-label="step time of each rank"></canvas></div>
<p class="tip dim" id="heat-tip">&nbsp;</p>"""


def _receipt(records: Records) -> str:
    receipt = None if records.verdict is None else records.verdict.receipt
    if receipt is None:
        return ""
    rows = [
        ("ok" if rule.ok else "broken", rule.rule, rule.note, rule.evidence)
        for rule in receipt.rules
    ]
    head = f"<h2>Receipt: {escape(receipt.verdict)}</h2>"
    return head + _table(("", "rule", "because", "line"), rows)


def _workers(records: Records) -> str:
    rows = [
        (
            ending.rank,
            ending.pid,
            ending.signal or ending.exit_code,
            spell(ending.seconds),
            "asked to stop" if ending.asked_to_stop else "",
        )
        for ending in (() if records.verdict is None else records.verdict.workers)
    ]
    titles = ("rank", "pid", "exit code or signal", "ran", "")
    return _folded(f"Workers ({len(rows)})", _table(titles, rows)) if rows else ""


def _environment(records: Records) -> str:
    rows = [
        (change.name, change.action, change.before, change.after, change.reason)
        for change in records.run.plan
        if change.action != "keep"
    ]
    titles = ("variable", "", "before", "after", "why")
    return _folded(f"Environment ({len(rows)} changed)", _table(titles, rows)) if rows else ""


def _events(records: Records) -> str:
    began = records.events[0].ts if records.events else 0.0
    shown = records.events[-_EVENTS_SHOWN:]
    rows = [
        (spell(event.ts - began), name_of(event), event.rank, event.node, _fields(event))
        for event in shown
    ]
    which = f"last {len(shown)} of {len(records.events)}"
    table = _table(("at", "event", "rank", "node", ""), rows)
    return _folded(f"Events ({which})", table)


def _fields(event: Event) -> str:
    """An event's own fields in a line, without empty ones."""
    fields = ((name, value) for name, value in fields_of(event).items() if name not in _ALWAYS)
    text = ", ".join(
        f"{name} {_short(value)}" for name, value in fields if value not in (None, "", [], {})
    )
    return text[:400]


def _short(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(msgspec.to_builtins(value))


def _folded(title: str, content: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{content}</details>"


def _table(titles: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    head = f"<tr>{head}</tr>" if head else ""
    body = "".join(
        "<tr>" + "".join(f"<td>{_cell(value)}</td>" for value in row) + "</tr>" for row in rows
    )
    return f'<div class="scroll"><table>{head}{body}</table></div>'


def _cell(value: Any) -> str:
    return "" if value is None else escape(str(value))


def _ranks(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _run_id(records: Records) -> str:
    return records.run.run_id or records.path.resolve().name


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath("assets", name).read_text("utf-8")
