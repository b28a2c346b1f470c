"""Secrets are looked up once, from a variable, a file or the profile; and are shown nowhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from ncclops.errors import ProfileError, UsageError
from ncclops.notify.targets import PAGERDUTY, settle
from ncclops.profiles import load_profiles
from ncclops.profiles.notification import RULES
from ncclops.redaction.redactor import Redactor
from tests.conftest import CompletedText

SECRET = "https://hooks.example.com/services/T0/B1/TopSecretPart"
Ncclops = Callable[..., CompletedText]


def profile(directory: Path, text: str, name: str = "mine") -> Path:
    path = directory / f"{name}.toml"
    path.write_text(f'description = "test"\nextends = "local-cpu"\n{text}')
    return path


def plan(directory: Path, text: str, environ: dict[str, str] | None = None) -> Any:
    loaded = load_profiles([str(profile(directory, text))], cwd=directory)
    return settle(loaded.notify, environ or {})


def test_a_secret_comes_from_a_variable_a_file_or_the_profile(tmp_path: Path) -> None:
    (tmp_path / "pd.key").write_text("PDKEY\n")
    text = f"""
        [notify.to.a]
        kind = "slack"
        url_env = "SLACK_WEBHOOK_URL"
        rules = ["failed"]
        [notify.to.b]
        kind = "pagerduty"
        key_file = "{tmp_path}/pd.key"
        [notify.to.c]
        kind = "json"
        url = "{SECRET}"
        key_env = "OPS_TOKEN"
        heartbeat = "1m"
    """
    found = plan(tmp_path, text, {"SLACK_WEBHOOK_URL": SECRET, "OPS_TOKEN": "0123456789"})
    a, b, c = found.targets
    assert (a.url, a.rules) == (SECRET, {"failed"})
    assert (b.url, b.key, b.rules) == (PAGERDUTY, "PDKEY", set(RULES))
    assert (c.url, c.key, c.heartbeat) == (SECRET, "0123456789", timedelta(minutes=1))
    assert "TopSecret" not in repr(found) and "PDKEY" not in repr(found)
    cleaned = Redactor(found.marks).text(f"refused by {SECRET}, at {PAGERDUTY}, with 0123456789")
    assert cleaned == f"refused by <redacted>, at {PAGERDUTY}, with <redacted>"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('kind = "slack"\nurl_env = "SLACK_WEBHOOK_URL"',
         "notify.to.a.url_env: SLACK_WEBHOOK_URL is not set: export it"),
        ('kind = "slack"\nurl_env = "OPS_ADDRESS"',
         "notify.to.a.url_env: nothing in the name OPS_ADDRESS says that it holds a secret"),
        ('kind = "json"\nurl_file = "nowhere"',
         "notify.to.a.url_file: nowhere cannot be read: No such file or directory"),
        ('kind = "json"\nurl = "h.example.com/TopSecretPart"', "notify.to.a.url: that is no URL"),
        ('kind = "json"\nurl = "file:///etc/TopSecretPart"', "notify.to.a.url: that is no URL"),
        ('kind = "json"\nurl = "https://h/TopSecretPart x"', "notify.to.a.url: that is no URL"),
        ('kind = "json"\nurl = "https://[TopSecretPart"', "notify.to.a.url: that is no URL"),
        (
            'kind = "json"\nurl = "https://user:TopSecretPart@h.example.com/x"',
            "notify.to.a.url: no name and password are sent",
        ),
        ('kind = "command"\ncommand = ["no-such-program"]',
         "notify.to.a.command: no-such-program is not a program"),
    ],
)  # fmt: skip
def test_a_secret_that_is_missing_or_none_is_one_line_without_it(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(UsageError) as refused:
        plan(tmp_path, f"[notify.to.a]\n{text}", {"OPS_ADDRESS": "https://h/TopSecretPart"})
    assert message in str(refused.value)
    assert "\n" not in str(refused.value) and "TopSecret" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[notify.to.a]\nkind = "slack"', "notify.to.a: slack needs url, url_env or url_file"),
        ('[notify.to.a]\nkind = "command"', "notify.to.a: command needs command"),
        (f'[notify.to.a]\nkind = "slack"\nurl = "{SECRET}"\nurl_env = "X"',
         "notify.to.a: url and url_env say the same: give one"),
        (f'[notify.to]\na = "{SECRET}"', "notify.to.a: must be a table"),
        (f'[notify.to.a]\nkind = "slack"\nurl = ["{SECRET}"]', "notify.to.a.url: must be text"),
        (f'[notify.to.a]\nkind = "slack"\nurl = "{SECRET}"\nheartbeat = "1m"',
         "notify.to.a: heartbeat goes with json and command"),
        (f'[notify.to.a]\nkind = "slack"\nurl = "{SECRET}"\nrules = ["fail"]',
         "notify.to.a.rules.[1]: cannot be 'fail'; write 'failed', 'restart-storm'"),
        (f'[notify.to."a b"]\nkind = "slack"\nurl = "{SECRET}"', "channel 'a b': use letters"),
        ("[notify]\nrestarts = 0", "notify.restarts: "),
        ("[notify]\ngoodput = 80", "notify.goodput: "),
        ('[notify]\ncooldown = "1 hour"', "notify.cooldown: '1 hour' is not a duration"),
        ("[notify]\ncool_down = 1", "notify.cool_down: unknown key; did you mean cooldown?"),
    ],
)  # fmt: skip
def test_a_mistake_names_file_and_key_and_shows_no_secret(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(ProfileError, match=r"mine\.toml") as refused:
        plan(tmp_path, text)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value) and "TopSecret" not in str(refused.value)


def test_a_child_replaces_a_channel_whole_takes_one_back_and_changes_limits(tmp_path: Path) -> None:
    profile(
        tmp_path,
        '[parameters]\nquiet = "20m"\n[notify]\nprogress = "{quiet}"\nrestarts = 4\n'
        f'[notify.to.a]\nkind = "json"\nurl = "{SECRET}"\nkey = "k"\n'
        f'[notify.to.b]\nkind = "slack"\nurl = "{SECRET}"\n',
        "site",
    )
    (tmp_path / "child.toml").write_text(
        'description = "test"\nextends = "./site.toml"\n[notify]\nrestarts = 9\n'
        f'[notify.to.a]\nkind = "json"\nurl = "{SECRET}"\n[notify.to.b]\nkind = "none"\n'
    )
    notify = load_profiles([str(tmp_path / "child.toml")], cwd=tmp_path).notify
    assert (notify.restarts, notify.progress) == (9, timedelta(minutes=20))
    assert list(notify.to) == ["a"] and notify.to["a"].key.place is None


def test_a_trainjob_is_told_how_far_it_is(tmp_path: Path) -> None:
    environ = {
        "KUBEFLOW_TRAINER_SERVER_URL": "https://trainer:8082/status",
        "KUBEFLOW_TRAINER_SERVER_CA_CERT": "/ca.crt",
        "KUBEFLOW_TRAINER_SERVER_TOKEN": "/token",
    }
    (target,) = plan(tmp_path, "", environ).targets
    assert (target.kind, target.ca_file, target.token_file) == ("kubeflow", "/ca.crt", "/token")
    assert not target.rules and target.heartbeat is not None


@pytest.mark.usefixtures("starts_processes")  # git, for the stack line
def test_no_command_shows_a_secret(tmp_path: Path, ncclops_in_process: Ncclops) -> None:
    (tmp_path / "train.py").write_text("pass\n")
    profile(
        tmp_path,
        f'[notify.to.a]\nkind = "json"\nurl = "{SECRET}"\nkey = "TopSecretKey"\n'
        '[notify.to.b]\nkind = "slack"\nurl_env = "SLACK_WEBHOOK_URL"\n'
        '[notify.to.c]\nkind = "command"\ncommand = ["sh", "-c", "true", "TopSecretArgument"]\n',
    )
    environ = {"SLACK_WEBHOOK_URL": SECRET}
    for command in (
        ("profile", "show", "./mine.toml"),
        ("profile", "show", "./mine.toml", "--json"),
        ("env", "diff", "--profile", "./mine.toml", "--json"),
        ("launch", "--dry-run", "--profile", "./mine.toml", "train.py"),
        ("launch", "--dry-run", "--json", "--profile", "./mine.toml", "train.py"),
    ):
        done = ncclops_in_process(*command, env=environ)
        assert done.returncode == 0, done.stderr
        assert "TopSecret" not in done.stdout + done.stderr, command
    shown = json.loads(ncclops_in_process("profile", "show", "./mine.toml", "--json").stdout)
    assert shown["notify"]["to"]["b"]["url"] == "variable SLACK_WEBHOOK_URL"
    assert shown["notify"]["to"]["a"]["url"] == "in the profile"
