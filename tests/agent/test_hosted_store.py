"""What is told of a store server that has ended."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ncclops.agent.hosted_store import StoreAddress, StoreServer


@pytest.mark.parametrize(
    ("ends", "how"),
    [
        ("signal.raise_signal(signal.SIGKILL)", "was killed by SIGKILL (out of memory)"),
        ("signal.raise_signal(signal.SIGTERM)", "was killed by SIGTERM"),
        ("sys.exit(3)", "exited with code 3"),
    ],
)
def test_a_server_that_the_out_of_memory_killer_has_ended_is_told_as_that(
    ends: str, how: str, starts_processes: None
) -> None:
    process = subprocess.Popen([sys.executable, "-c", f"import signal, sys; {ends}"])
    server = StoreServer(StoreAddress("127.0.0.1", 1), process)
    try:
        assert server.how_it_ended(lambda: "out of memory") == how
    finally:
        server.close()
