"""A job of real processes around ``Wrapper``, with everything it starts accounted for."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import free_port

# Generous: a deadline says "stuck", not "slow".
DEADLINE_S = 100.0


def wait_until(condition: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
    """The first true value of ``condition``; fails the test when there is none in time."""
    end = time.monotonic() + deadline_s
    while not (value := condition()):
        if time.monotonic() > end:
            pytest.fail(f"waited {deadline_s} s for {what}")
        time.sleep(0.02)  # other processes' files and /proc entries announce nothing
    return value


class Zygote:
    """A process that forks workers; one serves all tests."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(Path(__file__).with_name("zygote.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "error"},
        )
        self._ask(None)

    def _ask(self, request: dict[str, Any] | None) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if request is not None:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        return self._process.stdout.readline().strip()

    def spawn(self, **request: Any) -> int:
        """Start a worker; its pid."""
        return int(self._ask(request))

    def close(self) -> None:
        """End the zygote; workers are not its business."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()


@pytest.fixture(scope="session")
def zygote(starts_processes: None) -> Iterator[Zygote]:
    started = Zygote()
    yield started
    started.close()


class Job:
    """The ranks of one job, each a process that runs a scenario."""

    def __init__(self, zygote: Zygote, directory: Path) -> None:
        self._zygote = zygote
        self.directory = directory
        self.tag = uuid.uuid4().hex
        self.port = free_port()
        self.pids: dict[int, int] = {}
        self.env: dict[str, str] = {}

    def start(self, world_size: int, scenario: str, **parameters: Any) -> Job:
        """Start ``world_size`` ranks; scenario and parameters are the same on all."""
        for rank in range(world_size):
            env = {
                "RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self.port),
                "NCCLOPS_TEST_TAG": self.tag,
                "NCCLOPS_STORE_LOG": str(self.directory / "store-log-"),
                **self.env,
            }
            self.pids[rank] = self._zygote.spawn(
                rank=rank,
                env=env,
                scenario=scenario,
                parameters=parameters,
                directory=str(self.directory),
            )
        return self

    def kill(self, rank: int, number: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.pids[rank], number)

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
        return {rank: self._exit(rank) for rank in self.pids}

    def _exit(self, rank: int) -> int:
        path = self._exit_path(rank)
        try:
            wait_until(path.exists, f"the end of rank {rank}")
        except BaseException:
            self._print_logs()
            raise
        return int(path.read_text())

    def _exit_path(self, rank: int) -> Path:
        return self.directory / f"exit-{rank}"

    def _print_logs(self) -> None:
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGABRT)  # the workers dump their stacks
        time.sleep(0.5)
        for log in sorted(self.directory.glob("*log-*")):
            print(f"--- {log.name}\n{log.read_text()[-6000:]}")

    def events(self, name: str | None = None, rank: int | None = None) -> list[dict[str, Any]]:
        """What the ranks noted, in order of time."""
        lines = []
        for path in self.directory.glob("events-*"):
            lines += [json.loads(line) for line in path.read_text().splitlines()]
        lines.sort(key=lambda event: event["at"])
        return [
            event
            for event in lines
            if name in (None, event["event"]) and rank in (None, event["rank"])
        ]

    def wait_for(self, name: str, rank: int | None = None, count: int = 1) -> list[dict[str, Any]]:
        """Until the ranks have noted ``name`` ``count`` times."""

        def enough() -> list[dict[str, Any]]:
            found = self.events(name, rank)
            return found if len(found) >= count else []

        try:
            return list(wait_until(enough, f"{count} x {name} of rank {rank}"))
        except BaseException:
            self._print_logs()
            raise

    def processes(self) -> list[int]:
        """Pids of everything that this job has started and that has not ended."""
        mark = f"NCCLOPS_TEST_TAG={self.tag}".encode()
        found = set(self.store_servers())
        found |= {pid for rank, pid in self.pids.items() if not self._exit_path(rank).exists()}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if mark in (entry / "environ").read_bytes():
                        found.add(int(entry.name))
        return sorted(found)

    def store_servers(self) -> list[int]:
        """Pids of those who listen on the store's port: a forked one bears no mark."""
        listening = psutil.net_connections("tcp")
        return [
            connection.pid
            for connection in listening
            if connection.status == psutil.CONN_LISTEN
            and connection.laddr
            and connection.laddr.port == self.port
            and connection.pid is not None
        ]

    def expect_no_orphans(self) -> None:
        """Everything that the job started goes away by itself."""
        wait_until(lambda: not self.processes(), "the job's helper processes to end", 30)

    def close(self) -> None:
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def job(zygote: Zygote, tmp_path: Path) -> Iterator[Job]:
    started = Job(zygote, tmp_path)
    yield started
    started.close()
