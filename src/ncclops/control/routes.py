"""What is answered to which request."""

from __future__ import annotations

import hmac
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Entrance:
    """What a listener asks of those who come.

    ``hosts`` are the names by which they may call it, None for any: on loopback a web page in
    somebody's browser could come under a name of its own (DNS rebinding). ``token_for_reads``:
    reading, too, needs the run's token; ``/healthz`` says nothing about the run, and does not.
    """

    hosts: frozenset[str] | None = None
    token_for_reads: bool = False

    @classmethod
    def of(cls, listener: socket.socket, *, token_for_reads: bool) -> Entrance:
        """That of a socket in the network, or of the owner's Unix socket, which asks nothing."""
        if listener.family == socket.AF_UNIX:
            return cls()
        address = listener.getsockname()[0]
        local = frozenset({"localhost", "127.0.0.1", "::1", address})
        hosts = local if ipaddress.ip_address(address).is_loopback else None
        return cls(hosts, token_for_reads)


async def _alive() -> bytes:
    return b'{"ok": true}\n'


Forward = Callable[[Command], Awaitable[str]]


class Routes:
    """Answers requests for one run. ``forward`` takes a command to the agent; what follows.

    It raises :class:`ControlRefused` if the agent refuses, ``TimeoutError`` if it does not answer.
    """

    def __init__(
        self, status: StatusProvider, token: str, forward: Forward, entrance: Entrance | None = None
    ) -> None:
        self._entrance = entrance or Entrance()
        self._status = status
        self._expected = f"bearer {token}".encode()
        self._forward = forward

    async def answer(self, request: Request) -> Response:
        if (refusal := self._wrong_name(request)) is not None:
            return refusal
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

    def _wrong_name(self, request: Request) -> Response | None:
        host, hosts = request.headers.get("host"), self._entrance.hosts
        if host is None or hosts is None or _name_in(host) in hosts:
            return None
        return error_response(421, f"this server is called {', '.join(sorted(hosts))}")

    async def _read(
        self, request: Request, body: Callable[[], Awaitable[bytes]], content_type: str
    ) -> Response:
        if request.method not in ("GET", "HEAD"):
            return error_response(405, "use GET: this can only be read", {"Allow": "GET, HEAD"})
        if self._entrance.token_for_reads and body is not _alive:
            refusal = self._refusal(request, "reading")
            if refusal is not None:
                return refusal
        try:
            return Response(200, await body(), content_type)
        except OSError as error:
            return error_response(503, f"the run directory cannot be read: {error.strerror}")

    async def _control(self, request: Request) -> Response:
        if request.method != "POST":
            return error_response(405, "use POST", {"Allow": "POST"})
        if (refusal := self._refusal(request, "a change")) is not None:
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

    def _refusal(self, request: Request, what: str) -> Response | None:
        given = request.headers.get("authorization")
        if given is None:
            challenge = {"WWW-Authenticate": "Bearer"}
            return error_response(401, f"{what} needs the run's token", challenge)
        scheme, _, token = given.partition(" ")
        offered = f"{scheme.lower()} {token.strip()}".encode()
        if not hmac.compare_digest(offered, self._expected):
            return error_response(403, "this is not the run's token")
        return None


# A name or an address, IPv6 in brackets, and a port or none.
_HOST = re.compile(r"(\[[^\]]*\]|[^:\[\]]*)(?::[0-9]*)?")


def _name_in(host: str) -> str | None:
    """The name in a ``Host`` header, without the port; None where it has another form."""
    found = _HOST.fullmatch(host)
    return None if found is None else found[1].strip("[]").lower().rstrip(".")
