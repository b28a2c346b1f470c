"""Ranks with fake GPUs: ``ncclops_job`` of this directory runs the CUDA build of torch."""

from __future__ import annotations

import pytest

from ncclops.testing._fork_server import ForkServer


@pytest.fixture(scope="session")
def ncclops_fork_server(gpu_fork_server: ForkServer) -> ForkServer:
    """The process that ranks are forked from, started with the first one."""
    return gpu_fork_server
