"""Fixtures for tests with fake GPUs, here and elsewhere; a plugin of pytest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ncclops.testing import Interpreter
from ncclops.testing._fork_server import ForkServer
from tests.fakegpu.build import build
from tests.fakegpu.gpus import REAL, RealHost
from tests.fakegpu.host import Host, fake_host
from tests.fakegpu.place import HERE, Place


@pytest.fixture(scope="session")
def fake_gpu_place(starts_processes: None) -> Place:
    """The environment, with the library built from these sources; skips where there is none."""
    if (reason := HERE.missing()) is not None:
        pytest.skip(reason)
    build(HERE)
    return HERE


@pytest.fixture(scope="session")
def gpu_fork_server(starts_processes: None, request: pytest.FixtureRequest) -> Iterator[ForkServer]:
    """The process that has imported the CUDA build of torch, and that ranks are forked from."""
    server = ForkServer(Interpreter() if REAL else _fake(request))
    yield server
    server.close()


def _fake(request: pytest.FixtureRequest) -> Interpreter:
    place: Place = request.getfixturevalue("fake_gpu_place")
    return Interpreter(place.python, {"LD_LIBRARY_PATH": str(place.libraries)})


@pytest.fixture
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Host]:
    """The GPUs of this test."""
    if REAL:
        yield RealHost()
        return
    with fake_host(request.getfixturevalue("fake_gpu_place"), tmp_path) as made:
        yield made
