"""Requests from the command line to a run: to its agent if that answers, else its directory."""

from __future__ import annotations

import errno
import http.client
import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ncclops.control import launcher
from ncclops.errors import NcclopsError, UsageError
from ncclops.host_name import host_name
from ncclops.plain_text import plain_line
from ncclops.record import control_address, documents, event_log
from ncclops.record.paths import RunPaths
from ncclops.record.regular_file import MOST_BYTES
from ncclops.status import model
from ncclops.status.model import RunStatus
from ncclops.status.reading import read_once

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_CONNECT_LIMIT_S = 5.0
# For all of an answer. Longer than the server waits for the agent, so that the better one wins.
_ANSWER_LIMIT_S = 30.0
# Where the agent is stopped, its server most likely is, too.
_STOPPED_LIMIT_S = 2.0
_MOST_CHARS = 400  # of what an agent says


class AgentSilent(Exception):
    """The agent cannot be asked; the message is one line that says why."""


def status_of(run_dir: Path) -> RunStatus:
    """The status of the run, with a note where its agent did not answer.

    Raises ``UsageError`` if nothing of the run can be read.
    """
    if RunPaths(run_dir).verdict.exists():
        return _read(run_dir)
    held = _held(run_dir)
    try:
        seen = _ask_status(run_dir, None if held is None else _STOPPED_LIMIT_S)
    except AgentSilent as silence:
        seen = _without_agent(run_dir, str(silence))
    return seen if held is None else replace(seen, notes=(*seen.notes, held))


def send(run_dir: Path, command: Mapping[str, Any]) -> str:
    """Have the agent do ``command`` (``commands.parse_command``); what follows, in a line.

    Raises ``UsageError`` if we may not ask, ``NcclopsError`` if it cannot or will not do it.
    """
    if RunPaths(run_dir).verdict.exists():
        ended = _read(run_dir)
        how = f": {ended.outcome} ({ended.reason})" if ended.outcome else ""
        raise NcclopsError(f"run {run_dir.name} has ended{how}")
    if (held := _held(run_dir)) is not None:
        raise NcclopsError(f"run {run_dir.name}: {held}")
    try:
        token, owner = control_address.read_token(run_dir)
    except PermissionError:
        raise UsageError(
            f"the token of {run_dir.name} is for {_owner(run_dir)} alone: ask as that user"
        ) from None
    except OSError:
        raise NcclopsError(_without_server(run_dir)) from None
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    try:
        code, document = _request(
            run_dir, "POST", "/control", json.dumps(command), headers, {0, os.geteuid(), owner}
        )
    except AgentSilent as silence:
        raise NcclopsError(f"run {run_dir.name}: {silence}") from None
    if code != http.HTTPStatus.ACCEPTED:
        raise NcclopsError(f"run {run_dir.name}: {_said(document, 'error', code)}")
    return _said(document, "message", code)


def _held(run_dir: Path) -> str | None:
    """What to do about a run that nothing looks after, because its processes were stopped."""
    pids = launcher.stopped(run_dir)
    if not pids:
        return None
    named = " ".join(map(str, pids))
    return (
        f"its agent is stopped (SIGSTOP; pid {named}), so that nothing looks after the run:"
        f" `kill -CONT {named}` lets it go on"
    )


def _ask_status(run_dir: Path, limit_s: float | None) -> RunStatus:
    code, document = _request(run_dir, "GET", "/status", limit_s=limit_s)
    if code != http.HTTPStatus.OK:
        raise AgentSilent(_said(document, "error", code))
    try:
        return model.from_json(document)
    except ValueError as error:  # an agent of another version
        raise AgentSilent(f"its agent is not understood: {error}") from None


def _said(document: Mapping[str, Any], field: str, code: int) -> str:
    """What the agent says in ``field``, in a line. Whatever listens there may say anything."""
    said = document.get(field)
    return plain_line(said, _MOST_CHARS) if isinstance(said, str) else f"HTTP status {code}"


class _Socket(socket.socket):
    """A connection whose reads all end by one time: one byte a second must not keep us."""

    deadline = 0.0  # of the monotonic clock

    def recv_into(self, buffer: WriteableBuffer, nbytes: int = 0, flags: int = 0) -> int:
        left_s = self.deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self.settimeout(left_s)
        return super().recv_into(buffer, nbytes, flags)


class _Connection(http.client.HTTPConnection):
    def __init__(
        self,
        run_dir: Path,
        users: AbstractSet[int] | None = None,
        limit_s: float | None = None,
    ) -> None:
        self._limit_s = _ANSWER_LIMIT_S if limit_s is None else limit_s
        super().__init__("localhost", timeout=self._limit_s)
        self._run_dir, self._users = run_dir, users

    def connect(self) -> None:
        connected = control_address.connect_unix(self._run_dir, _CONNECT_LIMIT_S)
        self.sock = _Socket(fileno=connected.detach())
        self.sock.deadline = time.monotonic() + self._limit_s
        self.sock.settimeout(self._limit_s)
        user = control_address.user_of_peer(self.sock)
        if self._users is not None and user not in self._users:
            raise AgentSilent(f"a process of user {user} listens in place of its agent")


def _request(
    run_dir: Path,
    method: str,
    path: str,
    body: str | None = None,
    headers: Mapping[str, str] | None = None,
    users: AbstractSet[int] | None = None,
    limit_s: float | None = None,
) -> tuple[int, dict[str, Any]]:
    """The answer, its status and its document; of a process of one of ``users`` alone."""
    connection = _Connection(run_dir, users, limit_s)
    try:
        connection.request(method, path, body, dict(headers or {}))
        response = connection.getresponse()
        document = documents.parse(_whole(response))
    except PermissionError:
        raise AgentSilent(f"its agent answers {_owner(run_dir)} alone") from None
    except (FileNotFoundError, ConnectionRefusedError):
        raise AgentSilent(_without_server(run_dir)) from None
    except TimeoutError:
        raise AgentSilent("its agent does not answer") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        why = plain_line(str(error), _MOST_CHARS)
        raise AgentSilent(f"its agent does not answer ({why})") from None
    finally:
        connection.close()
    return response.status, document if isinstance(document, dict) else {}


def _whole(response: http.client.HTTPResponse) -> bytes:
    body = response.read(MOST_BYTES + 1)
    if len(body) > MOST_BYTES:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    return body


def _read(run_dir: Path, is_lost: Callable[[RunStatus], bool] = lambda _: False) -> RunStatus:
    try:
        return read_once(run_dir, is_lost)
    except OSError as error:
        raise UsageError(
            f"cannot read {RunPaths(run_dir).events} ({error.strerror}): `ncclops diagnose`"
            " shows what else the run has left"
        ) from None


def _without_agent(run_dir: Path, why: str) -> RunStatus:
    """What is read from the directory, with ``why`` the agent did not answer."""
    seen = _read(run_dir, partial(_is_lost, run_dir))
    if seen.phase == "ended":  # it has ended just now
        return seen
    return replace(seen, notes=(*seen.notes, f"{why}; this is read from the run directory"))


def _is_lost(run_dir: Path, seen: RunStatus) -> bool:
    """Whether the agent, which would be on this host, has ended without a verdict."""
    if seen.phase == "ended":
        return False
    if host_name() not in (seen.nodes[:1] or (host_name(),)):
        return False
    try:
        control_address.connect_unix(run_dir, _CONNECT_LIMIT_S).close()
    except ConnectionRefusedError:
        return launcher.is_alive(run_dir) is not True
    except FileNotFoundError:  # it has been swept, or there never was one
        return launcher.is_alive(run_dir) is False
    except OSError:
        return False
    return False


def _without_server(run_dir: Path) -> str:
    """Why no process listens at the socket of a run that has no verdict."""
    host = _agent_host(run_dir)
    if host is not None and host != host_name():
        return f"its agent is on {host} and can be asked there"
    if launcher.is_alive(run_dir):
        return (
            "its launcher runs, and no agent listens here: this is a copy of its directory, or one"
            " that was moved to another file system, or its control plane has failed"
        )
    return "its agent is not there: it was killed, or has not begun"


def _agent_host(run_dir: Path) -> str | None:
    """Where the agent of a run is that has started workers, by the first event of one."""
    try:
        reader = event_log.follow(RunPaths(run_dir).events)
    except OSError:
        return None
    try:
        return next((e.node for e in reader.new() if e.rank is not None and e.node), None)
    finally:
        reader.close()


def _owner(run_dir: Path) -> str:
    try:
        return RunPaths(run_dir).socket.owner()
    except (OSError, KeyError):
        return "its owner"
