"""What is answered to which request."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Protocol

from ncclops.control.commands import Command, ControlRefused, parse_command
from ncclops.control.http import Request, Response, error_response, json_response

# The exposition format of Prometheus; its own constant would cost every import of this module.
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class StatusProvider(Protocol):
    """The documents about the run, ready to be sent."""

    async def status(self) -> bytes:
        """``ncclops.status/1``."""

    async def metrics(self) -> bytes:
        """The same in Prometheus' format."""


async def _alive() -> bytes:
    return b'{"ok": true}\n'


Forward = Callable[[Command], Awaitable[str]]


class Routes:
    """Answers requests for one run. ``forward`` takes a command to the agent; what follows.

    It raises :class:`ControlRefused` if the agent refuses, ``TimeoutError`` if it does not answer.
    """

    def __init__(self, status: StatusProvider, token: str, forward: Forward) -> None:
        self._status = status
        self._expected = f"bearer {token}".encode()
        self._forward = forward

    async def answer(self, request: Request) -> Response:
        match request.path:
            case "/status":
                return await self._read(request, self._status.status, "application/json")
            case "/metrics":
                return await self._read(request, self._status.metrics, METRICS_TYPE)
            case "/healthz":
                return await self._read(request, _alive, "application/json")
            case "/control":
                return await self._control(request)
        return error_response(404, "there are /status, /metrics, /healthz and /control")

    @staticmethod
    async def _read(
        request: Request, body: Callable[[], Awaitable[bytes]], content_type: str
    ) -> Response:
        if request.method not in ("GET", "HEAD"):
            return error_response(405, "use GET: this can only be read", {"Allow": "GET, HEAD"})
        try:
            return Response(200, await body(), content_type)
        except OSError as error:
            return error_response(503, f"the run directory cannot be read: {error.strerror}")

    async def _control(self, request: Request) -> Response:
        if request.method != "POST":
            return error_response(405, "use POST", {"Allow": "POST"})
        if (refusal := self._refusal(request)) is not None:
            return refusal
        try:
            command = parse_command(request.body)
            follows = await self._forward(command)
        except ValueError as error:
            return error_response(400, str(error))
        except ControlRefused as error:
            return error_response(409, str(error))
        except TimeoutError:
            return error_response(504, "the agent does not answer")
        return json_response(202, {"action": command.action, "message": follows})

    def _refusal(self, request: Request) -> Response | None:
        given = request.headers.get("authorization")
        if given is None:
            challenge = {"WWW-Authenticate": "Bearer"}
            return error_response(401, "a change needs the run's token", challenge)
        scheme, _, token = given.partition(" ")
        offered = f"{scheme.lower()} {token.strip()}".encode()
        if not hmac.compare_digest(offered, self._expected):
            return error_response(403, "this is not the run's token")
        return None
