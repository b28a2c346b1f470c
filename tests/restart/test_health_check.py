"""Health checks: what takes a rank out, what does not, and what could not be checked."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path, PurePath

import pytest

from ncclops.host.nvml import Recovery, visible_device
from ncclops.restart import health_check
from ncclops.restart._devices import (
    Finding,
    Health,
    Port,
    judge_gpu,
    judge_links,
    judge_ports,
    nearest,
)
from ncclops.restart.compose import Compose
from ncclops.restart.exception import HealthCheckError, RestartError
from ncclops.restart.exception import TimeoutError as RestartTimeoutError
from ncclops.restart.health_check import (
    ChainedGPUHealthCheck,
    ChainedNicHealthCheck,
    ChainedNVLHealthCheck,
    CudaHealthCheck,
    FaultCounter,
    FaultCounterExceeded,
    HealthCheck,
)
from ncclops.restart.state import FrozenState, State


def state(iteration: int = 0, fault: BaseException | None = None) -> FrozenState:
    return State(rank=0, world_size=2, iteration=iteration, fn_exception=fault).freeze()


FAULT = ValueError("loss is NaN")
HOST = socket.gethostname()
GPU_0 = f"GPU 0 (GPU-stub-0, PCI 0000:1a:00.0) on {HOST}"


# --- faults ---------------------------------------------------------------------------------


def test_the_fault_counter_allows_so_many_faults_of_this_rank() -> None:
    counter = FaultCounter(max_rank_faults=2)
    for iteration in range(2):
        assert counter(state(iteration, FAULT)).fn_exception is FAULT
    with pytest.raises(FaultCounterExceeded, match=r"3 times.*=2.*loss is NaN") as caught:
        counter(state(2, FAULT))
    assert caught.value.__cause__ is FAULT
    assert isinstance(caught.value, RestartError)


def test_faults_of_other_ranks_do_not_count() -> None:
    counter = FaultCounter(max_rank_faults=0)
    for iteration in range(5):
        counter(state(iteration))
    with pytest.raises(FaultCounterExceeded):
        counter(state(5, FAULT))


def test_without_a_limit_faults_are_only_counted() -> None:
    counter = FaultCounter()
    for iteration in range(100):
        counter(state(iteration, FAULT))
    assert counter.faults == 100


def test_the_next_call_of_the_function_starts_counting_anew() -> None:
    counter = FaultCounter(max_rank_faults=1)
    for _ in range(3):
        counter(state(0))
        counter(state(0, FAULT))


def test_health_checks_compose() -> None:
    both = Compose(FaultCounter(0), CudaHealthCheck())
    assert isinstance(both, HealthCheck)
    assert both(state()) == state()


# --- judgements -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reading", "health", "evidence"),
    [
        (Recovery(0, False), Health.HEALTHY, "no recovery"),
        (Recovery(0, None), Health.HEALTHY, "no recovery"),
        (Recovery(None, False), Health.HEALTHY, "no recovery"),
        (Recovery(None, None), Health.NOT_CHECKED, "no recovery state"),
        (Recovery(1, False), Health.UNHEALTHY, "GPU reset"),
        (Recovery(2, None), Health.UNHEALTHY, "node reboot"),
        (Recovery(99, None), Health.UNHEALTHY, "action 99"),
        (Recovery(0, True), Health.UNHEALTHY, "row"),
    ],
)
def test_the_gpu_is_judged_by_what_the_driver_asks_for(
    reading: Recovery, health: Health, evidence: str
) -> None:
    finding = judge_gpu(reading)
    assert finding.health is health
    assert evidence in finding.detail


@pytest.mark.parametrize(
    ("before", "now", "health"),
    [
        ({0: True, 1: True}, {0: True, 1: True}, Health.HEALTHY),
        ({0: True, 1: False}, {0: True, 1: False}, Health.HEALTHY),  # never was connected
        ({0: True, 1: False}, {0: True, 1: True}, Health.HEALTHY),
        ({0: True, 1: True}, {0: True, 1: False}, Health.UNHEALTHY),
        ({0: True, 1: True}, {0: True}, Health.UNHEALTHY),
        ({0: False}, {0: False}, Health.NOT_CHECKED),
        ({}, {}, Health.NOT_CHECKED),
        (None, {0: True}, Health.NOT_CHECKED),
        ({0: True}, None, Health.NOT_CHECKED),
    ],
)
def test_links_are_compared_with_those_of_the_start(
    before: dict[int, bool] | None, now: dict[int, bool] | None, health: Health
) -> None:
    assert judge_links(before, now).health is health


@pytest.mark.parametrize(
    ("before", "now", "health", "evidence"),
    [
        ({"a/1": Port(True, 0)}, {"a/1": Port(True, 0)}, Health.HEALTHY, "as at the start"),
        ({"a/1": Port(True, 0)}, {"a/1": Port(True, 2)}, Health.HEALTHY, "are back"),
        ({"a/1": Port(True)}, {"a/1": Port(True)}, Health.HEALTHY, "as at the start"),
        ({"a/1": Port(True, 0)}, {"a/1": Port(False, 1)}, Health.UNHEALTHY, "a/1"),
        ({"a/1": Port(True, 0)}, {}, Health.UNHEALTHY, "a/1"),
        ({"a/1": Port(False, 0)}, {"a/1": Port(False, 0)}, Health.NOT_CHECKED, "no NIC port"),
        (None, {}, Health.NOT_CHECKED, "not known"),
    ],
)
def test_ports_are_compared_with_those_of_the_start(
    before: dict[str, Port] | None, now: dict[str, Port], health: Health, evidence: str
) -> None:
    finding = judge_ports(before, now)
    assert finding.health is health
    assert evidence in finding.detail


def test_the_nearest_nic_shares_most_of_the_pci_tree() -> None:
    gpu = PurePath("/sys/devices/pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0/0000:18:00.0")
    switch_mate = PurePath("/sys/devices/pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:01.0/0000:19:00.0")  # fmt: skip # noqa: E501
    same_root = PurePath("/sys/devices/pci0000:15/0000:15:05.0/0000:1f:00.0")
    elsewhere = PurePath("/sys/devices/pci0000:e5/0000:e5:01.0/0000:e6:00.0")
    nics = {"mlx5_0": elsewhere, "mlx5_1": same_root, "mlx5_2": switch_mate}
    assert nearest(gpu, nics) == ["mlx5_2"]
    assert nearest(gpu, {"mlx5_1": same_root, "mlx5_3": same_root}) == ["mlx5_1", "mlx5_3"]
    assert nearest(gpu, {"mlx5_0": elsewhere}) == []
    assert nearest(gpu, {}) == []


@pytest.mark.parametrize(
    ("index", "visible", "expected"),
    [
        (3, None, 3),
        (1, "4,5,6", 5),
        (1, "GPU-aa, GPU-bb", "GPU-bb"),
        (0, "MIG-cc", "MIG-cc"),
        (5, "2", 2),  # one GPU bound to each rank
        (1, "0,-1", None),
        (7, "0,1", None),
        (0, "", None),
    ],
)
def test_nvml_counts_the_gpus_that_cuda_hides(
    index: int, visible: str | None, expected: int | str | None
) -> None:
    assert visible_device(index, visible) == expected


# --- a machine without ------------------------------------------------------------------------


@pytest.fixture
def no_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without driver: the library is not found."""
    pynvml = pytest.importorskip("pynvml")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        monkeypatch.setenv("LOCAL_RANK", "0")
    else:
        pynvml.nvmlShutdown()
        pytest.skip("this machine has NVML")


@pytest.mark.usefixtures("no_nvml")
@pytest.mark.parametrize(
    "check", [ChainedGPUHealthCheck, ChainedNVLHealthCheck, ChainedNicHealthCheck]
)
def test_a_machine_without_nvml_keeps_its_ranks(check: Callable[[], HealthCheck]) -> None:
    instance = check()
    assert instance(state()) == state()
    last = instance.last  # type: ignore[attr-defined]
    assert last.health is Health.NOT_CHECKED
    assert last.detail


@pytest.mark.parametrize("check", [ChainedGPUHealthCheck, ChainedNVLHealthCheck])
def test_a_rank_without_a_gpu_of_its_own_keeps_going(
    check: Callable[[], HealthCheck], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    instance = check()
    instance(state())
    assert instance.last.health is Health.NOT_CHECKED  # type: ignore[attr-defined]


def test_a_process_without_a_cuda_context_has_nothing_to_check() -> None:
    check = CudaHealthCheck()
    check(state())
    assert check.last == Finding(Health.NOT_CHECKED, "this process has no CUDA context")


class Reporting(health_check._DeviceCheck):
    """A device check with a scripted finding."""

    name = "scripted"

    def __init__(self, check: Callable[[], Finding], timeout: timedelta) -> None:
        super().__init__(timeout)
        self.check = check  # type: ignore[method-assign]

    def check(self) -> Finding:
        raise NotImplementedError


def test_a_check_that_hangs_in_the_driver_fails_with_its_deadline() -> None:
    release = threading.Event()

    def hang() -> Finding:
        release.wait(60)
        return Finding(Health.HEALTHY, "")

    try:
        with pytest.raises(RestartTimeoutError, match=r"scripted health check .*0\.05 s"):
            Reporting(hang, timedelta(milliseconds=50))(state())
    finally:
        release.set()


def test_what_was_not_checked_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    check = Reporting(lambda: Finding(Health.NOT_CHECKED, "no eyes"), timedelta(seconds=30))
    with caplog.at_level("DEBUG", logger="ncclops.restart"):
        check(state())
        check(state(1))
    assert [record.message for record in caplog.records if record.levelname == "DEBUG"] == [
        "scripted health check: not checked: no eyes"
    ]


# --- a machine with NVML: the library is played by a stub -------------------------------------


@pytest.fixture
def nvml(nvml_stub: Path) -> Path:
    return nvml_stub


def findings(nvml: Path, script: str, sysfs: Path = Path("/nowhere"), /, **env: str) -> list[str]:
    """Run ``script`` where the stub is NVML. It calls ``report(check)`` and changes ``os.environ``.

    A separate process, because a process loads the library once.
    """
    prologue = """
        import json, os, sys
        from datetime import timedelta
        from pathlib import Path
        import ctypes
        from ncclops.restart.health_check import *
        from ncclops.restart.state import State

        frozen = State(0, 1).freeze()
        out = []
        def report(check):
            try:
                check(frozen)
                out.append(check.last.health.value + ": " + check.last.detail)
            except Exception as error:
                out.append(type(error).__name__ + ": " + str(error))
        sysfs = Path(sys.argv[1])
    """
    epilogue = "print(json.dumps(out), flush=True); os._exit(0)"  # a stuck call is left behind
    program = "\n".join([textwrap.dedent(prologue), textwrap.dedent(script), epilogue])
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("CUDA_", "LOCAL_"))}
    run = subprocess.run(
        [sys.executable, "-c", program, str(sysfs)],
        env={**inherited, "LD_LIBRARY_PATH": str(nvml), "LOCAL_RANK": "0", **env},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    result: list[str] = json.loads(run.stdout)
    return result


@pytest.mark.slow
def test_the_gpus_recovery_action_is_asked_for_at_every_check(nvml: Path) -> None:
    """The check is made when the job starts and must see what happened since."""
    before, after = findings(
        nvml,
        """
        check = ChainedGPUHealthCheck()
        report(check)
        os.environ["NVML_STUB_RECOVERY"] = "1"
        report(check)
        """,
        NVML_STUB_RECOVERY="0",
        NVML_STUB_REMAP="0",
    )
    assert before.startswith("healthy:")
    assert after == f"GpuUnusable: {GPU_0}: the driver asks for recovery of the GPU: GPU reset"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"NVML_STUB_INIT": "9"}, "not checked: NVML is not available: Driver Not Loaded"),
        (
            {"NVML_STUB_LOST": "15"},
            f"GpuUnusable: GPU 0 on {HOST}: the GPU does not answer: GPU is l",
        ),
        ({"NVML_STUB_LOST": "4"}, "not checked: NVML does not know GPU 0: Insufficient Perm"),
        ({}, "not checked: this driver reports no recovery state"),
        ({"NVML_STUB_REMAP": "1"}, f"GpuUnusable: {GPU_0}: a GPU memory row"),
        ({"NVML_STUB_REMAP": "0"}, "healthy: "),
        ({"LOCAL_RANK": "9"}, "not checked: NVML does not know GPU 9"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-stub-2", "NVML_STUB_RECOVERY": "0"}, "healthy: "),
        ({"CUDA_VISIBLE_DEVICES": "GPU-gone"}, "not checked: NVML does not know GPU GPU-gone"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "not checked: this rank has no GPU of its own"),
    ],
)
def test_what_nvml_answers_and_what_becomes_of_it(
    nvml: Path, env: dict[str, str], expected: str
) -> None:
    (found,) = findings(nvml, "report(ChainedGPUHealthCheck())", **env)
    assert found.startswith(expected)


@pytest.mark.slow
def test_a_query_that_hangs_ends_with_the_deadline(nvml: Path) -> None:
    (found,) = findings(
        nvml,
        """
        check = ChainedGPUHealthCheck()
        check.timeout = timedelta(milliseconds=100)
        report(check)
        """,
        NVML_STUB_HANG="1",
    )
    assert found.startswith("TimeoutError: GPU health check took longer than 0.1 s")


@pytest.mark.slow
def test_a_link_that_went_down_since_the_start_is_found(nvml: Path) -> None:
    same, down = findings(
        nvml,
        """
        check = ChainedNVLHealthCheck()
        report(check)
        os.environ["NVML_STUB_LINKS"] = "10-1"
        report(check)
        """,
        NVML_STUB_LINKS="11-1",
    )
    assert same == "healthy: 3 NVLinks are active, as at the start"
    assert down == "HealthCheckError: NVLink: NVLinks [1] were active at the start, and are down"


@pytest.mark.slow
def test_a_gpu_without_links_has_none_to_lose(nvml: Path) -> None:
    (found,) = findings(nvml, "report(ChainedNVLHealthCheck())")
    assert found == "not checked: no NVLink was active at the start"


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """GPUs 1a and 2a (0 and 1 to NVML), each with a NIC behind the same PCI switch."""
    for index, bus in enumerate(("1a", "2a")):
        switch = tmp_path / f"devices/pci0000:{bus[0]}0/0000:{bus[0]}1:00.0"
        gpu, nic = switch / f"0000:{bus}:00.0", switch / f"0000:{bus[0]}b:00.0"
        port = nic / f"infiniband/mlx5_{index}/ports/1"
        (port / "counters").mkdir(parents=True)
        gpu.mkdir()
        (port / "state").write_text("4: ACTIVE\n")
        (port / "counters/link_downed").write_text("0\n")
        (nic / f"infiniband/mlx5_{index}/device").symlink_to(nic)
        for link, target in (
            (f"bus/pci/devices/{gpu.name}", gpu),
            (f"class/infiniband/mlx5_{index}", nic / f"infiniband/mlx5_{index}"),
        ):
            (tmp_path / link).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / link).symlink_to(target)
    return tmp_path


@pytest.mark.slow
def test_only_the_nic_of_this_ranks_gpu_matters(nvml: Path, sysfs: Path) -> None:
    found = findings(
        nvml,
        """
        check = ChainedNicHealthCheck(sysfs=sysfs)
        report(check)
        def state_of(nic, text):
            (sysfs / f"class/infiniband/mlx5_{nic}/ports/1/state").write_text(text)
        state_of(0, "1: DOWN")
        report(check)
        state_of(1, "1: DOWN")
        report(check)
        state_of(1, "4: ACTIVE")
        (sysfs / "class/infiniband/mlx5_1/ports/1/counters/link_downed").write_text("1")
        report(check)
        """,
        sysfs,
        LOCAL_RANK="1",
    )
    assert found == [
        "healthy: NIC ports ['mlx5_1/1'] are active, as at the start",
        "healthy: NIC ports ['mlx5_1/1'] are active, as at the start",
        "HealthCheckError: NIC: NIC ports ['mlx5_1/1'] were active at the start, and are down",
        "healthy: NIC ports ['mlx5_1/1'] went down meanwhile, and are back",
    ]


@pytest.mark.slow
def test_a_node_without_rdma_devices_is_not_checked(nvml: Path, tmp_path: Path) -> None:
    (found,) = findings(nvml, "report(ChainedNicHealthCheck(sysfs=sysfs))", tmp_path)
    assert found == "not checked: no NIC port near this GPU was active at the start"


def test_errors_of_device_checks_are_health_check_errors() -> None:
    check = Reporting(lambda: Finding(Health.UNHEALTHY, "smoke"), timedelta(seconds=30))
    with pytest.raises(HealthCheckError, match="scripted: smoke"):
        check(state())
