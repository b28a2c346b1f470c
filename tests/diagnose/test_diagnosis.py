"""`ncclops diagnose`: one page about a run, whatever is left of it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ncclops.diagnose import diagnose
from ncclops.errors import UsageError
from ncclops.record import control_address, snapshot_files
from tests.conftest import CompletedText, run_ncclops
from tests.diagnose.conftest import LINE_OF, read, until, write_profile, write_training
from tests.launch.conftest import Background

Ncclops = Callable[..., CompletedText]
Started = Callable[..., Background]
Profile = Callable[..., Path]

# Flight-recorder dumps are looked for, and read in a separate process.
pytestmark = pytest.mark.usefixtures("starts_processes")

TRACEBACK = [
    "[rank1]: Traceback (most recent call last):",
    '[rank1]:   File "/home/user/train.py", line 12, in step',
    "[rank1]:     loss = model(batch)",
    "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
]


def run_with(tmp_path: Path, verdict: dict[str, Any] | None, *events: dict[str, Any]) -> Path:
    run = tmp_path / "runs" / "a-run"
    run.mkdir(parents=True)
    started = {"ts": 100.0, "event": "run-started", "run_id": "a-run", "world_size": 2}
    lines = [json.dumps({"rank": None, "node": "n0", **each}) for each in (started, *events)]
    (run / "events.jsonl").write_text("\n".join(lines) + "\n")
    if verdict is not None:
        settled = {"run_id": "a-run", "attempts": 1, "seconds": 40.0}
        document = {"schema": "ncclops.verdict/1", **settled, **verdict}
        (run / "verdict.json").write_text(json.dumps(document))
    return run


def failed(**more: Any) -> dict[str, Any]:
    reason = "rank 1 exited with code 1"
    return {"outcome": "failed", "exit_code": 1, "reason": reason, **more}


def test_a_run_that_completed_has_nothing_wrong(tmp_path: Path) -> None:
    verdict = {"outcome": "completed", "exit_code": 0, "reason": "2 workers exited 0"}
    found = diagnose(run_with(tmp_path, verdict | {"receipt": {"verdict": "healthy"}}))
    assert (found.state, found.outcome, found.is_bad) == ("ended", "completed", False)
    assert (found.what, found.receipt) == ("2 workers exited 0", "healthy")
    assert (found.rank, found.classification, found.tried, found.incident) == (None, None, (), None)
    assert found.next_command == f"ncclops report {found.run_dir}"


def test_of_a_run_that_went_on_without_a_rank_the_incident_is_next(tmp_path: Path) -> None:
    verdict = {"outcome": "completed", "exit_code": 0, "reason": "rank 1 was killed by SIGKILL"}
    run = run_with(tmp_path, verdict | {"ranks_lost": [1]})
    assert diagnose(run).next_command == f"ncclops report {run}"  # nothing was recorded of it
    (run / "incidents" / "0").mkdir(parents=True)
    assert diagnose(run).next_command == f"ncclops incident {run} 0"


def test_a_failure_without_an_incident_is_placed_by_its_traceback(tmp_path: Path) -> None:
    said = {"message": "torch.OutOfMemoryError", "tail": TRACEBACK, "exit_code": 1}
    first = {"rank": 1, "host": "n0", **said}
    run = run_with(tmp_path, failed(first_failure=first))
    log = run / "ranks" / "1" / "stderr.log"
    log.parent.mkdir(parents=True)
    log.write_text("\n".join(TRACEBACK))
    found = diagnose(run)
    assert found.story is not None
    assert (found.rank, found.host, found.is_bad) == (1, "n0", True)
    assert str(found.frame) == "/home/user/train.py:12 in step"
    assert found.what == (
        "rank 1 on n0 exited with code 1: torch.OutOfMemoryError at /home/user/train.py:12 in step"
    )
    assert found.classification is not None  # by the logs: the verdict says nothing of it
    assert found.classification["class"] == "gpu-oom"
    assert found.classification["evidence"][0]["line"] == 4
    assert (found.story.log, found.story.log_host) == (str(log), None)
    assert found.next_command == f"ncclops classify {found.run_dir}"


def test_what_was_tried_is_shown_in_its_order(tmp_path: Path) -> None:
    run = run_with(
        tmp_path,
        failed(),
        {"ts": 130.0, "event": "retry", "attempt": 1, "reason": "new processes"},
        {"ts": 110.0, "event": "restart", "iteration": 1, "cause": "killed", "ranks_lost": [1]},
        {"ts": 120.0, "event": "escalation", "to": "respawn", "reason": "3 times in a row"},
    )
    assert [(step.at, step.what, step.why) for step in diagnose(run).tried] == [
        (110.0, "restart 1 in place, without rank 1", "killed"),
        (120.0, "no further restart in place, but new processes", "3 times in a row"),
        (130.0, "attempt 1 in new processes", "new processes"),
    ]


def test_a_run_without_verdict_and_agent_is_lost(
    tmp_path: Path, ncclops_in_process: Ncclops
) -> None:
    run = run_with(tmp_path, None, {"ts": 101.0, "event": "of a later version", "x": {}})
    with (run / "events.jsonl").open("a") as events:
        events.write('{"ts": 102.0, "event": "st')  # a kill, in the middle of a line
    found = diagnose(run)
    assert (found.state, found.outcome, found.is_bad) == ("lost", None, True)
    assert "no verdict" in found.what
    shown, judged = (ncclops_in_process("diagnose", *more) for more in ([], ["--exit-code"]))
    assert (shown.returncode, judged.returncode) == (0, 1)
    assert shown.stdout.startswith("run a-run: lost\n")


@pytest.mark.parametrize("content", ["", "{", "[]"])
def test_records_that_are_damaged_are_notes(tmp_path: Path, content: str) -> None:
    run = run_with(tmp_path, None)
    (run / "verdict.json").write_text(content)
    (run / "incidents" / "0").mkdir(parents=True)
    (run / "incidents" / "0" / "incident.json").write_text(content)
    found = diagnose(run)
    assert found.incident is None
    assert found.incidents == 1
    assert "verdict.json is damaged" in found.notes[0]
    assert found.notes[1].startswith("the latest incident cannot be read: ")


def test_an_incident_that_the_end_of_the_run_cut_short_is_a_note(
    tmp_path: Path, ncclops_in_process: Ncclops
) -> None:
    run = run_with(tmp_path, {"outcome": "stopped", "exit_code": 1, "reason": "requested: x"})
    snapshot = run / "incidents" / "0" / "rank0"
    snapshot.mkdir(parents=True)
    (snapshot / "process.json").write_text("{}")
    found = diagnose(run)
    why = "the run ended before it was written, or its file system took no more"
    assert found.notes == (f"incident 0 was cut short: {why}",)
    assert "try `ncclops diagnose`" in ncclops_in_process("incident", run).stderr
    (snapshot / "stacks.txt").write_text("")
    assert "try `ncclops flight analyze " in ncclops_in_process("incident", run).stderr
    for named in (["0"], ["a-run", "0"]):
        assert (
            "a-run/incidents/0 has no incident.json"
            in ncclops_in_process("incident", *named).stderr
        )
    assert "runs/a-run has no incident 7: it has 0" in ncclops_in_process("incident", "7").stderr
    (run / "incidents/0/incident.json").symlink_to("nowhere")
    damaged = ncclops_in_process("incident", "0")
    assert damaged.returncode == 2
    assert "a-run/incidents/0/incident.json is damaged; try " in damaged.stderr


def test_an_incident_of_another_version_is_a_note(tmp_path: Path) -> None:
    run = run_with(tmp_path, failed())
    (run / "incidents" / "0").mkdir(parents=True)
    (run / "incidents" / "0" / "incident.json").write_text('{"what": "something else"}')
    found = diagnose(run)
    assert (found.incident, found.what) == (None, "rank 1 exited with code 1")
    assert found.notes[0].startswith("the latest incident cannot be read: ")


def test_no_run_is_wrong_usage(tmp_path: Path, ncclops_in_process: Ncclops) -> None:
    with pytest.raises(UsageError, match="holds no run"):
        diagnose(tmp_path)
    done = ncclops_in_process("diagnose")
    assert (done.returncode, done.stdout) == (2, "")
    assert "no runs in runs/" in done.stderr


@pytest.fixture(scope="module")
def failed_run(starts_processes: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks, without restarts in place, of which rank 1 has failed."""
    directory = tmp_path_factory.mktemp("failed")
    done = run_ncclops(
        directory, "launch", "--run-dir", "run", "--nproc-per-node", "2", "--restart", "none",
        "--warm-start",
        "--profile", write_profile(directory, "20s", "30s"), write_training(directory),
        env={"FAULT": "raise:1"},
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    return directory / "run"


def test_a_real_failure_names_rank_line_operation_and_proof(
    failed_run: Path, ncclops_in_process: Ncclops
) -> None:
    page = json.loads(ncclops_in_process("diagnose", failed_run, "--json").stdout)
    assert (page["schema"], page["state"]) == ("ncclops.diagnose/1", "ended")
    assert (page["outcome"], page["recovered"]) == ("failed", False)
    assert page["culprit"]["rank"] == 1
    assert page["culprit"]["frame"]["line"] == LINE_OF["raise Runtime"]
    assert page["classification"]["class"] == "user-error"
    assert "out of the blue" in page["classification"]["evidence"][0]["text"]
    text = ncclops_in_process("diagnose", failed_run).stdout
    for words in (
        ": failed\n",
        "rank 1 on ",
        "  code      ",
        "train.py:",
        "user-error is not retried",
    ):
        assert words in text
    assert text.splitlines()[-1] == f"  next      {page['next_command']}"


def test_of_a_team_that_the_agent_ends_there_is_an_incident_too(
    failed_run: Path, ncclops_in_process: Ncclops
) -> None:
    """Without restarts in place it is the agent that has snapshots taken, before SIGTERM."""
    done = ncclops_in_process("incident", failed_run, "--json")
    assert done.returncode == 0, done.stderr
    page = json.loads(done.stdout)
    assert page["culprit"]["rank"] == 1
    assert page["culprit"]["frame"]["line"] == LINE_OF["raise Runtime"]
    assert page["decision"]["what"] == "the run ended: failed"
    for rank in range(2):  # whether the other is still there is a matter of chance
        directory = snapshot_files.rank_dir(failed_run / "incidents" / "0", rank)
        assert (directory / snapshot_files.STACKS).exists() or read(
            directory / snapshot_files.MISSING
        )["reason"]


@pytest.mark.slow
def test_a_fault_that_the_job_recovered_from_is_history(
    ncclops: Ncclops, training: Path, profile: Profile
) -> None:
    done = ncclops(
        "launch", "--nproc-per-node", "2", "--profile", profile("20s", "30s"),
        training, env={"FAULT": "raise:1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    page = json.loads(ncclops("diagnose", "--json").stdout)
    assert (page["outcome"], page["recovered"], page["incidents"]) == ("completed", True, 1)
    assert page["culprit"]["rank"] is None
    assert [step["what"] for step in page["tried"]] == ["restart 1 in place"]
    said = ncclops("diagnose").stdout
    assert "from which the job recovered: rank 1" in said
    assert "  class     user-error (" in said


def test_a_run_under_way_that_makes_no_steps_is_told(
    tmp_path: Path, ncclops_in_process: Ncclops
) -> None:
    now = time.time()
    worker = {"event": "worker-started", "pid": os.getpid(), "attempt": 0, "started_ticks": 0}
    steps = [{"event": "step", "step": step, "step_s": 0.1} for step in (1, 2)]
    events: list[dict[str, Any]] = [worker, {"event": "bootstrapped"}, *steps]
    run = run_with(tmp_path, None, *({**each, "rank": 0, "ts": now - 90} for each in events))
    log = run / "ranks" / "0" / "stdout.log"
    log.parent.mkdir(parents=True)
    log.write_text("step 1 loss 2.0\nstep 2 loss 1.9\n")
    os.utime(log, (now - 90, now - 90))
    with control_address.listen_unix(run):
        said = ncclops_in_process("diagnose").stdout
        page = json.loads(ncclops_in_process("diagnose", "--json").stdout)
    assert "nothing is wrong that is on record\nbut no step for 1m" in said
    assert page["without_step"] == {"ranks": None, "seconds": pytest.approx(90, abs=30)}


@pytest.mark.parametrize(
    ("age_s", "begun", "command"),
    [(90, None, "stacks"), (5, None, "status"), (90, "bootstrapped", "status")],
    ids=["no group", "just started", "a group"],
)
def test_of_ranks_that_do_not_come_to_a_group_the_command_is_named_that_shows_where_they_are(
    tmp_path: Path, age_s: int, begun: str | None, command: str
) -> None:
    """It said that nothing was wrong, and to look at the status, which shows no place either."""
    worker = {"event": "worker-started", "pid": os.getpid(), "attempt": 0, "started_ticks": 0}
    events: list[dict[str, Any]] = [worker, *([{"event": begun}] if begun else [])]
    at = {"rank": 0, "ts": time.time() - age_s}
    run = run_with(tmp_path, None, *(each | at for each in events))
    with control_address.listen_unix(run):
        found = diagnose(run)
    assert found.next_command == f"ncclops {command} {run}"
    assert ("no rank has a process group or a step after" in found.what) == (command == "stacks")


@pytest.mark.slow
def test_a_run_under_way_is_diagnosed_without_being_disturbed(
    background: Started,
    ncclops: Ncclops,
    training: Path,
    profile: Profile,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FAULT", "hang:1")
    background("launch", "--nproc-per-node", "2", "--profile", profile("3m", "6m"), training)
    until((tmp_path / "faulted").exists, "the hang")
    page = json.loads(ncclops("diagnose", "--json").stdout)
    assert (page["state"], page["outcome"], page["incident"]) == ("running", None, None)
    assert page["next_command"].startswith("ncclops status ")
    (tmp_path / "go-on").touch()
