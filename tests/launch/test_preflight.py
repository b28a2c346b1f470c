"""`launch --preflight host`: a node that is not fit starts nothing, and says why."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ncclops.errors import PreflightRefused, UsageError
from ncclops.launch import LaunchRequest, node_check, prepare
from ncclops.preflight.model import NodeReport
from ncclops.preflight.node import judge
from tests.conftest import LIMIT_S, clean_environ
from tests.preflight.machines import KINDS, make

CompletedText = subprocess.CompletedProcess[str]
HGX = KINDS.index("hgx-ib")


def report(*, shm: str) -> NodeReport:
    machine = make(HGX)
    machine.files["proc/mounts"] = f"shm /dev/shm tmpfs rw,size={shm} 0 0"
    return NodeReport(host="n7", time=0.0, findings=judge(machine.node()))


def test_a_node_that_fails_is_refused_with_the_table_and_the_reason() -> None:
    said: list[str] = []
    with pytest.raises(PreflightRefused, match=r"host\.shm host: 64 MiB; mend it") as refused:
        node_check.judge(report(shm="64m"), say=said.append, note=said.append)
    assert refused.value.exit_code == 3
    assert said[0].startswith("host n7: 1 FAIL")
    assert any(line.startswith("FAIL  host.shm") for line in said)


def test_a_node_that_warns_starts_and_the_warning_is_noted() -> None:
    said: list[str] = []
    node_check.judge(report(shm="4g"), say=pytest.fail, note=said.append)
    assert said[0].startswith("preflight: host n7: 1 WARN")
    assert said[1].startswith("WARN  host.shm  host  4 GiB")


@pytest.mark.usefixtures("starts_processes")
def test_collectives_are_tried_with_a_check_of_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, asked = tmp_path / "train.py", []
    script.write_text("pass\n")

    def check(*_: object, collectives: bool, **__: object) -> NodeReport:
        asked.append(collectives)
        return NodeReport(host="n7", time=0.0, findings=())

    monkeypatch.setattr(node_check, "check_node", check)
    request = LaunchRequest(target=script, nproc_per_node=1, preflight="host")
    for wanted in (False, True):
        prepared = prepare(dataclasses.replace(request, collectives=wanted))
        node_check.require_fit_node(prepared, say=pytest.fail, note=lambda _: None)
    assert asked == [False, True]
    with pytest.raises(UsageError, match="add --preflight host"):
        prepare(dataclasses.replace(request, collectives=True, preflight="off"))


@pytest.mark.slow
def test_the_lane_says_what_the_node_needs(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("pass\n")
    several = {"nnodes": "2", "node_rank": 0, "master_addr": "127.0.0.1", "master_port": 29555}
    for profile, more, rdma, nodes in (
        ("single-node-h200", {}, False, "one"),
        ("multi-host-h200", several, True, "many"),
        ("multi-host-h200-socket", several, False, "many"),
    ):
        request = LaunchRequest(target=script, profile=profile, nproc_per_node=1, preflight="host")
        needs = node_check.needs_of(prepare(dataclasses.replace(request, **more)))  # type: ignore[arg-type]
        assert (needs.rdma, needs.nodes) == (rdma, nodes)


@pytest.mark.slow
def test_nothing_starts_on_a_node_that_is_not_fit(
    ncclops: Callable[..., CompletedText], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("print('trained')\n")
    command = [sys.executable, "-m", "ncclops", "launch", "--nproc-per-node=1", "--restart=none"]
    shell = 'ulimit -n 500; exec "$@"'
    done = subprocess.run(
        ["sh", "-c", shell, "sh", *command, "--preflight=host", "train.py"],
        cwd=tmp_path,
        env=clean_environ(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 3, done.stderr
    assert "FAIL  host.nofile  host  500 (wanted: at least 131072)" in done.stderr
    assert done.stderr.splitlines()[-1].startswith(
        "ncclops: error: preflight: this node is not fit for the job: host.nofile host: 500"
    )
    assert not (tmp_path / "runs").exists()

    skip = tmp_path / "here.toml"  # what this machine may have, and no test is about
    names = ["host.shm", "host.space", "host.pids", "host.name", "host.readable", "host.nofile"]
    skip.write_text(
        f'description = "here"\nkind = "overlay"\n[preflight]\nignore = {names}\n'.replace("'", '"')
    )
    done = ncclops(
        "launch", "--nproc-per-node=1", "--restart=none", "--preflight=host",
        f"--profile={skip}", "train.py",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "trained" in done.stdout
    assert "ncclops: preflight: host " in done.stderr


def test_a_choice_that_is_none_is_refused(
    ncclops_in_process: Callable[..., CompletedText], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("pass\n")
    done = ncclops_in_process("launch", "--dry-run", "--preflight", "hots", "train.py")
    assert done.returncode == 2
    assert "--preflight hots: choose off, host or full; did you mean host?" in done.stderr
