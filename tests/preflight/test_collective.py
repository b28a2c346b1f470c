"""An all_reduce between the GPUs of a node: on fake GPUs, whole; and what is made of it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ncclops.preflight.checks.collective import bus_bandwidth
from ncclops.preflight.machine.collective import measure, why_not
from ncclops.preflight.model import Finding
from ncclops.preflight.node import judge
from ncclops.preflight.readings import Collective, Gpu
from tests.cluster.hosts import hosts
from tests.cluster.hosts import why_not as why_not_hosts
from tests.conftest import clean_environ, run_ncclops
from tests.fakegpu.host import Host
from tests.fakegpu.place import Place
from tests.preflight.defects import DIAGNOSED
from tests.preflight.machines import KINDS, make

CHECKS = ("gpu.all-reduce", "gpu.bandwidth", "gpu.nccl-diagnostics")


def said(found: Collective | None, name: str = "NVIDIA H200") -> dict[str, Finding]:
    machine = make(KINDS.index("hgx-ib"))
    for gpu in machine.gpus:
        gpu["name"] = name
    machine.collective = found
    return {each.check: each for each in judge(machine.node()) if each.check in CHECKS}


def status(**found: Finding) -> dict[str, str]:
    return {check: str(each.status) for check, each in found.items()}


def test_bus_bandwidth_is_counted_as_nccl_tests_do() -> None:
    """Their README: algorithm bandwidth times 2 (n - 1) / n."""
    assert bus_bandwidth(8 * 10**9, 0.04, 8) == pytest.approx(350)
    assert bus_bandwidth(10**9, 0.1, 2) == pytest.approx(10)


@pytest.mark.parametrize(
    ("name", "gpus", "seconds", "wanted"),
    [
        ("NVIDIA H200", 8, 0.018, "OK"),
        ("NVIDIA H200", 8, 0.025, "WARN"),
        ("NVIDIA H200", 8, 0.050, "FAIL"),
        ("NVIDIA GH200 480GB", 8, 9.0, "CANNOT-TELL"),
        ("NVIDIA H200 NVL", 8, 9.0, "CANNOT-TELL"),
        ("NVIDIA H200", 4, 9.0, "CANNOT-TELL"),
        ("NVIDIA GB200", 4, 0.016, "OK"),
    ],
)
def test_the_table_goes_by_model_and_number(
    name: str, gpus: int, seconds: float, wanted: str
) -> None:
    found = said(Collective(gpus=gpus, bytes=4 << 30, seconds=seconds), name)
    assert found["gpu.bandwidth"].status == wanted


def test_nothing_is_said_of_what_was_not_asked_for_and_what_is_unknown_convicts_nobody() -> None:
    assert said(None) == {}
    assert status(**said(Collective(gpus=8, unknown="somebody uses the GPUs"))) == {
        "gpu.all-reduce": "CANNOT-TELL"
    }


@pytest.mark.parametrize(
    ("lines", "wanted"),
    [
        (DIAGNOSED, "OK"),
        (("=== NCCL Diagnostics ===",), "CANNOT-TELL"),
        (("[INFO] p2p: only 52/56 GPU-to-GPU peer accesses passed verification",), "FAIL"),
        ((*DIAGNOSED, "[INFO] net bw: test unable to complete in allocated time"), "WARN"),
    ],
)
def test_nccls_own_diagnostics_are_read(lines: tuple[str, ...], wanted: str) -> None:
    found = said(Collective(gpus=8, bytes=4 << 30, seconds=0.018, diagnostics=lines))
    assert found["gpu.nccl-diagnostics"].status == wanted


def test_gpus_in_use_are_left_alone() -> None:
    idle = Gpu(index=0, name="NVIDIA H200", processes=())
    assert why_not((idle, idle)) is None
    for other in (
        Gpu(index=1, processes=(77,)),
        Gpu(index=1, mig=True),
        Gpu(index=1, lost="it does not answer"),
    ):
        assert why_not((idle, other)) is not None
    assert measure((idle,), {}).unknown == "it takes two GPUs"


@pytest.fixture
def check(fake_gpu_place: Place, host: Host, tmp_path: Path) -> Any:
    """``check(*options)``: the findings of ``preflight --collectives`` on two fake GPUs."""

    def run(*options: str) -> dict[str, dict[str, Any]]:
        done = run_ncclops(
            tmp_path,
            *("preflight", "--collectives", "--json", "--window=50ms", *options),
            env=host.environment | {"CUDA_VISIBLE_DEVICES": "0,1"},
            python=fake_gpu_place.python,
            limit_s=300,
        )
        assert done.returncode in (0, 3), done.stderr
        (node,) = json.loads(done.stdout)["hosts"]
        return {each["check"]: each for each in node["findings"] if each["check"] in CHECKS}

    return run


@pytest.mark.slow
@pytest.mark.timeout(320)
def test_an_all_reduce_runs_on_fake_gpus_and_what_hinders_it_is_told(
    check: Any, host: Host
) -> None:
    found = check()
    assert found["gpu.all-reduce"]["status"] == "OK", found
    assert found["gpu.all-reduce"]["read"] == "right sums over 2 GPUs"
    # What a fake GPU moves means nothing, and two are no board that the table knows.
    assert found["gpu.bandwidth"]["status"] == "CANNOT-TELL"
    assert "over 2 GPUs" in found["gpu.bandwidth"]["read"]
    assert found["gpu.nccl-diagnostics"]["status"] == "CANNOT-TELL"
    host.set("ncclAllReduce rank=1 error=ncclSystemError")
    found = check()
    assert found["gpu.all-reduce"]["status"] == "FAIL"
    assert "NCCL error" in found["gpu.all-reduce"]["read"]


@pytest.mark.slow
@pytest.mark.timeout(320)
@pytest.mark.extended
def test_an_all_reduce_that_hangs_is_ended_at_its_deadline(
    fake_gpu_place: Place, host: Host, tmp_path: Path
) -> None:
    program = tmp_path / "measure.py"
    program.write_text(
        "from datetime import timedelta\n"
        "from ncclops.preflight.machine.collective import measure\n"
        "from ncclops.preflight.readings import Gpu\n"
        "gpus = [Gpu(index=0, processes=()), Gpu(index=1, processes=())]\n"
        "print(measure(gpus, {}, timedelta(seconds=25)).problem)\n"
    )
    host.set("ncclAllReduce rank=1 hang=forever")
    done = subprocess.run(
        [fake_gpu_place.python, program],
        env=clean_environ(host.environment),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout == "no end within 25 s\n", done.stderr


@pytest.mark.slow
@pytest.mark.timeout(320)
@pytest.mark.skipif(why_not_hosts() is not None, reason=str(why_not_hosts()))
@pytest.mark.extended
def test_two_hosts_reduce_together_once_their_edges_work(
    fake_gpu_place: Place, host: Host, tmp_path: Path
) -> None:
    with hosts(2, tmp_path) as made:
        meet = ["--nnodes", "2", "--rdzv-endpoint", f"{made.address('h0')}:29400"]
        skip = [f"--skip={name}" for name in ("host.shm", "host.space", "host.pids", "host.name")]
        command = [str(fake_gpu_place.python), "-m", "ncclops", "preflight", "--collectives"]
        started = [
            made.run(
                name,
                *(*command, "--json", "--window=50ms", *skip, *meet),
                env=host.environment | {"CUDA_VISIBLE_DEVICES": "0,1", "NCCL_HOSTID": name},
            )
            for name in ("h0", "h1")
        ]
        codes = [process.wait(300) for process in started]
        outputs = [made.output(name) for name in ("h0", "h1")]
    print(*outputs, sep="\n")
    assert codes == [0, 0]
    for output in outputs:
        edges = json.loads(output[output.index("{\n") :])["edges"]
        (pair,) = edges["pairs"]
        assert (pair["a"], pair["b"], pair["well"]) == (0, 1, True)
        assert pair["gbps"] > 0, "what a fake GPU moves means nothing"
        assert [host["offer"]["ranks"] for host in edges["hosts"]] == [2, 2]
