"""A run directory with a control plane, as an agent has it: its event loop, its server process."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import closing
from datetime import timedelta
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any, TypeVar

import pytest

from ncclops.control.commands import ControlRefused
from ncclops.control.server_process import ControlServer
from ncclops.record import control_address
from tests.conftest import LIMIT_S

Result = TypeVar("Result")


def event(name: str, ts: float, rank: int | None = None, /, **fields: Any) -> dict[str, Any]:
    return {"ts": ts, "event": name, "rank": rank, "node": socket.gethostname(), **fields}


def start_of_run(began: float, world_size: int = 2) -> list[dict[str, Any]]:
    return [
        event("run-started", began, run_id="a-run", world_size=world_size),
        event("env-applied", began, profile="local-cpu", changes=[]),
        *(event("worker-started", began + 1, rank, pid=1, attempt=0) for rank in range(world_size)),
    ]


def write_events(run: Path, events: list[dict[str, Any]]) -> None:
    run.mkdir(parents=True, exist_ok=True)
    with (run / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(each) + "\n" for each in events)


class Asked:
    """Controls that note their calls, and refuse or fail on demand."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.fails_with: Exception | None = None

    def stop(self, *, reason: str, by: str, grace: timedelta | None = None) -> str:
        return self._note("stop", reason, by, *([] if grace is None else [grace]))

    def restart(self, *, reason: str, by: str) -> str:
        return self._note("restart", reason, by)

    def tighten_timeouts(self, limits: Mapping[str, timedelta], *, reason: str, by: str) -> str:
        return self._note("tighten", dict(limits), reason, by)

    def _note(self, *call: Any) -> str:
        if self.fails_with is not None:
            raise self.fails_with
        self.calls.append(call)
        return f"{call[0]} noted"

    def refuse(self, why: str) -> None:
        self.fails_with = ControlRefused(why)


class Agent:
    """An event loop in a thread, with the control plane of one run in it."""

    def __init__(self, run: Path, *, tcp: bool = False, token_for_reads: bool = False) -> None:
        self.run, self.asked = run, Asked()
        self.said: list[str] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        listeners = [control_address.listen_unix(run)]
        self.tcp_port = None
        if tcp:
            listeners.append(control_address.listen_tcp("0"))
            self.tcp_port = listeners[-1].getsockname()[1]
        self.server = ControlServer(
            run,
            self.asked,
            listeners=listeners,
            say=self.said.append,
            token_for_reads=token_for_reads,
        )
        self.do(self._call(self.server.start))

    @property
    def token(self) -> str:
        return control_address.read_token(self.run)[0]

    def do(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run ``coroutine`` in the agent's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(LIMIT_S)

    def connect(self) -> socket.socket:
        return control_address.connect_unix(self.run, LIMIT_S)

    def request(
        self,
        method: str,
        path: str,
        body: str | bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[HTTPResponse, bytes]:
        connection = HTTPConnection("localhost")
        connection.sock = self.connect()
        with closing(connection):
            connection.request(method, path, body, dict(headers or {}))
            response = connection.getresponse()
            return response, response.read()

    def command(self, document: object, token: str | None = None) -> tuple[int, dict[str, Any]]:
        """POST ``document`` to /control, with ``token`` or the right one."""
        headers = {"Authorization": f"Bearer {self.token if token is None else token}"}
        body = document if isinstance(document, str) else json.dumps(document)
        response, answer = self.request("POST", "/control", body, headers)
        return response.status, json.loads(answer)

    def close(self) -> None:
        if self._thread.is_alive():
            self.do(self.server.close())
            self.do(asyncio.sleep(0))  # transports close in the next turn of the loop
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(LIMIT_S)
            self._loop.close()

    @staticmethod
    async def _call(function: Callable[[], Result]) -> Result:
        return function()


@pytest.fixture
def start_agent(starts_processes: None, tmp_path: Path) -> Iterator[Callable[..., Agent]]:
    """``start_agent(run, tcp=…, token_for_reads=…)``: with its server, ended after the test."""
    agents: list[Agent] = []

    def start(run: Path | None = None, **options: bool) -> Agent:
        run = run or tmp_path / "runs" / "a-run"
        write_events(run, start_of_run(time.time()))
        agents.append(Agent(run, **options))
        return agents[-1]

    yield start
    for agent in agents:
        agent.close()


@pytest.fixture
def agent(start_agent: Callable[..., Agent]) -> Agent:
    return start_agent()


@pytest.fixture(scope="module")
def one_agent(starts_processes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    run = tmp_path_factory.mktemp("shared") / "a-run"
    write_events(run, start_of_run(time.time()))
    agent = Agent(run)
    yield agent
    agent.close()


@pytest.fixture
def shared(one_agent: Agent) -> Agent:
    """An agent for tests that leave it as it is, apart from what it was asked."""
    one_agent.asked = one_agent.server._controls = Asked()
    return one_agent
