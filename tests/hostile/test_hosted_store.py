"""The store of a job serves whoever connects, fills no disk with its notes, and stays at work."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest

from ncclops.agent import hosted_store
from ncclops.host import process_view
from ncclops.host.kept_running import KeptRunning
from ncclops.restart._process import SENT_TO_ALL
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
        for number in SENT_TO_ALL:  # as Slurm does
            server.process.send_signal(number)
        assert client.get("key") == b"value"
        assert select.select([server.pidfd], [], [], 0)[0] == [], "it has ended"
        while log.stat().st_size == _LOG_BYTES - 10:  # a thread of the store writes it
            time.sleep(0.01)
        assert _LOG_BYTES - 10 < log.stat().st_size <= _LOG_BYTES
    finally:
        server.close()


def test_a_loopback_interface_that_is_down_is_named_at_once() -> None:
    if subprocess.run(["unshare", "--map-root-user", "--net", "true"], check=False).returncode:
        pytest.skip("no network namespace is to be had")
    listens = "from ncclops.agent import hosted_store as s; s.listen(host=None, port=0)"
    done = subprocess.run(
        ["unshare", "--map-root-user", "--net", sys.executable, "-c", listens],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "is the loopback interface up (`ip link set lo up`)?" in done.stderr


def test_a_store_that_something_has_stopped_is_woken_again_and_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(KeptRunning, "PAUSE_S", 0.1)
    server = hosted_store.serve(
        hosted_store.listen(host=None, port=0), None, tmp_path / "store.log"
    )
    place = Path(f"/proc/{server.process.pid}")

    async def until(is_stopped: bool) -> None:
        limit = time.monotonic() + 60
        while ((stat := process_view.read_stat(place)) is not None) and (
            (stat.state == "T") is not is_stopped
        ):
            assert time.monotonic() < limit
            await asyncio.sleep(0.01)

    async def stop_it_twice() -> None:
        server.keep_running()
        for _ in range(2):
            server.process.send_signal(signal.SIGSTOP)
            await until(True)
            await until(False)

    try:
        asyncio.run(stop_it_twice())
        assert (stat := process_view.read_stat(place)) is not None
        assert stat.state not in "ZX"
    finally:
        server.close()
