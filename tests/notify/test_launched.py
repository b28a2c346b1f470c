"""`ncclops launch` with `[notify]`: who is told of a run, and that no record has a secret."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import LIMIT_S, CompletedText, clean_environ
from tests.notify.conftest import Receiver

Ncclops = Callable[..., CompletedText]
pytestmark = pytest.mark.slow

NOTIFY = """
description = "test"
extends = "local-cpu"
[timeouts]
stop_grace = "2s"
[notify.to.team]
kind = "slack"
url_env = "SLACK_WEBHOOK_URL"
rules = ["failed"]
[notify.to.ops]
kind = "json"
url = "{url}"
key_file = "{directory}/token"
rules = ["failed"]
[notify.to.site]
kind = "command"
command = ["sh", "-c", "cat >> told.jsonl", "TopSecretArgument"]
heartbeat = "200ms"
"""


@pytest.fixture
def profile(receiver: Receiver, tmp_path: Path) -> Path:
    (tmp_path / "token").write_text("TopSecretToken\n")
    path = tmp_path / "notify.toml"
    url = receiver.url("/TopSecretJson")
    path.write_text(NOTIFY.format(url=url, directory=tmp_path))
    return path


def told(directory: Path) -> list[dict[str, Any]]:
    """What the command was given."""
    lines = (directory / "told.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_a_job_that_fails_is_told_and_no_record_has_a_secret(
    ncclops: Ncclops, receiver: Receiver, profile: Path, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("import time\ntime.sleep(1)\nraise KeyError('lr')\n")
    environ = {"SLACK_WEBHOOK_URL": receiver.url("/TopSecretSlack")}
    given = ("--profile", profile, "--restart", "none", "-v", "train.py")
    done = ncclops("launch", *given, env=environ)
    assert done.returncode == 1, done.stderr
    got = {each.path: each for each in (receiver.next(), receiver.next())}
    document = got["/TopSecretJson"].body
    assert got["/TopSecretJson"].authorization == "Bearer TopSecretToken"
    assert (document["rule"], document["details"]["class"]) == ("failed", "user-error")
    assert "*critical*" in got["/TopSecretSlack"].body["text"]
    states = [each.get("state", each["rule"]) for each in told(tmp_path)]
    assert states[0] == "running"
    assert states[-2:] == ["failed", "ended"]

    (run,) = (tmp_path / "runs").iterdir()
    assert ncclops("bundle", run, "-o", "run.tar.gz").returncode == 0
    assert ncclops("report", run, "-o", "run.html").returncode == 0
    subprocess.run(["tar", "xzf", "run.tar.gz"], cwd=tmp_path, check=True, timeout=LIMIT_S)
    (tmp_path / "said").write_text(done.stdout + done.stderr)
    spared = {"notify.toml", "told.jsonl", "run.tar.gz"}
    files = [each for each in tmp_path.rglob("*") if each.is_file() and each.name not in spared]
    assert len(files) > 20
    shown = [str(each) for each in files if b"TopSecret" in each.read_bytes()]
    assert shown == [str(tmp_path / "token")]


def test_of_an_agent_that_was_killed_its_launcher_tells(
    receiver: Receiver, profile: Path, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(60)\n")
    environ = {"SLACK_WEBHOOK_URL": receiver.url("/TopSecretSlack")}
    command = [sys.executable, "-m", "ncclops", "launch", "--profile", str(profile)]
    with subprocess.Popen(
        [*command, "--restart=none", "train.py"],
        cwd=tmp_path, env=clean_environ(environ), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            assert b"here" in process.stdout.readline()
            (agent,) = psutil.Process(process.pid).children()
            agent.send_signal(signal.SIGKILL)
            assert process.wait(LIMIT_S) == 1
        finally:
            process.kill()
    got = {each.path: each.body for each in (receiver.next(), receiver.next())}
    assert "it was killed by SIGKILL" in got["/TopSecretJson"]["summary"]


def test_commands_leave_no_process_and_are_not_taken_for_workers(
    ncclops: Ncclops, receiver: Receiver, profile: Path, tmp_path: Path
) -> None:
    """Each heartbeat is a child of the agent, which reaps what its workers leave, and ends what
    they have started, but not what such a command has: one runs at any time here."""
    slow = profile.read_text().replace(">> told.jsonl", ">> told.jsonl; sleep 1 || exit 9")
    profile.write_text(slow)
    (tmp_path / "train.py").write_text("import time\ntime.sleep(3)\n")
    environ = {"SLACK_WEBHOOK_URL": receiver.url("/x"), "NOTIFY_TEST_MARK": str(tmp_path)}
    done = ncclops("launch", "--profile", profile, "--restart", "none", "train.py", env=environ)
    assert done.returncode == 0, done.stderr
    assert "not sent" not in done.stderr
    assert len(told(tmp_path)) >= 3
    deadline = time.monotonic() + LIMIT_S
    while left := [pid for pid in psutil.pids() if _has_mark(pid, str(tmp_path))]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def _has_mark(pid: int, mark: str) -> bool:
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return pid != os.getpid() and f"NOTIFY_TEST_MARK={mark}".encode() in environ
