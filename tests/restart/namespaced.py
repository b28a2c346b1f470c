"""Ranks in a network namespace, in which every 127.0.0.0/8 address is a host of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.conftest import LIMIT_S, clean_environ, free_port

from .conftest import wait_until

PROGRAM = Path(__file__).with_name("lost_hosts.py")


class Ranks:
    """Processes that run ``lost_hosts.py`` in the namespace ``network``; files in ``directory``."""

    def __init__(self, network: str, directory: Path, world: int) -> None:
        self.directory = directory
        self.network = network
        self.world = world
        self._port = free_port()
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(
        self,
        environ: Mapping[str, str],
        environ_of: Mapping[int, Mapping[str, str]],
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
            identity |= {**environ, **environ_of.get(rank, {})}
            program = [*through, sys.executable, str(PROGRAM), str(self.directory)]
            with (self.directory / f"log-{rank}").open("wb") as log:
                started = subprocess.Popen(
                    ["ip", "netns", "exec", self.network, *program],
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
        for process in self.processes:
            process.kill()
            process.wait()


@contextmanager
def ranks_in(network: str, directory: Path, world: int) -> Iterator[Ranks]:
    ranks = Ranks(network, directory, world)
    try:
        yield ranks
    finally:
        ranks.close()
