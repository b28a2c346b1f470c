"""The store of a job serves whoever connects, and fills no disk with what it notes of them."""

from __future__ import annotations

import os
import select
import socket
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest

from ncclops.agent import hosted_store
from ncclops.restart.store_server import _LOG_BYTES

pytestmark = pytest.mark.slow


def test_the_log_of_the_store_has_an_end_and_the_store_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from torch.distributed import TCPStore

    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "INFO")  # one line for each client
    log = tmp_path / "store.log"
    log.touch()
    os.truncate(log, _LOG_BYTES - 10)
    server = hosted_store.serve(hosted_store.listen(host=None, port=0), None, log)
    host, port = server.address.host, server.address.port
    try:
        for _ in range(20):
            with socket.create_connection((host, port)) as visitor, suppress(OSError):
                visitor.sendall(b"GET / HTTP/1.1\r\n\r\n")
        client = TCPStore(host, port, None, False, timedelta(seconds=60))
        client.set("key", "value")
        assert client.get("key") == b"value"
        assert select.select([server.pidfd], [], [], 0)[0] == [], "it has ended"
        assert _LOG_BYTES - 10 < log.stat().st_size <= _LOG_BYTES
    finally:
        server.close()
