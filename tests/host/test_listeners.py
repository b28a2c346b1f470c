"""Who is connected to a port, by real sockets."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from ncclops.host.listeners import has_clients


def test_what_serves_a_port_is_no_client_of_its_own() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert not has_clients(os.getpid(), port)
        with socket.create_connection(("127.0.0.1", port)):
            own, _ = server.accept()
            with own:
                assert not has_clients(os.getpid(), port)


@pytest.mark.slow
def test_another_process_is_one_until_it_closes() -> None:
    connects = "import socket; s = socket.create_connection(('127.0.0.1', {})); input()"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        client = subprocess.Popen(
            [sys.executable, "-c", connects.format(port)], stdin=subprocess.PIPE
        )
        accepted, _ = server.accept()
        with accepted:
            assert has_clients(os.getpid(), port)
            client.communicate(b"\n")
            assert not has_clients(os.getpid(), port)
