"""Ranks with fake GPUs: ``ncclops_job`` of this directory runs the CUDA build of torch."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from ncclops.testing import Job
from ncclops.testing._fork_server import ForkServer
from tests.fakegpu import watchdog_programs


@pytest.fixture(scope="session")
def ncclops_fork_server(gpu_fork_server: ForkServer) -> ForkServer:
    """The process that ranks are forked from, started with the first one."""
    return gpu_fork_server


@dataclass(frozen=True)
class Engine:
    """torch's version, and whether "nccl" is its second engine."""

    torch: tuple[int, ...]
    second: bool

    @property
    def timed_out(self) -> str:
        """What the watchdog says of a timeout of 3 s."""
        return "Operation timed out after " if self.second else "Timeout(ms)=3000"

    @property
    def raised(self) -> str:
        """What ``wait()`` raises of it."""
        return "NCCL operation timed out" if self.second else self.timed_out


@pytest.fixture(scope="session")
def engine(ncclops_fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    directory = tmp_path_factory.mktemp("engine")
    program = watchdog_programs.engine
    with Job(program, world_size=1, directory=directory, server=ncclops_fork_server) as job:
        return Engine(*job.run().value)
