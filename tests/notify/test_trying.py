"""`ncclops notify test`: a message to each channel, and what came of it; no secret is shown."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import CompletedText
from tests.notify.conftest import Receiver

Ncclops = Callable[..., CompletedText]


def write(directory: Path, text: str) -> Path:
    path = directory / "mine.toml"
    path.write_text(f'description = "test"\nextends = "local-cpu"\n{text}')
    return path


@pytest.fixture
def channels(receiver: Receiver, tmp_path: Path) -> Path:
    receiver.codes["/TopSecretPager"] = [400]
    return write(
        tmp_path,
        f"""
        [notify.to.team]
        kind = "slack"
        url_env = "SLACK_WEBHOOK_URL"
        rules = ["failed"]
        [notify.to.duty]
        kind = "pagerduty"
        url = "{receiver.url("/TopSecretPager")}"
        key = "TopSecretKey"
        [notify.to.ops]
        kind = "json"
        url = "{receiver.url("/TopSecretJson")}"
        heartbeat = "1m"
        [notify.to.absent]
        kind = "json"
        url_env = "OPS_WEBHOOK_URL"
        """,
    )


def test_each_channel_gets_a_message_and_says_what_came_of_it(
    ncclops_in_process: Ncclops, receiver: Receiver, channels: Path
) -> None:
    environ = {"SLACK_WEBHOOK_URL": receiver.url("/TopSecretSlack")}
    done = ncclops_in_process("notify", "test", "--profile", channels, env=environ)
    assert done.returncode == 1
    assert re.sub(r"\d\.\d s", "0 s", done.stdout) == (
        "team    slack      sent (0 s)\n"
        "duty    pagerduty  not sent: HTTP 400 (0 s)\n"
        "ops     json       sent (0 s)\n"
        "absent  json       not sent: notify.to.absent.url_env: OPS_WEBHOOK_URL is not set:"
        " export it (0 s)\n"
    )
    assert "TopSecret" not in done.stdout + done.stderr
    got = {each.path: each.body for each in (receiver.next() for _ in range(3))}
    says = "this is a test of [notify] in profile mine: no job has failed"
    assert says in got["/TopSecretSlack"]["text"]
    assert got["/TopSecretPager"]["payload"]["severity"] == "info"
    document = got["/TopSecretJson"]
    assert (document["rule"], document["run_dir"]) == ("test", "")
    assert document["summary"] == says


def test_one_channel_alone_as_a_document(
    ncclops_in_process: Ncclops, receiver: Receiver, channels: Path
) -> None:
    given = ("notify", "test", "--profile", channels, "--json", "--to")
    done = ncclops_in_process(*given, "ops")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    (row,) = document["channels"]
    assert (document["schema"], document["profile"]) == ("ncclops.notify-test/1", "mine")
    assert row.pop("seconds") >= 0
    assert row == {"name": "ops", "kind": "json", "sent": True, "error": None}
    assert receiver.next().path == "/TopSecretJson"
    assert receiver.got.empty()
    done = ncclops_in_process(*given, "nobody")
    assert done.returncode == 2
    assert "no such channel; known: team, duty, ops, absent" in done.stderr
    assert "did you mean team?" in ncclops_in_process(*given, "tema").stderr


def test_a_profile_that_tells_nobody(ncclops_in_process: Ncclops) -> None:
    done = ncclops_in_process("notify", "test", "--profile", "local-cpu")
    assert (done.returncode, "tells nobody: add a channel" in done.stderr) == (2, True)


@pytest.mark.slow
def test_a_command_is_run(ncclops_in_process: Ncclops, tmp_path: Path) -> None:
    text = """
        [notify.to.good]
        kind = "command"
        command = ["sh", "-c", "cat > told"]
        [notify.to.bad]
        kind = "command"
        command = ["sh", "-c", "exit 3", "TopSecretArgument"]
    """
    done = ncclops_in_process("notify", "test", "--profile", write(tmp_path, text))
    assert done.returncode == 1
    assert "bad   command  not sent: the command exited with 3" in done.stdout
    assert "TopSecret" not in done.stdout + done.stderr
    assert json.loads((tmp_path / "told").read_text())["rule"] == "test"
