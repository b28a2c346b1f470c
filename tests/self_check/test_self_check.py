"""``ncclops self-check`` says what works here, and what does not."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ncclops.host.gpus import Gpus
from ncclops.preflight.model import Status
from ncclops.self_check import checks, job
from ncclops.self_check.node import own_checks
from tests.conftest import CompletedText, clean_environ

KNOWN = own_checks()


def test_the_interpreter_and_torch_are_new_enough() -> None:
    (python,) = checks.python(KNOWN["self.python"])
    (torch,) = checks.torch(KNOWN["self.torch"])
    assert (python.status, torch.status) == (Status.OK, Status.OK)
    assert sys.executable in python.read


@pytest.mark.parametrize(
    ("gpus", "says"),
    [
        (Gpus(), Status.CANNOT_TELL),
        (Gpus(("H100", "H100"), "580.1"), Status.OK),
        (Gpus(("GPU",), remark="1 GPU by the driver's files: NVML: not found"), Status.WARN),
    ],
)
def test_gpus(gpus: Gpus, says: Status) -> None:
    (found,) = checks.gpus(KNOWN["self.gpus"], gpus)
    assert found.status is says
    assert bool(found.remedy) == (says is Status.WARN)


def test_gpus_without_nccl_fail_and_no_gpus_do_not(tmp_path: Path) -> None:
    # A library of unknown version: what there is to be found of NCCL does not depend on torch's.
    (tmp_path / "libnccl.so.2").touch()
    environ = {"LD_LIBRARY_PATH": str(tmp_path)}
    (found,) = checks.nccl(KNOWN["self.nccl"], Gpus(("H100",)), environ)
    assert found.status is Status.FAIL
    (found,) = checks.nccl(KNOWN["self.nccl"], Gpus(), environ)
    assert found.status is Status.CANNOT_TELL


def test_a_run_directory_that_is_not_there_yet_is_judged_by_what_is_above(tmp_path: Path) -> None:
    (found,) = checks.run_dir(KNOWN["self.run-dir"], tmp_path / "a" / "runs")
    assert (found.status, found.subject) == (Status.OK, str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_run_directory_that_cannot_be_written() -> None:
    (found,) = checks.run_dir(KNOWN["self.run-dir"], Path("/proc/ncclops"))
    assert (found.status, found.subject) == (Status.FAIL, "/proc")
    assert "--log-dir" in found.remedy


def test_the_network_of_this_machine() -> None:
    (interfaces,) = checks.interfaces(KNOWN["self.interfaces"])
    (ports,) = checks.ports(KNOWN["self.ports"])
    assert (interfaces.status, ports.status) == (Status.OK, Status.OK)
    assert "127.0.0.1" in interfaces.read


@pytest.mark.slow
def test_a_machine_whose_loopback_is_down() -> None:
    unshare = ["unshare", "--map-root-user", "--net"]
    if shutil.which("unshare") is None or subprocess.run([*unshare, "true"]).returncode:
        pytest.skip("no network namespaces here")
    done = subprocess.run(
        [*unshare, sys.executable, "-m", "ncclops", "self-check", "--log-dir", "/tmp"],
        env=clean_environ(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 3, done.stderr
    rows = {
        check: status
        for status, check in re.findall(r"^([A-Z-]+) +(self.[a-z-]+)", done.stdout, re.MULTILINE)
    }
    assert (rows["self.interfaces"], rows["self.ports"]) == ("FAIL", "FAIL")
    assert (rows["self.restart"], rows["self.python"]) == ("CANNOT-TELL", "OK")
    assert "-> ip link set lo up" in done.stdout


@pytest.mark.slow
def test_a_job_that_cannot_start_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    environ = clean_environ({"PYTHON_EXEC": "/nowhere/python"})
    (found,) = job.restarts(KNOWN["self.restart"], environ)
    assert found.status is Status.FAIL
    assert "PYTHON_EXEC=/nowhere/python is not a program" in found.read
    assert str(tmp_path) in found.read, "what is kept is named"


def test_everything_that_works_here_is_said(
    ncclops: Callable[..., CompletedText], tmp_path: Path
) -> None:
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    # As a step of Slurm on two nodes has it: this is about this machine alone.
    slurm = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_NODEID": "0"}
    # A site that is told of all jobs, by a channel whose secret is not here.
    told = tmp_path / "told.jsonl"
    base = tmp_path / "config" / "ncclops" / "profiles" / "base.toml"
    base.parent.mkdir(parents=True)
    base.write_text(
        'extends = "base"\ndescription = "d"\n'
        '[notify.to.ops]\nkind = "json"\nurl_env = "NO_SUCH_URL"\n'
        f'[notify.to.duty]\nkind = "command"\ncommand = ["tee", "-a", "{told}"]\nheartbeat = "1s"\n'
    )
    site = {"XDG_CONFIG_HOME": str(tmp_path / "config")}
    environ = {"TMPDIR": str(scratch), **slurm, **site}
    done = ncclops("self-check", "--json", "--no-exit-code", env=environ)
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert document["schema"] == "ncclops.self-check/1"
    found = {each["check"]: each for each in document["findings"]}
    assert set(KNOWN) < set(found)
    assert (found["self.restart"]["status"], found["self.restart"]["remedy"]) == ("OK", "")
    assert not told.exists(), "nobody is paged for a fault that is meant"
    assert "host.shm" in found, "preflight's checks are part of it"
    assert document["status"] == max(
        (each["status"] for each in found.values()), key=list(Status).index
    )
    assert not list(scratch.iterdir()), "nothing is left"
