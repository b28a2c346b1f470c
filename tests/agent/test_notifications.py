"""What the agent has of notifications: events of the run directory reach a receiver."""

from __future__ import annotations

from pathlib import Path

from ncclops.agent.notifications import told
from ncclops.notify.targets import NotifyPlan, Target
from ncclops.profiles.notification import NotifySettings
from ncclops.record import event_log
from ncclops.record.events import VerdictEvent
from ncclops.record.run_directory import RunDirectory
from tests.notify.conftest import LIMIT_S, Receiver, receiver

__all__ = ["receiver"]  # the fixture

FAILED = VerdictEvent(outcome="failed", exit_code=1, reason="it was killed by SIGKILL")


def test_what_is_added_to_the_record_is_told(receiver: Receiver, tmp_path: Path) -> None:
    run = RunDirectory.create(exact=tmp_path / "run", parent=None, node="n0")
    target = Target(name="ops", kind="json", url=receiver.url("/x"))
    plan = NotifyPlan(settings=NotifySettings(), targets=(target,))
    lines: list[str] = []
    with told(run, plan, lines.append, LIMIT_S):
        run.add(FAILED)
    got = receiver.next().body
    assert (got["rule"], got["run_id"]) == ("failed", run.run_id)
    assert got["run_dir"] == str(tmp_path / "run")
    assert lines == []
    assert [event.__class__ for event in event_log.read(run.paths.events)] == [VerdictEvent]


def test_where_nobody_is_to_be_told_the_record_is_the_same(tmp_path: Path) -> None:
    run = RunDirectory.create(exact=tmp_path / "run", parent=None, node="n0")
    with told(run, None, lambda line: None, LIMIT_S):
        run.add(FAILED)
    assert len(event_log.read(run.paths.events)) == 1
