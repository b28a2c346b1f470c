"""Snapshots, redaction, and the difference of two environments."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ncclops.env.explain import explain
from ncclops.env.snapshot import EnvSnapshot, compare, is_another_file, load, take, write
from ncclops.errors import UsageError
from ncclops.record.event_values import EnvChange
from ncclops.record.run_record import RUN, RunRecord
from ncclops.redaction.redactor import REDACTED, is_secret, redact_variables


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HF_TOKEN", "x"),
        ("NCCL_PSK", "x"),
        ("WANDB_API_KEY", "x"),
        ("AWS_SECRET_ACCESS_KEY", "x"),
        ("DB_PASSWORD", "x"),
        ("MYSQL_PASSWD", "x"),
        ("SENTRY_DSN", "x"),
        ("SLACK_WEBHOOK_URL", "x"),
        ("DATABASE", "postgres://me:pw@host/db"),
        ("SOMETHING", "hf_abcdefghijklmnopqrst"),
        ("SOMETHING", "ghp_abcdefghijklmnopqrstuvwxyz0123456789"),
        ("SOMETHING", "AKIAIOSFODNN7EXAMPLE"),
        ("CERT", "-----BEGIN RSA PRIVATE KEY-----\nabc"),
    ],
)
def test_secrets_are_taken_out_by_name_and_by_shape(name: str, value: str) -> None:
    assert redact_variables({name: value}) == {name: REDACTED}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TOKENIZERS_PARALLELISM", "False"),
        ("NCCL_DEBUG", "INFO"),
        ("PATH", "/usr/bin:/home/keys/bin"),
        ("KEYBOARD_LAYOUT", "de"),
        ("URL", "https://example.org:8080/a@b"),
        ("SSH_AUTH_SOCK", "/tmp/agent"),
        ("PWD", "/home/me"),
        ("MASTER_ADDR", "10.0.0.1"),
        ("GLOO_DEVICE_TRANSPORT_TCP_TLS_PKEY", "/etc/tls/key.pem"),
    ],
)
def test_settings_stay(name: str, value: str) -> None:
    assert not is_secret(name, value)


def test_explain_does_not_show_a_secret_either() -> None:
    environ = {"NCCL_PSK": "0123456789abcdef0123456789abcdef", "HOME": "/nonexistent"}
    assert explain("NCCL_PSK", environ, torch=None, nccl=None)["here"]["value"] == REDACTED


@pytest.mark.parametrize("kept", ["import torch\n", '{"schema": "ncclops.run/1"}', "[]"])
def test_a_snapshot_may_replace_a_snapshot_and_no_other_file(tmp_path: Path, kept: str) -> None:
    other, mine, empty = tmp_path / "train.py", tmp_path / "mine.json", tmp_path / "empty"
    other.write_text(kept, encoding="utf-8")
    empty.touch()
    write({}, mine)
    paths = (other, mine, empty, tmp_path / "absent", Path("/dev/null"))
    assert list(map(is_another_file, paths)) == [True, False, False, False, False]


def test_a_snapshot_survives_its_file(tmp_path: Path) -> None:
    taken = take({"NCCL_DEBUG": "INFO", "HF_TOKEN": "x", "HOME": "/nonexistent"})
    path = tmp_path / "a.json"
    path.write_text(json.dumps(taken.to_json()), encoding="utf-8")
    again = load(str(path))
    assert again.variables == {"HF_TOKEN": REDACTED, "HOME": "/nonexistent", "NCCL_DEBUG": "INFO"}
    assert (again.host, again.versions["torch"]) == (taken.host, taken.versions["torch"])


def test_compare_puts_what_must_be_equal_first() -> None:
    a = EnvSnapshot("a", {"RANK": "0", "NCCL_ALGO": "Ring", "X": "1", "SAME": "1"})
    b = EnvSnapshot("b", {"RANK": "1", "NCCL_ALGO": "Tree", "Y": "2", "SAME": "1"})
    assert [(row.name, row.a, row.b) for row in compare(a, b)] == [
        ("NCCL_ALGO", "Ring", "Tree"),
        ("X", "1", None),
        ("Y", None, "2"),
        ("RANK", "0", "1"),
    ]


def test_compare_sees_what_configuration_files_add() -> None:
    a = EnvSnapshot("a", {}, files={"NCCL_NET": "IB"})
    b = EnvSnapshot("b", {"NCCL_NET": "Socket"}, files={})
    (row,) = compare(a, b)
    assert (row.a, row.b) == ("IB", "Socket")


def test_two_ranks_of_a_run_and_a_run_without_them(tmp_path: Path) -> None:
    for rank, value in (("0", "Ring"), ("1", "Tree")):
        directory = tmp_path / "ranks" / rank
        directory.mkdir(parents=True)
        shot = take({"NCCL_ALGO": value, "HOME": "/nonexistent"})
        (directory / "environment.json").write_text(json.dumps(shot.to_json()), encoding="utf-8")
    zero, one = load(str(tmp_path / "ranks/0")), load(str(tmp_path / "ranks/1"))
    assert [(row.a, row.b) for row in compare(zero, one)] == [("Ring", "Tree")]
    assert load(str(tmp_path)).variables["NCCL_ALGO"] == "Ring"
    older = tmp_path / "older"
    older.mkdir()
    changes = [
        EnvChange(name="NCCL_ALGO", action="set", after="Ring"),
        EnvChange(name="NCCL_NET", action="unset", before="Socket"),
    ]
    RUN.write(older / "run.json", RunRecord(plan=changes))
    assert load(str(older)).variables == {"NCCL_ALGO": "Ring"}


@pytest.mark.slow
def test_a_running_process() -> None:
    environ = {"PATH": os.environ["PATH"], "MARK": "seen"}
    code = "print('ready', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        shot = load(f"pid:{process.pid}")
        process.communicate("\n", timeout=60)
    assert shot.variables["MARK"] == "seen"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("missing.json", "missing.json: cannot be read"),
        ("pid:x", "write a process as pid:1234"),
        ("pid:4194304999", "there is no such process"),
        ("other.json", "not ncclops.env-snapshot/1: write one with"),
        ("broken.json", "not a snapshot but other text .Expecting"),
        ("empty", "holds neither environment.json nor run.json"),
    ],
)
def test_what_is_no_environment(
    what: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("other.json").write_text("[1]", encoding="utf-8")
    Path("broken.json").write_text("{", encoding="utf-8")
    Path("empty").mkdir()
    with pytest.raises(UsageError, match=message):
        load(what)


def test_a_file_may_be_given_as_text_and_as_a_path(tmp_path: Path) -> None:
    write({"A": "1"}, str(tmp_path / "one.json"))
    write({"A": "1"}, tmp_path / "two.json")
    assert [load(tmp_path / "one.json").label, load(str(tmp_path / "two.json")).variables] == [
        str(tmp_path / "one.json"),
        {"A": "1"},
    ]
