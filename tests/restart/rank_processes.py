"""Ranks that are processes of their own, and not of the harness, which forks them.

Those in a network namespace have every 127.0.0.0/8 address as a host of its own.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.conftest import LIMIT_S, clean_environ, free_port

from .conftest import print_logs, wait_until

PROGRAM = Path(__file__).with_name("lost_hosts.py")


class Ranks:
    """Processes that run ``lost_hosts.py``, with their files in ``directory``.

    They run in the network namespace ``network``, where there is one.
    """

    def __init__(self, directory: Path, world: int, network: str | None = None) -> None:
        self.directory = directory
        self.network = network
        self.world = world
        self._port = free_port()
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(
        self,
        environ: Mapping[str, str],
        environ_of: Mapping[int, Mapping[str, str]] | None = None,
        *,
        through: Sequence[str] = (),
    ) -> None:
        """Start all, by the command ``through`` where one is given."""
        for rank in range(self.world):
            identity = {
                "RANK": str(rank),
                "WORLD_SIZE": str(self.world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self._port),
                "GLOO_SOCKET_IFNAME": "lo",
            }
            identity |= {**environ, **(environ_of or {}).get(rank, {})}
            program = [*through, sys.executable, str(PROGRAM), str(self.directory)]
            with (self.directory / f"log-{rank}").open("wb") as log:
                inside = ["ip", "netns", "exec", self.network] if self.network else []
                started = subprocess.Popen(
                    [*inside, *program],
                    env=clean_environ(identity),
                    stdout=log,
                    stderr=log,
                )
            self.processes.append(started)

    def log(self, name: str) -> str:
        path = self.directory / name
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_for(self, name: str, line: str, count: int = 1) -> None:
        """Until ``line`` is in the log file ``name``, ``count`` times."""
        wait_until(lambda: self.log(name).count(line) >= count, f"{line!r} in {name}")

    def wait_for_all(self, line: str) -> None:
        for rank in range(self.world):
            self.wait_for(f"log-{rank}", line)

    def incidents(self) -> list[str]:
        logs = "".join(self.log(f"log-{rank}") for rank in range(self.world))
        return [line for line in logs.splitlines() if line.startswith("incident")]

    def go(self) -> None:
        """Let them end."""
        (self.directory / "go").touch()

    def wait(self) -> list[int]:
        return [process.wait(LIMIT_S) for process in self.processes]

    def close(self) -> None:
        print_logs(self.directory)
        for process in self.processes:
            process.kill()
            process.wait()


@contextmanager
def processes(directory: Path, world: int, network: str | None = None) -> Iterator[Ranks]:
    ranks = Ranks(directory, world, network)
    try:
        yield ranks
    finally:
        ranks.close()
