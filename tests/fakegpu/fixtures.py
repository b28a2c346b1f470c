"""Fixtures for tests with fake GPUs, here and elsewhere; a plugin of pytest."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ncclops.testing import Interpreter
from ncclops.testing._fork_server import ForkServer
from tests.fakegpu.build import build
from tests.fakegpu.host import Host
from tests.fakegpu.place import HERE, Place


@pytest.fixture(scope="session")
def fake_gpu_place(starts_processes: None) -> Place:
    """The environment, with the library built from these sources; skips where there is none."""
    if (reason := HERE.missing()) is not None:
        pytest.skip(reason)
    build(HERE)
    return HERE


@pytest.fixture(scope="session")
def fake_gpu_fork_server(fake_gpu_place: Place) -> Iterator[ForkServer]:
    """The process that has imported the CUDA build of torch, and that ranks are forked from."""
    libraries = {"LD_LIBRARY_PATH": str(fake_gpu_place.libraries)}
    server = ForkServer(Interpreter(fake_gpu_place.python, libraries))
    yield server
    server.close()


@pytest.fixture
def host(fake_gpu_place: Place, tmp_path: Path) -> Iterator[Host]:
    """The GPUs of this test."""
    # In memory, as NCCL's own shared memory is.
    meeting = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="fakegpu-"))
    yield Host(fake_gpu_place, tmp_path, meeting)
    shutil.rmtree(meeting)
