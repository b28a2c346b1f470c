"""`srun ncclops launch` under a real Slurm: its daemons on this machine, as two nodes."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.conftest import LIMIT_S, clean_environ, free_port

_TOOLS = ("slurmctld", "slurmd", "srun", "sinfo", "munged", "mungekey", "unshare")
_MISSING = [tool for tool in _TOOLS if shutil.which(tool) is None]
NODES = ("gpu08", "gpu09")
LAUNCH = [sys.executable, "-m", "ncclops", "launch"]
pytestmark = [
    pytest.mark.skipif(bool(_MISSING), reason=f"needs Slurm: no {' '.join(_MISSING)}"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, as Slurm's daemons do"),
    pytest.mark.slow,
]

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}
SlurmctldPort={controller}
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
NodeName=gpu08 NodeAddr=127.0.0.1 NodeHostname={host} Port={first} State=UNKNOWN
NodeName=gpu09 NodeAddr=127.0.0.1 NodeHostname={host} Port={second} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Mapping[str, str]]:
    """The environment in which `srun` finds a cluster of two nodes, both this machine."""
    names = ("host", "controller", "first", "second", "directory")
    values = (socket.gethostname(), *(free_port() for _ in range(3)), tmp_path)
    configuration = tmp_path / "slurm.conf"
    configuration.write_text(CONFIGURATION.format(**dict(zip(names, values, strict=True))))
    (tmp_path / "state").mkdir()
    # The names of the nodes are known to what runs on them, and to no other host here.
    (tmp_path / "hosts").write_text(Path("/etc/hosts").read_text() + "127.0.0.1 gpu08 gpu09\n")
    known = f'mount --bind {tmp_path}/hosts /etc/hosts && exec "$@"'
    environ = clean_environ({"SLURM_CONF": str(configuration)})
    daemons = [
        ["munged", "-F", "--force", f"--socket={tmp_path}/munge.socket", *_munge(tmp_path)],
        ["slurmctld", "-D"],
        *(["unshare", "-m", "sh", "-c", known, "sh", "slurmd", "-D", "-N", n] for n in NODES),
    ]
    subprocess.run(["mungekey", "-c", "-k", tmp_path / "munge.key"], check=True)
    started = []
    with (tmp_path / "daemons.log").open("wb") as log:
        for daemon in daemons:
            started.append(subprocess.Popen(daemon, env=environ, stdout=log, stderr=log))
        try:
            _wait_until_idle(environ, tmp_path / "daemons.log")
            yield environ
        finally:
            for process in reversed(started):
                process.terminate()
            for process in started:
                process.wait(LIMIT_S)


def _munge(directory: Path) -> list[str]:
    files = {"key-file": "munge.key", "pid-file": "munge.pid", "seed-file": "munge.seed"}
    files |= {"log-file": "munge.log"}
    return [f"--{option}={directory}/{name}" for option, name in files.items()]


def _wait_until_idle(environ: Mapping[str, str], log: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while True:
        asked = subprocess.run(
            ["sinfo", "-h", "-o", "%T %D"], env=environ, capture_output=True, text=True
        )
        if asked.stdout.strip() == "idle 2":
            return
        if time.monotonic() > deadline:
            pytest.fail(f"Slurm did not come up: {asked.stdout} {asked.stderr} {log.read_text()}")
        time.sleep(0.5)  # the daemons do not announce when they are ready


def test_srun_alone_gives_everything(slurm: Mapping[str, str], tmp_path: Path) -> None:
    """Number of nodes, rank, place to meet; and Slurm's own variables reach the workers."""
    worker = 'echo "rank $RANK of $WORLD_SIZE on $GROUP_WORLD_SIZE, $SLURM_CONF"'
    launch = [*LAUNCH, "--nproc-per-node", "2", "--tee", "3"]
    done = subprocess.run(
        ["srun", "-N2", "--ntasks-per-node=1", *launch, "--no-python", "sh", "-c", worker],
        cwd=tmp_path,
        env=slurm,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    for rank in range(4):
        assert f"rank {rank} of 4 on 2, {tmp_path}/slurm.conf" in done.stdout
    assert "2 nodes, this is node 1" in done.stderr


def test_a_task_per_gpu_is_refused(slurm: Mapping[str, str], tmp_path: Path) -> None:
    done = subprocess.run(
        ["srun", "-N2", "-n4", "--overcommit", *LAUNCH, "--no-python", "true"],
        cwd=tmp_path,
        env=slurm,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 2
    assert "--ntasks-per-node=1" in done.stderr
