"""What a shell has left on, as `env diff`, `env lint` and a launch tell it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import CompletedText

Ncclops = Callable[..., CompletedText]
LEFT_ON = {"NCCL_DEBUG": "INFO", "NCCL_P2P_NET_CHUNKSIZE": "1048576"}


def test_env_diff_says_what_it_does(ncclops_in_process: Ncclops) -> None:
    asked = ("env", "diff", "-p", "multi-host-h200")
    lines = ncclops_in_process(*asked, env=LEFT_ON).stdout.splitlines()
    told = {line.split()[1]: line for line in lines if line.startswith("inherited ")}
    assert set(told) == set(LEFT_ON)
    assert "tuned down, never up" in told["NCCL_P2P_NET_CHUNKSIZE"]
    document = json.loads(ncclops_in_process(*asked, "--json", env=LEFT_ON).stdout)
    rules = {row["name"]: (row["value"], row["rule"]) for row in document["inherited"]}
    assert rules["NCCL_DEBUG"] == ("INFO", "debug-log-left-on")
    meant = ncclops_in_process(*asked, "--keep", "NCCL_DEBUG", "--json", env=LEFT_ON).stdout
    assert [row["name"] for row in json.loads(meant)["inherited"]] == ["NCCL_P2P_NET_CHUNKSIZE"]


@pytest.mark.slow  # asks git for the commit
def test_a_launch_says_it_in_one_line(ncclops_in_process: Ncclops, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    asked = ("launch", "--dry-run", "-p", "local-cpu", "--nproc-per-node", "1")
    told = ncclops_in_process(*asked, "train.py", env=LEFT_ON).stderr.splitlines()
    assert [line for line in told if "NCCL_" in line] == [
        "ncclops: inherited by the workers: NCCL_P2P_NET_CHUNKSIZE=1048576, NCCL_DEBUG=INFO"
        " (`ncclops env diff` says what that does; --unset NAME removes it, --keep NAME keeps it"
        " without this line)"
    ]
    quiet = ncclops_in_process(*asked, "--unset", "NCCL_DEBUG", "train.py", env={"NCCL_DEBUG": "I"})
    assert "inherited" not in quiet.stderr


@pytest.mark.parametrize(
    ("left", "rule"),
    [
        ({"NCCL_NET_PLUGIN": "none"}, "net-plugin-off-on-many-nodes"),
        ({"NCCL_NET": "Socket"}, "socket-on-many-nodes"),
        ({"NCCL_SOCKET_IFNAME": "lo"}, "loopback-on-many-nodes"),
        ({"GLOO_SOCKET_IFNAME": "lo"}, "gloo-loopback-on-many-nodes"),
        ({"NCCL_IB_DISABLE": "1", "NCCL_NET_PLUGIN": "none"}, "ib-off-on-many-nodes"),
    ],
)
def test_lint_finds_what_a_single_node_shell_leaves_behind(
    ncclops_in_process: Ncclops, left: dict[str, str], rule: str
) -> None:
    assert f"[{rule}]" in ncclops_in_process("env", "lint", "--nodes", "many", env=left).stdout
    assert f"[{rule}]" not in ncclops_in_process("env", "lint", "--nodes", "one", env=left).stdout
    planned = ncclops_in_process("env", "lint", "-p", "multi-host-h200", env=left).stdout
    assert "many-nodes" not in planned
