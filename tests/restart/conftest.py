"""A job of ranks that run a scenario, on the harness that users have: ``ncclops.testing``."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from ncclops import testing
from ncclops.testing._fork_server import ForkServer
from tests.cluster.hosts import why_not
from tests.conftest import free_port
from tests.fakegpu.host import Host
from tests.lanes import GLOO, Lane, profile_environment
from tests.lanes import LANES as LANES
from tests.lanes import lanes as any_lanes

# Generous: a deadline says "stuck", not "slow".
DEADLINE_S = 100.0
SCENARIOS = f"{Path(__file__).with_name('scenarios.py')}:run"


def wait_until(condition: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
    """The first true value of ``condition``; fails the test when there is none in time."""
    end = time.monotonic() + deadline_s
    while not (value := condition()):
        if time.monotonic() > end:
            pytest.fail(f"waited {deadline_s} s for {what}")
        time.sleep(0.02)  # other processes' files and /proc entries announce nothing
    return value


def print_logs(directory: Path) -> None:
    """The ends of the logs of ranks and monitor processes; pytest shows them if the test fails."""
    for path in sorted(directory.glob("*log-*")):
        print(f"--- {path.name}", path.read_text(errors="replace")[-4000:], sep="\n")


def lanes(*names: str, extended: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    """As ``tests.lanes.lanes``; with GPUs, they run on real ones as well."""
    return any_lanes(*names, marks=(pytest.mark.gpu,), extended=extended)


def lanes_with(
    parameters: str, values: Sequence[Any], names: Sequence[str]
) -> pytest.MarkDecorator:
    """The test runs on several lanes and with several ``values`` of other ``parameters``.

    In the gate each lane and each value comes at least once, in combinations that differ; all
    combinations run with ``--extended``.
    """
    in_gate = {
        (number % len(values), number % len(names))
        for number in range(max(len(values), len(names)))
    }
    combinations = []
    for at, value in enumerate(values):
        each = value if "," in parameters else (value,)
        for number, name in enumerate(names):
            marks = [pytest.mark.gpu] if LANES[name].needs_gpus else []
            if (at, number) not in in_gate:
                marks.append(pytest.mark.extended)
            words = "-".join(map(str, (name, *each)))
            combinations.append(pytest.param(LANES[name], *each, id=words, marks=marks))
    return pytest.mark.parametrize(f"lane,{parameters}", combinations, indirect=["lane"])


class Job:
    """The ranks of one job, each a process that runs a scenario; files are in ``directory``."""

    def __init__(self, server: ForkServer, directory: Path, lane: Lane = GLOO) -> None:
        self._server = server
        self._lane = lane
        self._job: testing.Job | None = None
        self.directory = directory
        self.port = free_port()
        self.env: dict[str, str] = {}
        self.env_of: dict[int, dict[str, str]] = {}  # of single ranks

    def start(self, world_size: int, scenario: str, **parameters: Any) -> Job:
        """Start ``world_size`` ranks; scenario and parameters are the same on all."""
        parameters = {"backend": self._lane.backend, "eager": self._lane.eager, **parameters}
        self._job = testing.Job(
            SCENARIOS,
            world_size=world_size,
            args=(scenario, self.directory, parameters, self.env_of),
            env=self.env,
            deadline=timedelta(seconds=DEADLINE_S),
            directory=self.directory,
            server=self._server,
        )
        self._job.port = self.port
        self._job.start()
        return self

    @property
    def ranks(self) -> testing.Job:
        assert self._job is not None, "start() comes first"
        return self._job

    @property
    def pids(self) -> dict[int, int]:
        """The main process of each rank."""
        return self.ranks.pids

    def kill(self, rank: int, number: signal.Signals = signal.SIGKILL) -> None:
        self.ranks.signal(rank, number)

    def kill_monitor(self, rank: int, number: signal.Signals = signal.SIGKILL) -> int:
        """Signal the monitor process, too; its pid."""
        pid = self.monitor_process(rank)
        os.kill(pid, number)
        return pid

    def monitor_process(self, rank: int) -> int:
        path = self.directory / f"monitor-{rank}.pid"
        return int(wait_until(lambda: path.exists() and path.read_text().strip(), "the pid file"))

    def monitor_log(self, rank: int) -> str:
        """What the monitor process has logged so far."""
        path = self.directory / f"monitor-log-{rank}"
        return path.read_text() if path.exists() else ""

    def wait(self) -> dict[int, int]:
        """Exit codes of all ranks, negative for signals."""
        return self.ranks.join()

    def events(self, name: str | None = None, rank: int | None = None) -> list[dict[str, Any]]:
        """What the ranks noted, in order of time."""
        return [_event(note) for note in self.ranks.notes(name, rank)]

    def wait_for(self, name: str, rank: int | None = None, count: int = 1) -> list[dict[str, Any]]:
        """Until the ranks have noted ``name`` ``count`` times."""
        return [_event(note) for note in self.ranks.wait_for(name, rank, count)]

    def processes(self) -> list[int]:
        """Pids of everything that this job has started and that has not ended."""
        return self.ranks.processes()

    def expect_no_orphans(self) -> None:
        """Everything that the job started goes away by itself."""
        self.ranks.expect_nothing_left()

    def close(self) -> None:
        print_logs(self.directory)
        if self._job is not None:
            self._job.close()


def _event(note: testing.Note) -> dict[str, Any]:
    return {"event": note.name, "rank": note.rank, "at": note.at, **note.fields}


@pytest.fixture
def job(
    starts_processes: None, lane: Lane, request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[Job]:
    """With NCCL, each rank has a GPU and the settings that the profiles make for torch."""
    kind = "gpu_fork_server" if lane.needs_gpus else "ncclops_fork_server"
    started = Job(request.getfixturevalue(kind), tmp_path, lane)
    if lane.needs_gpus:
        host: Host = request.getfixturevalue("host")
        started.env = host.environment | profile_environment(tmp_path)
    yield started
    started.close()


@pytest.fixture
def network() -> Iterator[str]:
    """A network namespace in which every 127.0.0.0/8 address is a host."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    name = f"nc{secrets.token_hex(3)}-hosts"
    subprocess.run(["ip", "netns", "add", name], check=True)
    subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
    yield name
    subprocess.run(["ip", "netns", "del", name], check=True)
