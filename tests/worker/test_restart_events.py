"""What a worker reports of a restart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ncclops.record import event_log, worker_record
from ncclops.record.paths import RunPaths
from ncclops.record.variables import RUN_DIR
from ncclops.restart.attribution import FaultKind
from ncclops.restart.exception import Escalation
from ncclops.worker import no_restart, restart_events
from tests.worker.test_escalation import incident

STOPPING = "the run is stopping"


@pytest.mark.parametrize(
    ("escalation", "reported"),
    [
        pytest.param(Escalation("stop", STOPPING), 0, id="as the agent has said"),
        pytest.param(None, 1, id="with an exit code of its own"),
    ],
)
def test_a_rank_that_leaves_because_the_run_is_stopping_is_at_no_fault(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    escalation: Escalation | None,
    reported: int,
) -> None:
    file = RunPaths(tmp_path).rank(int(worker_record.own_rank())).worker_events
    file.parent.mkdir(parents=True)
    monkeypatch.setenv(RUN_DIR, str(tmp_path))
    monkeypatch.setattr(no_restart._ending, "reason", STOPPING)
    left = incident("this rank leaves", kind=FaultKind.LEFT, escalation=escalation)
    restart_events.report(replace(left, initial_rank=3))
    assert len(event_log.read(file) if file.exists() else []) == reported
