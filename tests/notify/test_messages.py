"""What each kind of receiver gets; no secret is in it, and nothing that Slack would act on."""

from __future__ import annotations

import json
from dataclasses import replace

from ncclops.notify import messages
from ncclops.notify.messages import Origin
from ncclops.notify.rules import Notice, Progress
from ncclops.redaction.redactor import marks_here

ORIGIN = Origin(run_id="20261124-1", run_dir="/runs/20261124-1", node="n07")
NOTICE = Notice(
    rule="node-suspected", summary="node n07 is not fit: GPU 3", subject="n07", held_back=2,
    details={"node": "n07"},
)  # fmt: skip
TS = 1_790_000_000.25


def test_a_document_for_programs() -> None:
    assert messages.as_json(NOTICE, ORIGIN, TS) == {
        "schema": "ncclops.notification/1",
        "rule": "node-suspected",
        "severity": "warning",
        "summary": "node n07 is not fit: GPU 3",
        "subject": "n07",
        "held_back": 2,
        "ts": TS,
        "run_id": "20261124-1",
        "run_dir": "/runs/20261124-1",
        "node": "n07",
        "details": {"node": "n07"},
    }


def test_slack_shows_what_is_written_and_no_mention() -> None:
    notice = Notice(rule="failed", summary="failed: <!channel> & <b>")
    assert messages.as_slack(notice, ORIGIN) == {
        "text": "*critical* run 20261124-1: failed: &lt;!channel&gt; &amp; &lt;b&gt;\n"
        "/runs/20261124-1"
    }
    assert "(2 more of these since the last one)" in messages.as_slack(NOTICE, ORIGIN)["text"]


def test_pagerduty_has_one_incident_for_the_same_thing_of_a_run() -> None:
    event = messages.as_pagerduty(NOTICE, ORIGIN, TS, "key")
    assert (event["routing_key"], event["event_action"]) == ("key", "trigger")
    assert event["dedup_key"] == "ncclops/20261124-1/node-suspected/n07"
    payload = event["payload"]
    assert payload["summary"] == "run 20261124-1: node n07 is not fit: GPU 3"
    assert (payload["source"], payload["severity"]) == ("n07", "warning")
    assert payload["timestamp"] == "2026-09-21T14:13:20Z"
    long = messages.as_pagerduty(Notice(rule="failed", summary="x" * 5000), ORIGIN, TS, "key")
    assert len(long["payload"]["summary"]) <= 1024, "PagerDuty refuses more"


def test_what_an_exception_quotes_of_a_secret_is_taken_out() -> None:
    text = "HTTPError: https://user:hunter2secret@host/x\nwith WANDB_API_KEY=abcdef0123456789"
    notice = Notice(rule="failed", summary=text, details={"WANDB_API_KEY": "abcdef0123456789"})
    for message in (
        messages.as_json(notice, ORIGIN, TS),
        messages.as_slack(notice, ORIGIN),
        messages.as_pagerduty(notice, ORIGIN, TS, "key"),
        messages.heartbeat(Progress(outcome="failed", reason=text), ORIGIN, TS),
    ):
        written = json.dumps(message)
        assert "hunter2secret" not in written and "abcdef0123456789" not in written


def test_the_value_of_a_secret_is_taken_out_wherever_it_stands() -> None:
    """As a bundle does: no rule knows the look of it, its variable's name gives it away."""
    origin = replace(ORIGIN, marks=frozenset(marks_here({"OPS_TOKEN": "correct.horse"})))
    text = "KeyError: 'lr correct.horse' at train.py:4"
    notice = Notice(rule="failed", summary=text, details={"what": text})
    for message in (
        messages.as_json(notice, origin, TS),
        messages.as_slack(notice, origin),
        messages.as_pagerduty(notice, origin, TS, "key"),
        messages.heartbeat(Progress(outcome="failed", reason=text), origin, TS),
    ):
        written = json.dumps(message)
        assert "redacted" in written and "correct.horse" not in written
    assert "correct" not in repr(origin)


def test_a_heartbeat_says_how_far_the_run_is_and_that_it_has_ended() -> None:
    beat = messages.heartbeat(Progress(step=7, restarts=1, goodput=0.9), ORIGIN, TS)
    assert (beat["rule"], beat["state"], beat["summary"]) == (
        "heartbeat", "running", "running, step 7",
    )  # fmt: skip
    assert beat["details"]["goodput"] == 0.9
    ended = messages.heartbeat(Progress(outcome="failed", reason="why"), ORIGIN, TS)
    assert (ended["state"], ended["summary"]) == ("ended", "failed: why")


def test_the_status_of_a_trainjob() -> None:
    progress = Progress(step=449, step_s=2.0, restarts=1, goodput=0.974)
    assert messages.as_trainjob_status(progress, TS, steps=1000) == {
        "trainerStatus": {
            "progressPercentage": 45,
            "estimatedRemainingSeconds": 1100,
            "metrics": [
                {"name": "step", "value": "449"},
                {"name": "step_seconds", "value": "2"},
                {"name": "goodput", "value": "0.974"},
                {"name": "restarts", "value": "1"},
            ],
            "lastUpdatedTime": "2026-09-21T14:13:20Z",
        }
    }
    from kubeflow_trainer_api import models  # a second of each process that collects tests

    status = messages.as_trainjob_status(progress, TS, steps=1000)
    read = models.TrainerV1alpha1UpdateTrainJobStatusRequest.from_dict(status).to_dict()
    assert read["trainerStatus"].keys() == status["trainerStatus"].keys()
    unknown = messages.as_trainjob_status(progress, TS, steps=0)["trainerStatus"]
    assert "progressPercentage" not in unknown
    done = messages.as_trainjob_status(Progress(step=999, outcome="completed"), TS, steps=0)
    assert done["trainerStatus"]["progressPercentage"] == 100
    last = messages.as_trainjob_status(Progress(step=999), TS, steps=1000)["trainerStatus"]
    assert last["progressPercentage"] == 99, "it has not completed yet"


def test_a_summary_is_one_short_line_that_acts_on_no_terminal() -> None:
    """A command may show it, and so may whoever reads the channel on a terminal."""
    said = "rank 1: \x1b[2J\x1b]0;title\x07 \u202eevil\n" + "x" * 5_000_000
    notice = Notice(rule="failed", summary=said)
    summary = messages.as_json(notice, ORIGIN, 0.0)["summary"]
    assert len(summary) <= 1000
    assert summary.isprintable()
    assert summary.startswith("rank 1: ")
