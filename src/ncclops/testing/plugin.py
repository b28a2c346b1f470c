"""The pytest plugin: the fixture ``ncclops_job``. Imports no torch, and the harness when used."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ncclops.testing._fork_server import ForkServer
    from ncclops.testing.job import JobFactory


@pytest.fixture(scope="session")
def ncclops_fork_server() -> Iterator[ForkServer]:
    """The process that ranks are forked from, started with the first one."""
    from ncclops.testing._fork_server import ForkServer

    server = ForkServer()
    yield server
    server.close()


@pytest.fixture
def ncclops_job(ncclops_fork_server: ForkServer, tmp_path: Path) -> Iterator[JobFactory]:
    """``ncclops_job(function, world_size=2, faults=[...])`` is a ``ncclops.testing.Job``.

    What is left of the test's jobs is ended with it. When the test fails, its report has the end
    of each rank's output.
    """
    from ncclops.testing.job import JobFactory

    with JobFactory(tmp_path, ncclops_fork_server) as factory:
        yield factory


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the ends of the ranks' logs to the report of a test that failed."""
    report = yield
    factory = getattr(item, "funcargs", {}).get("ncclops_job")
    if call.when == "call" and report.failed and factory is not None:
        for job in factory.jobs:
            for path in sorted(job.directory.glob("log-*")):
                tail = path.read_text(errors="replace")[-4000:]
                report.sections.append((f"{job.directory.name}, {path.name}", tail))
    return report
