"""A notification as each kind of receiver takes it: JSON documents. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from ncclops.notify.rules import Notice, Progress
from ncclops.plain_text import plain_line
from ncclops.redaction.marks import Mark
from ncclops.redaction.redactor import Redactor

SCHEMA = "ncclops.notification/1"
_MOST_CHARS = 1000  # of a summary: PagerDuty takes 1024


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The run that a message is about, and the node that sends it.

    ``marks`` are of the secrets that are known there, which no message may quote.
    """

    run_id: str
    run_dir: str
    node: str
    marks: frozenset[Mark] = field(default=frozenset(), repr=False)

    def as_json(self) -> dict[str, Any]:
        return {"run_id": self.run_id, "run_dir": self.run_dir, "node": self.node}


def as_json(notice: Notice, origin: Origin, ts: float) -> dict[str, Any]:
    """``ncclops.notification/1``: for a program, by HTTP or on standard input."""
    return {
        "schema": SCHEMA,
        "rule": notice.rule,
        "severity": notice.severity,
        "summary": _text(notice.summary, origin),
        "subject": notice.subject,
        "held_back": notice.held_back,
        "ts": round(ts, 3),
        **origin.as_json(),
        "details": _clean(notice.details, origin),
    }


def as_slack(notice: Notice, origin: Origin) -> dict[str, Any]:
    """An incoming webhook of Slack, and of what imitates it (Mattermost, Discord's /slack)."""
    held = f" ({notice.held_back} more of these since the last one)" if notice.held_back else ""
    summary = _text(notice.summary, origin)
    text = f"*{notice.severity}* run {origin.run_id}: {summary}{held}\n{origin.run_dir}".rstrip()
    # Slack's own marks for links and mentions.
    return {"text": text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")}


def as_pagerduty(notice: Notice, origin: Origin, ts: float, key: str) -> dict[str, Any]:
    """An event of PagerDuty's Events API v2; the same rule of a run is one incident."""
    return {
        "routing_key": key,
        "event_action": "trigger",
        "dedup_key": "/".join(
            filter(None, ("ncclops", origin.run_id, notice.rule, notice.subject))
        ),
        "payload": {
            "summary": f"run {origin.run_id}: {_text(notice.summary, origin)}"[:_MOST_CHARS],
            "source": origin.node,
            "severity": notice.severity,
            "timestamp": _moment(ts),
            "component": origin.run_id,
            "class": notice.rule,
            "custom_details": {**origin.as_json(), **_clean(notice.details, origin)},
        },
    }


def heartbeat(progress: Progress, origin: Origin, ts: float) -> dict[str, Any]:
    """That the run goes on, or how it has ended: ``ncclops.notification/1``."""
    ended = progress.outcome is not None
    at = "no step so far" if progress.step is None else f"step {progress.step}"
    return {
        "schema": SCHEMA,
        "rule": "heartbeat",
        "severity": "info",
        "summary": f"{progress.outcome}: {_text(progress.reason, origin)}"
        if ended
        else f"running, {at}",
        "state": "ended" if ended else "running",
        "ts": round(ts, 3),
        **origin.as_json(),
        "details": {
            "outcome": progress.outcome,
            "step": progress.step,
            "step_s": progress.step_s,
            "restarts": progress.restarts,
            "goodput": progress.goodput,
        },
    }


def as_trainjob_status(progress: Progress, ts: float, steps: int) -> dict[str, Any]:
    """What Kubeflow's Trainer takes for a TrainJob's ``status.trainerStatus``.

    ``steps`` is how many the job is to make: without it (0) no share is known.
    """
    metrics = {"step": progress.step, "step_seconds": progress.step_s, "goodput": progress.goodput}
    named = [{"name": name, "value": f"{v:.6g}"} for name, v in metrics.items() if v is not None]
    status: dict[str, Any] = {
        "metrics": [*named, {"name": "restarts", "value": str(progress.restarts)}],
        "lastUpdatedTime": _moment(ts),
    }
    if progress.outcome == "completed":
        status |= {"progressPercentage": 100, "estimatedRemainingSeconds": 0}
    elif steps and progress.step is not None:
        done = min(progress.step + 1, steps)
        status["progressPercentage"] = min(99, 100 * done // steps)
        if progress.step_s is not None:
            status["estimatedRemainingSeconds"] = round((steps - done) * progress.step_s)
    return {"trainerStatus": status}


def _text(text: str, origin: Origin) -> str:
    """In one line, without secrets and what a terminal acts on: an exception may quote both."""
    # Cut before, too, and where no secret is cut in two that is still shown.
    return plain_line(Redactor(origin.marks).text(text[: 16 * _MOST_CHARS]), _MOST_CHARS)


def _clean(details: Mapping[str, Any], origin: Origin) -> dict[str, Any]:
    cleaned: dict[str, Any] = Redactor(origin.marks).document(dict(details))
    return cleaned


def _moment(ts: float) -> str:
    return datetime.fromtimestamp(ts, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
