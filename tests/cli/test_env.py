"""``ncclops env`` as people and scripts call it."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

NCCLOPS = [sys.executable, "-m", "ncclops"]
POISON = {"NCCL_NET": "IB", "NCCL_IB_TC": "106", "NCCL_TUNER_CONFIG_PATH": "/x"}


def environment(**extra: str) -> dict[str, str]:
    """This process's environment without what could change a plan."""
    names = ("NCCL_", "TORCH", "GLOO_", "PYTORCH_", "CUDA_", "NVTE_", "OMP_", "TOKENIZERS_", "LD_")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(names)}
    return clean | {"COLUMNS": "80", "TERM": "dumb"} | extra


def run(
    *arguments: str, env: dict[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*NCCLOPS, *arguments],
        env=env or environment(),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
    )


def diff(*arguments: str, env: dict[str, str] | None = None) -> dict[str, dict[str, str | None]]:
    ran = run("env", "diff", "--json", *arguments, env=env)
    assert ran.returncode == 0, ran.stderr
    return {row["name"]: row for row in json.loads(ran.stdout)["changes"]}


def test_exec_gives_the_command_exactly_what_diff_announced() -> None:
    env = environment(**POISON)
    rows = diff("--profile", "single-node-h200", env=env)
    show = "import json, os; print(json.dumps(dict(os.environ)))"
    ran = run("env", "exec", "-p", "single-node-h200", "--", sys.executable, "-c", show, env=env)
    assert ran.returncode == 0, ran.stderr
    seen = json.loads(ran.stdout)
    assert not POISON.keys() & seen.keys()
    here = str(Path.cwd())
    for name, row in rows.items():
        after = row["after"]
        assert seen.get(name) == (after and after.replace("{rank_dir}", here)), name
    untouched = {k: v for k, v in seen.items() if k not in rows}
    assert untouched == {k: v for k, v in env.items() if k not in rows}


def test_exec_hands_on_the_exit_code_and_the_commands_own_options() -> None:
    code = "import sys; sys.exit(int(sys.argv[-1]))"
    ran = run("env", "exec", "-p", "local-cpu", sys.executable, "-c", code, "--set", "7")
    assert ran.returncode == 7


def test_exec_of_a_missing_command_is_one_line() -> None:
    ran = run("env", "exec", "-p", "local-cpu", "--", "/no/such/command")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr == "ncclops: error: cannot run /no/such/command: No such file or directory\n"


def test_the_command_line_overrules_the_sanitiser() -> None:
    env = environment(**POISON)
    rows = diff("-p", "single-node-h200", "--keep", "NCCL_NET", "--set", "NCCL_IB_TC=7", env=env)
    assert (rows["NCCL_NET"]["action"], rows["NCCL_NET"]["after"]) == ("keep", "IB")
    assert (rows["NCCL_IB_TC"]["action"], rows["NCCL_IB_TC"]["after"]) == ("set", "7")
    assert rows["NCCL_TUNER_CONFIG_PATH"]["action"] == "unset"


def test_the_restart_mode_changes_the_values() -> None:
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    assert diff("-p", "base")[name]["after"] == "0"
    assert diff("-p", "base", "--restart", "process")[name]["after"] == "1"


def test_exit_code_says_whether_anything_would_change() -> None:
    assert run("env", "diff", "-p", "base", "--exit-code").returncode == 1
    settled = json.loads(run("env", "export", "-p", "base", "--format", "json").stdout)["set"]
    again = run("env", "diff", "-p", "base", "--exit-code", env=environment(**settled))
    assert again.returncode == 0, again.stdout
    assert run("env", "diff", "-p", "base").returncode == 0


def test_export_evaluated_by_sh_settles_the_environment() -> None:
    script = f'eval "$("{sys.executable}" -m ncclops env export -p single-node-h200)" && exec env'
    ran = subprocess.run(
        ["sh", "-c", script],
        env=environment(**POISON, LD_LIBRARY_PATH="/usr/local/gib/lib64"),
        capture_output=True,
        text=True,
        timeout=60,
    )
    seen = dict(line.partition("=")[::2] for line in ran.stdout.splitlines())
    assert seen["NCCL_IB_DISABLE"] == "1"
    assert not {*POISON, "LD_LIBRARY_PATH"} & set(seen)


def test_without_a_profile_one_is_chosen_and_said_on_stderr() -> None:
    ran = run("env", "diff", "--json")
    document = json.loads(ran.stdout)
    assert ran.stderr.startswith(f"ncclops: profile {document['profile']} (chosen: 1 node, ")
    assert len(ran.stderr.splitlines()) == 1
    overlaid = run("env", "diff", "--json", "--profile", "debug-bootstrap")
    name = json.loads(overlaid.stdout)["profile"]
    assert name == f"{document['profile']}+debug-bootstrap"


def test_a_pipe_gets_one_uncut_line_for_each_variable() -> None:
    long = "/a/very/long/path/entry:" * 20 + "/usr/local/gib/lib64"
    env = environment(LD_LIBRARY_PATH=long, **POISON)
    ran = run("env", "diff", "-p", "single-node-h200", env=env)
    rows = diff("-p", "single-node-h200", env=env)
    lines = ran.stdout.splitlines()
    assert len(lines) == len(rows) + 1
    assert any(long in line for line in lines)
    assert lines[1].split()[0] == "unset"  # removals first
    assert lines[-1].split()[0] in ("set", "keep")


def on_terminal(columns: int, *arguments: str, env: dict[str, str]) -> list[str]:
    """The lines that ``ncclops`` writes to a terminal of this width."""
    main, side = pty.openpty()
    env = env | {"COLUMNS": str(columns), "TERM": "xterm-256color", "NO_COLOR": "1"}
    process = subprocess.Popen(
        [*NCCLOPS, *arguments], env=env, stdin=side, stdout=side, stderr=subprocess.DEVNULL
    )
    os.close(side)
    written, deadline = b"", time.monotonic() + 60
    while select.select([main], [], [], max(0.0, deadline - time.monotonic()))[0]:
        try:
            chunk = os.read(main, 65536)
        except OSError:  # the other end is closed: Linux says EIO
            break
        written += chunk
    os.close(main)
    assert process.wait(timeout=60) == 0
    return re.sub(rb"\x1b\[[0-9;]*m", b"", written).decode().replace("\r", "").splitlines()


@pytest.mark.parametrize("columns", [60, 80, 120, 200])
def test_a_terminal_shows_every_change_within_its_width(columns: int) -> None:
    env = environment(**POISON, OMP_NUM_THREADS="8")
    lines = on_terminal(columns, "env", "diff", "-p", "single-node-h200", env=env)
    assert max(map(len, lines)) <= columns
    text = "\n".join(lines)
    for row in diff("-p", "single-node-h200", env=env):
        assert row in text
    assert "IB → -" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--profile", "single-node"], "unknown profile 'single-node'; did you mean single-node-h"),
        (["--profile", "./no.toml"], "profile ./no.toml: there is no such file"),
        (["--profile", "single-node-h200", "-p", "base"], "are both lanes: choose one"),
        (["--set", "NCCL_NET"], "--set NCCL_NET: write it as NAME=VALUE"),
        (["--set", "A-B=1"], "--set 'A-B': not the name of an environment variable"),
        (["--unset", "X=1"], "--unset 'X=1': not the name"),
        (["--set", "X=1", "--keep", "X"], "X is given with --set and --keep: choose one"),
        (["--restart", "never"], "--restart never: choose in-process, process or none"),
        (["--nope"], "has no option --nope: `ncclops env diff --help` lists all"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_2(arguments: list[str], message: str) -> None:
    ran = run("env", "diff", *arguments)
    assert ran.returncode == 2
    assert ran.stdout == ""
    assert ran.stderr.startswith("ncclops: error: ")
    assert message in ran.stderr
    assert len(ran.stderr.splitlines()) == 1


def test_an_unknown_export_format_is_wrong_usage() -> None:
    ran = run("env", "export", "--format", "yaml")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "--format yaml: choose sh, dotenv or json" in ran.stderr


def test_the_command_lines_own_path_imports_neither_torch_nor_pydantic() -> None:
    code = (
        "import sys, ncclops, ncclops.cli; heavy = {'torch', 'pydantic', 'rich', 'pynvml'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.stdout == "[]\n", ran.stderr


def test_computing_a_plan_does_not_import_torch() -> None:
    code = (
        "import sys; from ncclops.cli.env import _plan;"
        "_plan(['base'], *[None] * 4, 'in-process'); print('torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.stdout == "False\n", ran.stderr
