"""`ncclops status` and `ncclops stop`: which run is meant, what is shown, what is refused."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from ncclops.control import client, launcher
from ncclops.errors import NcclopsError, UsageError
from ncclops.host import process_view
from ncclops.record import control_address, runs
from ncclops.record.paths import RunPaths
from ncclops.record.run_record import RUN, RunRecord
from tests.conftest import LIMIT_S, CompletedText, clean_environ
from tests.control.conftest import Agent, event, start_of_run, write_events

Ncclops = Callable[..., CompletedText]
Start = Callable[..., Agent]


def ended_run(path: Path, began: float = 1000.0) -> Path:
    verdict = {"outcome": "failed", "exit_code": 1, "reason": "rank 1 exited with code 1"}
    exits = [event("worker-exited", began + 50, rank, exit_code=rank) for rank in (0, 1)]
    write_events(path, [*start_of_run(began), *exits, event("verdict", began + 50, **verdict)])
    (path / "verdict.json").write_text(json.dumps({"schema": "ncclops.verdict/1", **verdict}))
    return path


def error_of(done: CompletedText) -> str:
    assert done.returncode in (1, 2)
    assert done.stdout == ""
    assert done.stderr.startswith("ncclops: error: ")
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_status_asks_the_agent(agent: Agent, ncclops_in_process: Ncclops) -> None:
    done = ncclops_in_process("status", "--json")
    document = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (0, "")
    assert (document["schema"], document["source"]) == ("ncclops.status/1", "agent")
    assert document["run_dir"] == str(agent.run.resolve())


def test_status_for_people(agent: Agent, ncclops_in_process: Ncclops) -> None:
    write_events(agent.run, [event("fault", time.time(), 1, cause="killed", kind="death")])
    done = ncclops_in_process("status")
    assert "run a-run: restarting after" in done.stdout
    assert "on rank 1: death: killed" in done.stdout
    header, *rows = done.stdout.splitlines()[-3:]
    for name in ("rank", "host", "phase", "step", "step time", "of median", "memory", "last event"):
        assert name in header
    assert [row.split()[0] for row in rows] == ["0", "1"]
    assert "fault: killed" in rows[1]


def test_a_run_that_has_ended_is_read_from_its_directory(
    tmp_path: Path, ncclops_in_process: Ncclops
) -> None:
    ended_run(tmp_path / "runs" / "old")
    document = json.loads(ncclops_in_process("status", "--json").stdout)
    assert (document["phase"], document["outcome"]) == ("ended", "failed")
    assert (document["source"], document["notes"]) == ("directory", [])
    assert "failed (rank 1 exited with code 1) after 50s" in ncclops_in_process("status").stdout


def test_the_starts_of_all_workers_are_counted_as_in_the_document(
    tmp_path: Path, ncclops_in_process: Ncclops
) -> None:
    run = tmp_path / "runs" / "again"
    again = [event("worker-started", 1010.0, rank, pid=1, attempt=1) for rank in (0, 1)]
    write_events(run, [*start_of_run(1000.0), *again])
    assert json.loads(ncclops_in_process("status", "--json").stdout)["attempt"] == 1
    assert "0 restarts in place, 1 with new processes" in ncclops_in_process("status").stdout


def test_an_agent_that_was_killed_is_reported(
    start_agent: Start, ncclops_in_process: Ncclops
) -> None:
    agent = start_agent()
    listener = RunPaths(agent.run).socket
    kept = listener.with_name("kept")
    listener.rename(kept)  # SIGKILL leaves the socket behind
    agent.close()
    kept.rename(listener)
    document = json.loads(ncclops_in_process("status", "--json").stdout)
    assert (document["phase"], document["source"]) == ("lost", "directory")
    assert "killed" in document["notes"][0]
    assert "killed" in error_of(ncclops_in_process("stop", agent.run))


def test_a_run_whose_agent_was_killed_has_lasted_until_its_newest_event(
    tmp_path: Path, ncclops_in_process: Ncclops
) -> None:
    run = tmp_path / "runs" / "cut"
    write_events(run, [*start_of_run(1000.0), event("step", 1030.0, 0, step=40)])
    with control_address.listen_unix(run):
        pass  # its socket stays, and nobody listens
    document = json.loads(ncclops_in_process("status", "--json").stdout)
    assert (document["phase"], document["seconds"]) == ("lost", 30.0)
    assert document["goodput"]["total_s"] == pytest.approx(30.0)


def test_an_agent_on_another_host_is_named(tmp_path: Path, ncclops_in_process: Ncclops) -> None:
    run = tmp_path / "runs" / "far"
    write_events(run, [each | {"node": "n17"} for each in start_of_run(time.time())])
    document = json.loads(ncclops_in_process("status", "--json").stdout)
    assert (document["phase"], document["source"]) == ("starting", "directory")
    assert "n17" in document["notes"][0]
    assert "n17" in error_of(ncclops_in_process("stop", "far"))


def test_an_agent_that_does_not_answer_is_no_reason_to_show_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "a-run"
    write_events(run, start_of_run(time.time()))
    monkeypatch.setattr(client, "_ANSWER_LIMIT_S", 0.2)
    with control_address.listen_unix(run):
        status = client.status_of(run)
        assert (status.phase, status.source) == ("starting", "directory")
        assert "does not answer" in status.notes[0]
        with pytest.raises(NcclopsError, match="does not answer"):
            client.send(run, {"action": "stop"})


def test_where_all_processes_of_a_run_are_stopped_its_server_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "a-run"
    write_events(run, start_of_run(time.time()))
    monkeypatch.setattr(client, "_held", lambda _: "its agent is stopped")
    monkeypatch.setattr(client, "_STOPPED_LIMIT_S", 0.2)
    monkeypatch.setattr(client, "_ANSWER_LIMIT_S", 1e6)
    with control_address.listen_unix(run):
        status = client.status_of(run)
    assert status.source == "directory"
    assert status.notes[-1] == "its agent is stopped"


@pytest.mark.usefixtures("starts_processes")
def test_an_agent_that_was_stopped_is_named_with_what_lets_it_go_on(
    agent: Agent, ncclops_in_process: Ncclops
) -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
            stat = process_view.read_stat(Path(f"/proc/{process.pid}"))
            own = launcher.current()
            assert stat is not None and own is not None
            record = replace(own, pid=process.pid, started_ticks=stat.started_ticks)
            RUN.write(RunPaths(agent.run).run, RunRecord(launcher=record))
            (note,) = json.loads(ncclops_in_process("status", "--json").stdout)["notes"]
            assert f"(SIGSTOP; pid {process.pid})" in note
            assert f"`kill -CONT {process.pid}`" in note
            assert note in error_of(ncclops_in_process("stop"))
            assert not agent.asked.calls
            process.send_signal(signal.SIGCONT)
            os.waitid(os.P_PID, process.pid, os.WCONTINUED | os.WNOWAIT)
            assert json.loads(ncclops_in_process("status", "--json").stdout)["notes"] == []
        finally:
            process.kill()


def test_stop_reaches_the_agent(agent: Agent, ncclops_in_process: Ncclops) -> None:
    done = ncclops_in_process("stop", "--reason", "node drain")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == "ncclops: a-run: stop noted\n"
    ((name, reason, by),) = agent.asked.calls
    assert (name, reason) == ("stop", "node drain")
    assert by.endswith("with ncclops stop")
    document = json.loads(ncclops_in_process("stop", "a-r", "--json").stdout)
    assert (document["schema"], document["message"]) == ("ncclops.stop/1", "stop noted")


def test_stop_says_what_the_agent_says(agent: Agent, ncclops_in_process: Ncclops) -> None:
    agent.asked.refuse("it is stopping already")
    assert "it is stopping already" in error_of(ncclops_in_process("stop"))


def test_without_the_token_the_error_names_its_owner(
    agent: Agent, ncclops_in_process: Ncclops
) -> None:
    agent.request("GET", "/healthz")  # it has read the token
    RunPaths(agent.run).token.write_text("another\n")
    assert "not the run's token" in error_of(ncclops_in_process("stop"))
    if os.getuid() != 0:  # root reads everything
        RunPaths(agent.run).token.chmod(0)
        assert "alone" in error_of(ncclops_in_process("stop"))
    assert agent.asked.calls == []


def test_a_run_that_has_ended_cannot_be_stopped(
    tmp_path: Path, ncclops_in_process: Ncclops
) -> None:
    ended_run(tmp_path / "runs" / "old")
    assert "has ended: failed" in error_of(ncclops_in_process("stop", "old"))
    write_events(tmp_path / "runs" / "damaged", start_of_run(1000.0))
    (tmp_path / "runs" / "damaged" / "verdict.json").write_text("{}")
    assert error_of(ncclops_in_process("stop", "damaged")).endswith("run damaged has ended\n")
    assert "no run in runs/ is under way" in error_of(ncclops_in_process("stop"))


def test_which_run_is_meant(
    start_agent: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("20260101-a", "20260101-ab", "20260102-c"):
        ended_run(Path("runs") / name)
    os.utime("runs/20260101-ab/events.jsonl", (2e9, 2e9))

    def found(text: str | None = None) -> str:
        return runs.find(text).path.name

    assert found() == "20260101-ab"  # none is under way: the newest of all
    start_agent(tmp_path / "runs" / "live")
    assert found() == "live"
    assert found("20260102") == "20260102-c"
    assert found("20260101-a") == "20260101-a"  # exact, though another one begins with it
    assert found("runs/20260102-c") == "20260102-c"
    assert found(str(tmp_path / "runs" / "20260102-c")) == "20260102-c"
    for text, says in (
        ("20260101", r"several runs \(20260101-a, 20260101-ab\)"),
        ("nothing", "no run 'nothing'"),
        ("", "holds no run"),
        ("runs", r"runs holds 4 runs \(20260101-a, .*\): name one of them, as in runs/live"),
    ):
        with pytest.raises(UsageError, match=says):
            found(text)


def test_of_several_runs_under_way_none_is_stopped_by_chance(
    start_agent: Start, tmp_path: Path, ncclops_in_process: Ncclops
) -> None:
    agents = [start_agent(tmp_path / "runs" / name) for name in ("a", "b")]
    assert "2 runs are under way" in error_of(ncclops_in_process("stop"))
    assert "1 more run is under way" in ncclops_in_process("status").stderr
    assert ncclops_in_process("stop", "b").returncode == 0
    assert [len(agent.asked.calls) for agent in agents] == [0, 1]


def test_without_runs_there_is_nothing_to_show(ncclops_in_process: Ncclops) -> None:
    assert "no runs in runs/" in error_of(ncclops_in_process("status"))


def test_watch_is_for_terminals(agent: Agent, ncclops_in_process: Ncclops) -> None:
    assert "terminal" in error_of(ncclops_in_process("status", "--watch"))
    assert "--json" in error_of(ncclops_in_process("status", "--watch", "--json"))


def test_watch_goes_on_until_the_run_has_ended(agent: Agent, tmp_path: Path) -> None:
    leader, follower = pty.openpty()
    watching = subprocess.Popen(
        [sys.executable, "-m", "ncclops", "status", "--watch"],
        cwd=tmp_path,
        env=clean_environ({"TERM": "xterm", "COLUMNS": "120", "LINES": "40"}),
        stdout=follower,
    )
    os.close(follower)
    shown = _read_until(leader, b"starting")
    ended_run(agent.run, time.time())
    shown += _read_until(leader, b"failed")
    assert watching.wait(LIMIT_S) == 0
    os.close(leader)


def test_watch_ends_with_ctrl_c(agent: Agent, tmp_path: Path) -> None:
    leader, follower = pty.openpty()
    watching = subprocess.Popen(
        [sys.executable, "-m", "ncclops", "status", "--watch"],
        cwd=tmp_path,
        env=clean_environ({"TERM": "xterm"}),
        stdout=follower,
    )
    os.close(follower)
    _read_until(leader, b"starting")
    watching.send_signal(2)
    assert watching.wait(LIMIT_S) == 0
    os.close(leader)


def _read_until(terminal: int, mark: bytes) -> bytes:
    shown = b""
    while mark not in shown:
        try:
            shown += os.read(terminal, 1 << 16)
        except OSError:  # no process writes any more
            pytest.fail(f"{mark!r} was not shown: {shown!r}")
    return shown
