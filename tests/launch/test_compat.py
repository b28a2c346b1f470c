"""A script written for NVIDIA's wrapper runs without a change, as Megatron-LM calls it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import LIMIT_S, CompletedText, clean_environ, free_port
from tests.launch.conftest import Run

SHAPE = Path(__file__).with_name("megatron_shape.py")
NESTED = "[NestedRestarter] name=[InProcess] state="


@pytest.mark.slow
def test_launch_serves_the_name_and_the_reserve_of_a_tree_takes_over(
    ncclops: Callable[..., CompletedText], only_run: Callable[[], Run]
) -> None:
    done = ncclops(
        "launch", "--compat", "nvrx", "--profile", "local-cpu", "--nproc-per-node", "3",
        # The script has stores at the two ports behind it: none that the kernel gives others.
        "--master-port", str(free_port()),
        SHAPE, "--fault", "kill",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = only_run()
    assert run.verdict["ranks_lost"] == [1]
    assert {event["wrapper"] for event in run.named("own-wrapper")} == {"ncclops.restart"}
    (restart,) = run.named("restart")
    assert restart["ranks_lost"] == [1]
    for rank in (0, 2):
        lines = run.stdout(rank).splitlines()
        assert f"checkpoint worker of rank {rank} reset" in lines
        assert f"iteration 1: rank {rank // 2} of 2 trained 6 steps" in lines
    states = [line.partition(NESTED)[2] for line in run.stderr(0).splitlines() if NESTED in line]
    assert states == [
        "initialize",
        "handling stage=starting",
        "handling stage=completed",
        "finalized",
    ]


@pytest.mark.slow
@pytest.mark.extended
def test_under_torchrun_a_fault_restarts_all_ranks(tmp_path: Path) -> None:
    """The store's port is none that torchrun's agent serves."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    where = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    done = subprocess.run(
        [*torchrun, *where, "-m", "ncclops.compat", SHAPE, "--fault", "raise"],
        cwd=tmp_path,
        env=clean_environ({"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert f"iteration 1: rank {rank} of 2 trained 6 steps" in done.stdout


@pytest.mark.slow
def test_it_is_refused_where_the_real_one_is_in_use_already(tmp_path: Path) -> None:
    """As where a site's start-up file imports it."""
    real = tmp_path / "nvidia_resiliency_ext" / "inprocess"
    real.mkdir(parents=True)
    (real / "__init__.py").touch()
    code = (
        "import nvidia_resiliency_ext.inprocess, runpy;"
        "runpy.run_module('ncclops.compat', run_name='__main__')"
    )
    env = clean_environ()
    env["PYTHONPATH"] += f":{tmp_path}"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr == (
        f"ncclops: error: nvidia_resiliency_ext.inprocess has been imported from"
        f" {real / '__init__.py'}: ask for ncclops's before that, or not at all\n"
    )


@pytest.mark.slow
def test_a_module_runs_under_it_with_its_own_arguments(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import sys\n"
        "from nvidia_resiliency_ext.inprocess import Compose\n"
        "print(__name__, sys.argv[1:], Compose.__module__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "ncclops.compat", "-m", "script", "--flag", "1"],
        cwd=tmp_path,
        env=clean_environ(),
        capture_output=True,
        text=True,
    )
    assert done.stdout == "__main__ ['--flag', '1'] ncclops.restart.compose\n", done.stderr
    done = subprocess.run(
        [sys.executable, "-m", "ncclops.compat"],
        env=clean_environ(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("usage: python -m ncclops.compat ")
    done = subprocess.run(
        [sys.executable, "-m", "ncclops.compat", "no-such.py"],
        cwd=tmp_path,
        env=clean_environ(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr == "ncclops.compat: script no-such.py does not exist: check the path\n"


def test_an_unknown_value_is_one_line(
    starts_processes: None, ncclops_in_process: Callable[..., CompletedText]
) -> None:
    launch = ("launch", "--profile", "local-cpu", "--dry-run")
    done = ncclops_in_process(*launch, "--compat", "nvxr", SHAPE)
    assert (done.returncode, done.stderr) == (
        2,
        "ncclops: error: --compat nvxr: choose off or nvrx; did you mean nvrx?\n",
    )
    done = ncclops_in_process(*launch, "--set", "NCCLOPS_COMPAT=x", SHAPE)
    assert done.returncode == 2
    assert "NCCLOPS_COMPAT=x: only nvrx is known" in done.stderr
    done = ncclops_in_process(*launch, "--compat", "nvrx", SHAPE)
    assert done.returncode == 0
    assert "NCCLOPS_COMPAT" in done.stdout
