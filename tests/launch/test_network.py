"""A job that is not on the network it was meant for is told so at once, or refused.

On torch's real ProcessGroupNCCL with the fake GPU below, whose NCCL logs what NCCL would; over
nodes with a script that prints the same lines.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import LIMIT_S, CompletedText, free_port, run_ncclops
from tests.fakegpu.host import Host
from tests.fakegpu.place import Place
from tests.launch.conftest import Background, Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(320)]

Launch = Callable[..., CompletedText]

TRAINING = """
import os, sys, time
import torch, torch.distributed as dist
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device)
dist.all_reduce(torch.ones(1, device=device))
time.sleep(float(sys.argv[1]))  # training, which a refusal ends
print("trained", os.environ.get("NCCL_DEBUG_FILE"), flush=True)
dist.destroy_process_group()
"""
OPEN = ("--set", "NCCL_IB_DISABLE=0", "--unset", "NCCL_NET_PLUGIN")


@pytest.fixture
def launch(fake_gpu_place: Place, host: Host, tmp_path: Path) -> Launch:
    """``launch(*options, seconds=0, **variables)``: two ranks that train for ``seconds``."""
    script = tmp_path / "train.py"
    script.write_text(TRAINING)

    def run(*options: str, seconds: int = 0, **variables: str) -> CompletedText:
        arguments = ["launch", "--run-dir", "run", "--nproc-per-node", "2", *options]
        return run_ncclops(
            tmp_path,
            *arguments,
            str(script),
            str(seconds),
            env=host.environment | variables,
            python=fake_gpu_place.python,
            limit_s=300,
        )

    return run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


def test_the_required_network_is_used_and_nobody_sees_nccls_log(launch: Launch, run: Run) -> None:
    done = launch("--require-network", "ib,roce", *OPEN, FAKEGPU_NCCL_NETWORK="roce")
    assert done.returncode == 0, done.stderr
    (use,) = run.verdict["networks"]
    assert (use["name"], use["kinds"], use["met"]) == ("IB", ["roce"], True)
    assert use["expected"] == ["ib", "roce"]
    assert use["devices"] == ["mlx5_0:1/RoCE", "mlx5_1:1/RoCE"]
    (event,) = run.named("network")
    assert event["use"] == use
    log = run.path / "ranks" / "0" / "nccl.log"
    assert "Using network IB" in log.read_text()
    assert run.stdout(0) == f"trained {log}\n"
    assert "NCCL INFO" not in done.stdout + done.stderr
    assert "meant for" not in done.stderr


def test_a_job_on_another_network_than_required_is_ended(launch: Launch, run: Run) -> None:
    done = launch("--require-network", "ib", *OPEN, seconds=600)
    assert done.returncode == 3, done.stderr
    verdict = run.verdict
    assert (verdict["outcome"], verdict["exit_code"], verdict["attempts"]) == ("failed", 3, 1)
    assert verdict["reason"].startswith(
        "--require-network: this job was meant for ib, and NCCL uses"
    )
    assert verdict["reason"].endswith(": NET/IB : No device found.")
    assert verdict["reason"] in done.stderr
    (use,) = verdict["networks"]
    assert (use["kinds"], use["met"]) == (["socket"], False)
    assert "trained" not in run.stdout(0) + run.stdout(1)
    assert verdict["story"] is None
    assert verdict["gpu_faults"] == []


EXPECTS = """
description = "For tests: a lane over InfiniBand."
extends = "single-node-h200"
[network]
expect = ["ib"]
"""


@pytest.mark.extended
def test_what_a_profile_expects_is_told_with_the_reason(
    launch: Launch, run: Run, tmp_path: Path
) -> None:
    """The user's own level and place of NCCL's log stay."""
    profile = tmp_path / "lane.toml"
    profile.write_text(EXPECTS)
    done = launch("--profile", str(profile), NCCL_DEBUG="INFO")
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if "was meant for ib" in line]
    assert len(told) == 2, "at once, and at the end"
    for line in told:
        assert "NCCL uses the network Socket" in line
        assert line.endswith(": NCCL_IB_DISABLE set by environment to 1.")
    assert run.verdict["outcome"] == "completed"
    assert [use["met"] for use in run.verdict["networks"]] == [False]
    assert "NCCL INFO" in run.stdout(0)
    assert "trained None" in run.stdout(0)


@pytest.mark.extended
def test_sockets_are_told_where_nccl_logs_nothing(launch: Launch, run: Run, tmp_path: Path) -> None:
    profile = tmp_path / "lane.toml"
    profile.write_text(EXPECTS)
    done = launch("--profile", str(profile), seconds=6)
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if "was meant for ib" in line]
    assert len(told) == 2, "while it runs, and at the end"
    assert all("NCCL uses the network Socket" in line for line in told)
    assert "no RDMA device is open" in told[0]
    assert [use["met"] for use in run.verdict["networks"]] == [False]


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({"NCCL_DEBUG": "WARN"}, "NCCL_DEBUG=WARN keeps NCCL from saying"),
        ({"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "COLL"}, "NCCL_DEBUG_SUBSYS=COLL leaves out"),
        ({"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": "/tmp/x"}, "NCCL_DEBUG_FILE=/tmp/x takes"),
    ],
)
def test_what_could_not_be_checked_is_refused_before_the_start(
    ncclops: Launch, variables: dict[str, str], problem: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit('started')\n")
    options = ("--require-network", "ib", "--nproc-per-node", "1", "--run-dir", "run")
    done = ncclops("launch", *options, "train.py", env=variables)
    assert done.returncode == 2
    assert f"--require-network: {problem}" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()


OVER_NODES = """
import os, time
name = "Socket" if os.environ["RANK"] == "1" else "IB"
while name == "Socket" and not os.path.exists("said"):
    time.sleep(0.01)
print("h:1:1 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB ; OOB eth0:10.0.0.1<0>", flush=True)
if name == "Socket":
    print("h:1:1 [0] NCCL INFO NET/IB : No device found.", flush=True)
print(f"h:1:1 [0] NCCL INFO Using network {name}", flush=True)
open("said", "w").close()
time.sleep(600)
"""


@pytest.mark.parametrize(
    "restart", ["in-process", pytest.param("process", marks=pytest.mark.extended)]
)
@pytest.mark.extended
def test_one_node_on_another_network_ends_the_job_on_all(
    background: Callable[..., Background],
    script: Callable[[str], Path],
    tmp_path: Path,
    restart: str,
) -> None:
    path, port = script(OVER_NODES), free_port()
    agents = [
        background(
            *("launch", "--profile", "local-cpu", "--run-dir", f"node-{number}"),
            *("--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", "1"),
            *("--master-addr", "127.0.0.1", "--master-port", str(port)),
            *("--require-network", "ib", "--restart", restart, path),
        )
        for number in range(2)
    ]
    for agent in agents:
        assert agent.wait(LIMIT_S) == 3
    for number in range(2):
        verdict = Run(tmp_path / f"node-{number}").verdict
        assert "--require-network: this job was meant for ib" in verdict["reason"]
        assert "NET/IB : No device found." in verdict["reason"]
        assert sorted(use["name"] for use in verdict["networks"]) == ["IB", "Socket"]
