"""``ncclops env explain, lint, audit, snapshot`` and ``env diff A B`` on the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import CompletedText

Run = Callable[..., CompletedText]


@pytest.fixture
def ncclops(ncclops_in_process: Run) -> Run:
    """Commands that only read need no process of their own."""
    return ncclops_in_process


def test_explain_is_one_screen(ncclops: Run) -> None:
    ran = ncclops("env", "explain", "NCCL_NVLS_ENABLE", env={"NCCL_NVLS_ENABLE": "1"})
    lines = ran.stdout.splitlines()
    assert ran.returncode == 0
    assert len(lines) <= 24
    assert lines[0] == "NCCL_NVLS_ENABLE"
    assert any(line.startswith("here") and " 1, from " in line for line in lines)
    document = json.loads(ncclops("env", "explain", "NCCL_NVLS_ENABLE", "--json").stdout)
    assert document["schema"] == "ncclops.env-explain/1"
    assert document["default"] == "2"


def test_explain_of_an_unknown_name(ncclops: Run) -> None:
    ran = ncclops("env", "explain", "NCCL_IB_TIMOUT")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "did you mean NCCL_IB_TIMEOUT?" in ran.stderr


def test_explain_and_diff_show_what_only_nccls_files_say(ncclops: Run, tmp_path: Path) -> None:
    (tmp_path / ".nccl.conf").write_text("NCCL_NET=IB\n", encoding="utf-8")
    home = {"HOME": str(tmp_path)}
    explained = ncclops("env", "explain", "NCCL_NET", env=home).stdout
    assert "IB, from " in explained
    assert ".nccl.conf, line 1 (only NCCL sees it)" in explained
    ran = ncclops("env", "diff", "-p", "single-node-h200", "--json", env=home)
    (added,) = json.loads(ran.stdout)["from_files"]
    assert (added["name"], added["value"]) == ("NCCL_NET", "IB")
    shown = ncclops("env", "diff", "-p", "single-node-h200", env=home).stdout
    assert "NCCL adds it from" in shown
    linted = ncclops("env", "lint", "-p", "single-node-h200", env=home)
    assert "[net-ib-disabled]" in linted.stdout
    assert linted.returncode == 1


def test_lint_of_a_script(ncclops: Run, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text("export NCCL_DEBUG=info,trace\nexport NCCL_TIMEOUT=1\n", encoding="utf-8")
    ran = ncclops("env", "lint", str(script))
    assert ran.returncode == 1
    first, second = ran.stdout.splitlines()
    assert first.startswith(f"{script}:1: error: NCCL_DEBUG: 'info,trace' is not one of")
    assert second.startswith(f"{script}:2: warning: NCCL_TIMEOUT: ")
    beside = ncclops("env", "lint", "--json", "missing.sh", str(script))
    assert (beside.returncode, len(beside.stderr.splitlines())) == (2, 1)
    document = json.loads(beside.stdout)
    assert document["unread"] == ["missing.sh"]
    assert (document["errors"], document["warnings"], document["notes"]) == (1, 1, 0)
    assert document["findings"][0]["rule"] == "bad-value"


def test_lint_without_errors_ends_with_0(ncclops: Run, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text("export NCCL_TIMEOUT=1\n", encoding="utf-8")
    assert ncclops("env", "lint", str(script)).returncode == 0
    script.write_text("echo\n", encoding="utf-8")
    assert ncclops("env", "lint", str(script)).stdout == "nothing found\n"


def test_lint_of_the_environment_and_of_a_plan(ncclops: Run) -> None:
    hostile = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    raw = ncclops("env", "lint", "--restart", "in-process", env=hostile)
    assert "[blocking-wait-in-process]" in raw.stdout
    assert raw.returncode == 1
    planned = ncclops("env", "lint", "--profile", "local-cpu", env=hostile)
    assert planned.returncode == 0, planned.stdout
    assert "blocking-wait-in-process" not in planned.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.sh"], "missing.sh: cannot be read: No such file"),
        (["--restart", "never"], "--restart never: choose"),
        (["--nodes", "3"], "--nodes 3: choose one or many"),
        (["--uses", "magic"], "--uses magic: choose"),
        (["--torch", "new"], "--torch: 'new' is not a version"),
        (["--format", "toml", "x.sh"], "--format toml: choose"),
        (["x.sh", "--profile", "base"], "lint either files or the plan"),
    ],
)
def test_wrong_usage_of_lint(ncclops: Run, arguments: list[str], message: str) -> None:
    ran = ncclops("env", "lint", *arguments)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert message in ran.stderr
    assert len(ran.stderr.splitlines()) == 1


@pytest.mark.slow  # reads hundreds of megabytes of libraries
def test_audit_of_what_is_installed(ncclops: Run) -> None:
    ran = ncclops("env", "audit", "--json", env={"NCCL_TIMEOUT": "1"})
    document = json.loads(ran.stdout)
    assert document["schema"] == "ncclops.env-audit/1"
    names = [library["name"] for library in document["libraries"]]
    assert "torch" in names
    assert "NCCL_TIMEOUT" in document["set_but_unread"]


def test_snapshot_and_diff_of_two(ncclops: Run, tmp_path: Path) -> None:
    wrote = ncclops("env", "snapshot", "-o", "a.json", env={"NCCL_ALGO": "Ring", "HF_TOKEN": "s"})
    assert wrote.returncode == 0, wrote.stderr
    assert "1 of them redacted" in wrote.stderr
    ncclops("env", "snapshot", "-o", "b.json", env={"NCCL_ALGO": "Tree", "HF_TOKEN": "s"})
    assert '"s"' not in (tmp_path / "a.json").read_text(encoding="utf-8")
    ran = ncclops("env", "diff", "a.json", "b.json")
    assert "NCCL_ALGO: Ring → Tree  (must be equal on all ranks)" in ran.stdout
    document = json.loads(ncclops("env", "diff", "a.json", "b.json", "--json").stdout)
    assert document["schema"] == "ncclops.env-compare/1"
    assert [row["name"] for row in document["differences"]] == ["NCCL_ALGO"]
    assert ncclops("env", "diff", "a.json", "b.json", "--exit-code").returncode == 1
    assert ncclops("env", "diff", "a.json", "a.json", "--exit-code").returncode == 0
    (tmp_path / "train.py").write_text("import torch", encoding="utf-8")
    refused = ncclops("env", "snapshot", "-o", "train.py")
    assert refused.returncode == 2
    assert "train.py exists and is no snapshot" in refused.stderr
    assert ncclops("env", "snapshot", "-o", "train.py", "--force").returncode == 0


@pytest.mark.parametrize("options", [["--json"], ["--exit-code"]])
@pytest.mark.parametrize("names", [["a.json", "b.json"], ["a.json"]])
def test_compare_is_what_diff_of_two_was(
    ncclops: Run, names: list[str], options: list[str]
) -> None:
    for name, algorithm in (("a.json", "Ring"), ("b.json", "Tree")):
        ncclops("env", "snapshot", "-o", name, env={"NCCL_ALGO": algorithm})
    now, before = (ncclops("env", word, *names, *options) for word in ("compare", "diff"))
    assert (now.stdout, now.returncode) == (before.stdout, before.returncode)
    assert "NCCL_ALGO" in now.stdout


def test_diff_takes_two_environments_or_a_plan(ncclops: Run) -> None:
    ran = ncclops("env", "diff", "a", "b", "-p", "base")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "two environments are compared by `ncclops env compare A B`" in ran.stderr


def test_lint_without_exit_code_only_shows(ncclops: Run, tmp_path: Path) -> None:
    (tmp_path / "x.sh").write_text("export NCCL_IB_TC=abc\n")
    judged, shown = (ncclops("env", "lint", "x.sh", *more) for more in ([], ["--no-exit-code"]))
    assert (judged.returncode, shown.returncode) == (1, 0)
    assert judged.stdout == shown.stdout
