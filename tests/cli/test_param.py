"""``--param`` at every command that takes a profile."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import CompletedText

Ncclops = Callable[..., CompletedText]
PROFILE = ("--profile", "single-node-h200", "--profile", "regional-compile")
SHORTER = ("--param", "compile_timeout=45m")


@pytest.fixture
def run(ncclops_in_process: Ncclops, tmp_path: Path) -> Ncclops:
    (tmp_path / "train.py").touch()
    return ncclops_in_process


def document(ran: CompletedText) -> dict[str, Any]:
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def after(changes: list[dict[str, Any]]) -> tuple[str, str]:
    rows = {row["name"]: row["after"] for row in changes}
    return rows["NCCL_TIMEOUT"], rows["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"]


def test_env_diff_and_export_show_what_follows(run: Ncclops) -> None:
    plan = document(run("env", "diff", "--json", *PROFILE, *SHORTER))
    assert after(plan["changes"]) == ("2700", "2700")
    assert "export NCCL_TIMEOUT='2700'" in run("env", "export", *PROFILE, *SHORTER).stdout


@pytest.mark.slow  # asks git for the commit
def test_launch_applies_and_records_it(run: Ncclops) -> None:
    dry = document(run("launch", "--dry-run", "--json", *PROFILE, *SHORTER, "train.py"))
    assert after(dry["plan"]) == ("2700", "2700")
    assert dry["timeouts"]["process_group"] == "45m"
    assert dry["profile"]["parameters"]["compile_timeout"] == "45m"


def test_profile_show_has_it_with_what_follows(run: Ncclops) -> None:
    names = ("single-node-h200", "regional-compile")
    shown = document(run("profile", "show", "--json", *names, *SHORTER))
    assert shown["parameters"]["compile_timeout"] == "45m"
    assert shown["timeouts"]["process_group"] == "45m"
    assert "NCCL_TIMEOUT" in shown["uses"]["compile_timeout"]
    text = run("profile", "show", *names, *SHORTER).stdout
    assert "parameter compile_timeout = 45m, for timeouts.process_group" in text


def test_env_lint_judges_the_plan_with_it(run: Ncclops) -> None:
    raised = ("--profile", "multi-host-h200", "--param", "p2p_net_chunksize=4194304")
    found = run("env", "lint", *raised, env={"NCCL_BUFFSIZE": "4194304"})
    assert "[chunk-above-buffer]" in found.stdout
    alone = run("env", "lint", *SHORTER)
    assert alone.returncode == 2
    assert "name it with --profile" in alone.stderr


COMMANDS = {
    "diff": ("env", "diff", *PROFILE),
    "export": ("env", "export", *PROFILE),
    "exec": ("env", "exec", *PROFILE),
    "lint": ("env", "lint", *PROFILE),
    "launch": ("launch", *PROFILE),
    "show": ("profile", "show", "single-node-h200", "regional-compile"),
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS.keys())
@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("compile_timout=45m", "did you mean compile_timeout?"),
        ("compile_timeout=45", "'45' is not a duration"),
        ("recorder_entries=many", "must be a whole number"),
        ("recorder_entries=-1", "TORCH_FR_BUFFER_SIZE: -1 is below 0"),
        ("compile_timeout", "write it as NAME=VALUE"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_code_2(
    run: Ncclops, command: tuple[str, ...], given: str, says: str
) -> None:
    ends = {"exec": ["true"], "launch": ["train.py"]}
    words = next((word for name, word in ends.items() if name in command), [])
    ran = run(*command, "--param", given, *words)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert says in ran.stderr
    assert len(ran.stderr.splitlines()) == 1


def test_a_parameter_without_an_effect_is_told(run: Ncclops) -> None:
    ran = run("env", "diff", "-p", "single-node-h200", "--param", "p2p_net_chunksize=262144")
    assert ran.returncode == 0
    assert "changes nothing: profile single-node-h200 makes no use of it" in ran.stderr


@pytest.mark.slow  # asks git for the commit
def test_a_timeout_that_leaves_the_rest_of_its_parameter_behind_is_told(run: Ncclops) -> None:
    longer = ("--timeout", "process-group=3h")
    told = run("launch", "--dry-run", *PROFILE, *longer, "train.py")
    (line,) = (line for line in told.stderr.splitlines() if "--timeout" in line)
    assert "leaves TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC, NCCL_TIMEOUT" in line
    assert "at 120m: --param compile_timeout=TIME sets all" in line
    alone = run("launch", "--dry-run", *PROFILE, "--timeout", "stop_grace=9s", "train.py")
    assert "--timeout" not in alone.stderr
