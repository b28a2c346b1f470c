"""``ncclops store serve``: an address to hand out, a store behind it, an orderly end."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.conftest import LIMIT_S, CompletedText, clean_environ


@pytest.fixture
def server() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "ncclops", "store", "serve"],
        env=clean_environ(),
        stdout=subprocess.PIPE,
        text=True,
    )
    yield process
    process.kill()
    process.wait(LIMIT_S)
    assert process.stdout is not None
    process.stdout.close()


@pytest.mark.slow
def test_ranks_meet_at_the_address_that_it_prints(server: subprocess.Popen[str]) -> None:
    import torch.distributed as dist

    assert server.stdout is not None
    name, _, address = server.stdout.readline().strip().partition("=")
    host, _, port = address.rpartition(":")
    assert (name, host) == ("NCCLOPS_STORE", "127.0.0.1")
    store = dist.TCPStore(host, int(port), is_master=False)
    store.set("key", "value")
    assert store.get("key") == b"value"
    server.send_signal(signal.SIGTERM)
    assert server.wait(LIMIT_S) == 0


def test_a_taken_port_is_one_line(ncclops: Callable[..., CompletedText]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = ncclops("store", "serve", "--port", port)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert port in line
