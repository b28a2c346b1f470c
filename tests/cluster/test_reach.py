"""Waiting for the job's store says why nothing answers there."""

from __future__ import annotations

import asyncio
import socket
from datetime import timedelta
from typing import Any

import pytest

from ncclops.cluster import reach
from ncclops.cluster.rendezvous_config import RendezvousConfig
from ncclops.errors import NcclopsError


@pytest.fixture(autouse=True)
def says_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "_SAY_AFTER_S", 0.0)


def said_while_waiting(host: str, port: int, tries: int = 1) -> list[str]:
    said: list[str] = []
    left = iter(range(tries))

    async def pause(_: timedelta) -> bool:
        return next(left, None) is None

    config = RendezvousConfig(
        backend="static", active=2, most=2, host=host, port=port, job_id="none"
    )
    with pytest.raises(NcclopsError, match="stopped while waiting for the store"):
        asyncio.run(reach.wait_for_store(config, pause=pause, note=said.append))
    return said


def test_a_port_at_which_nobody_listens() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        (line,) = said_while_waiting("127.0.0.1", port)
    assert line == f"waiting for the store at 127.0.0.1:{port}: Connection refused"


def test_a_name_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    (line,) = said_while_waiting("nn01", 29500)
    assert line == "waiting for the store at nn01:29500: this host knows no address of nn01"


def test_a_name_that_cannot_be_one() -> None:
    (line,) = said_while_waiting("n01..cluster", 29500)
    assert line.endswith(": this host knows no address of n01..cluster")


def test_a_store_that_answers_is_not_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        config = RendezvousConfig(
            backend="static", active=2, most=2, host="127.0.0.1", job_id="none",
            port=server.getsockname()[1],
        )  # fmt: skip

        async def never(_: timedelta) -> bool:
            raise AssertionError("there was a pause")

        asyncio.run(reach.wait_for_store(config, pause=never, note=pytest.fail))
