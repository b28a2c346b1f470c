"""What is answered to which request, and which of them reach the agent."""

from __future__ import annotations

import asyncio
import json

import pytest

from ncclops.control.commands import Command, ControlRefused
from ncclops.control.http import Request, Response
from ncclops.control.routes import Routes

BEARER = {"authorization": "Bearer secret"}
STOP = b'{"action": "stop"}'


class Run:
    """What there is to see of a run; ``error`` is raised instead where it is set."""

    error: Exception | None = None

    async def status(self) -> bytes:
        if self.error is not None:
            raise self.error
        return b'{"phase": "running"}'

    async def metrics(self) -> bytes:
        return b"ncclops_run_info 1.0\n"


class Agent:
    """Notes what is asked of it; ``error`` is raised instead where it is set."""

    def __init__(self, error: Exception | None = None) -> None:
        self.asked: list[Command] = []
        self._error = error

    async def forward(self, command: Command) -> str:
        if self._error is not None:
            raise self._error
        self.asked.append(command)
        return "stopping"


def answer(
    request: Request, agent: Agent | None = None, run: Run | None = None
) -> tuple[Response, Agent]:
    agent = agent or Agent()
    routes = Routes(run or Run(), "secret", agent.forward)
    return asyncio.run(routes.answer(request)), agent


@pytest.mark.parametrize(
    ("method", "path", "status", "content_type"),
    [
        ("GET", "/status", 200, "application/json"),
        ("HEAD", "/status", 200, "application/json"),
        ("GET", "/metrics", 200, "text/plain; version=0.0.4; charset=utf-8"),
        ("GET", "/healthz", 200, "application/json"),
        ("POST", "/status", 405, "application/json"),
        ("DELETE", "/metrics", 405, "application/json"),
        ("GET", "/control", 405, "application/json"),
        ("GET", "/", 404, "application/json"),
        ("GET", "/status/", 404, "application/json"),
    ],
)
def test_what_can_be_read(method: str, path: str, status: int, content_type: str) -> None:
    response, agent = answer(Request(method, path, BEARER, STOP))
    assert (response.status, response.content_type) == (status, content_type)
    assert agent.asked == []


@pytest.mark.parametrize(
    ("offered", "status"),
    [
        (None, 401),
        ("", 403),
        ("Bearer", 403),
        ("Bearer wrong", 403),
        ("Basic secret", 403),
        ("secret", 403),
        ("Bearer secret secret", 403),
        ("bearer  secret ", 202),
    ],
)
def test_a_change_needs_the_runs_token(offered: str | None, status: int) -> None:
    headers = {} if offered is None else {"authorization": offered}
    response, agent = answer(Request("POST", "/control", headers, STOP))
    assert response.status == status
    assert ("WWW-Authenticate" in response.headers) == (status == 401)
    assert len(agent.asked) == (status == 202)


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (None, 202, "stopping"),
        (ControlRefused("it is stopping already"), 409, "it is stopping already"),
        (TimeoutError(), 504, "the agent does not answer"),
    ],
)
def test_what_the_agent_says_is_the_answer(error: Exception | None, status: int, says: str) -> None:
    response, _ = answer(Request("POST", "/control", BEARER, STOP), Agent(error))
    document = json.loads(response.body)
    assert (response.status, document.get("message") or document["error"]) == (status, says)


def test_what_is_no_command_does_not_reach_the_agent() -> None:
    response, agent = answer(Request("POST", "/control", BEARER, b'{"action": "launch"}'))
    assert (response.status, agent.asked) == (400, [])


def test_a_run_directory_that_cannot_be_read_is_an_error_response() -> None:
    run = Run()
    run.error = OSError(5, "Input/output error")
    response, _ = answer(Request("GET", "/status", {}, b""), run=run)
    assert response.status == 503
    assert "Input/output error" in json.loads(response.body)["error"]
