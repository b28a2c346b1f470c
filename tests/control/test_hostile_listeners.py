"""Whatever listens at a run's socket, `status` and `stop` end with a bounded answer."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from ncclops.control import client
from ncclops.errors import NcclopsError
from ncclops.record import control_address
from ncclops.record.paths import RunPaths
from tests.conftest import LIMIT_S
from tests.control.conftest import start_of_run, write_events

_HEAD = b"HTTP/1.1 202 x\r\nContent-Type: application/json\r\n"


def _answer(body: bytes) -> list[bytes]:
    return [_HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body]


def _for_ever(part: bytes) -> Iterator[bytes]:
    while True:
        yield part


def _slowly(part: bytes) -> Iterator[bytes]:
    for each in _for_ever(part):
        time.sleep(0.05)
        yield each


def _endless(begin: bytes, part: bytes) -> Iterator[bytes]:
    yield _HEAD + begin + b"\r\n"
    yield from _for_ever(part)


WAYS: dict[str, Callable[[], Iterator[bytes] | list[bytes]]] = {
    "a body without end": lambda: _endless(b"", b" " * (1 << 20)),
    "chunks without end": lambda: _endless(
        b"Transfer-Encoding: chunked\r\n", b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
    ),
    "a byte now and then": lambda: _slowly(b"H"),
    "answers that go on": lambda: _for_ever(b"HTTP/1.1 100 Continue\r\n\r\n"),
    "headers without end": lambda: _endless(b"", b"X: y\r\n"),
    "200,000 levels": lambda: _answer(b"[" * 200_000),
    "a number of 100,000 digits": lambda: _answer(b"9" * 100_000),
    "no message": lambda: _answer(b"{}"),
    "a message of another type": lambda: _answer(b'{"message": [1]}'),
    "a length that is none": lambda: [_HEAD + b"Content-Length: 9" + b"9" * 30 + b"\r\n\r\n{}"],
    "no HTTP": lambda: [b"\x16\x03\x01\x1b[2J" + b"x" * 60_000 + b"\n"],
}


@contextmanager
def _listening(
    run: Path,
    parts: Callable[[], Iterator[bytes] | list[bytes]],
    heard: list[bytes] | None = None,
) -> Iterator[None]:
    def serve() -> None:
        while True:
            try:
                one, _ = listener.accept()
            except OSError:
                return
            with closing(one), suppress(OSError):
                one.settimeout(LIMIT_S)
                request = one.recv(65536)
                if heard is not None and request:
                    heard.append(request)
                for part in parts():
                    one.sendall(part)
                # Closed with something of the request unread, it would take the answer back.
                one.shutdown(socket.SHUT_WR)
                while one.recv(65536):
                    pass

    with control_address.listen_unix(run) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(LIMIT_S)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    run = tmp_path / "a-run"
    write_events(run, start_of_run(time.time()))
    monkeypatch.setattr(client, "_ANSWER_LIMIT_S", 1.0)
    monkeypatch.setattr(client, "MOST_BYTES", 4 << 20)
    return run


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_every_answer_has_an_end(way: str, run: Path) -> None:
    with _listening(run, WAYS[way]):
        status = client.status_of(run)
        assert (status.phase, status.source) == ("starting", "directory")
        assert max(map(len, status.notes)) < 1000
        try:
            said = client.send(run, {"action": "stop"})
        except NcclopsError as error:
            said = str(error)
    assert len(said) < 1000
    assert said.isprintable()


@pytest.mark.slow
def test_what_is_said_is_one_line_of_text(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_ANSWER_LIMIT_S", LIMIT_S)
    message = b'{"message": "one\\ntwo \\u001b[2J\\u202e' + b"x" * 100_000 + b'"}'
    with _listening(run, lambda: _answer(message)):
        said = client.send(run, {"action": "stop"})
    assert said.startswith("one two \\x1b[2J\\u202exxx")
    assert len(said) < 1000
    assert said.isprintable()


@pytest.mark.parametrize("token", ["a pipe", "endless", "no text"])
def test_a_token_that_is_none_is_told_so(token: str, run: Path) -> None:
    path = RunPaths(run).token
    path.parent.mkdir()
    if token == "a pipe":
        os.mkfifo(path)
    elif token == "endless":
        path.symlink_to("/dev/zero")
    else:
        path.write_bytes(b"\xff\xfe\n\x00")
    with pytest.raises(NcclopsError):
        client.send(run, {"action": "stop"})


@pytest.mark.parametrize("link", ["the token", "its directory"])
def test_no_file_behind_a_link_is_sent_as_a_token(link: str, run: Path, tmp_path: Path) -> None:
    """Who has made the run directory listens at its socket, and may read what is sent there."""
    heard, secret = list[bytes](), tmp_path / "elsewhere" / "token"
    secret.parent.mkdir()
    secret.write_text("a-secret-of-the-reader\n")
    with _listening(run, lambda: _answer(b'{"message": "well"}'), heard):
        token = RunPaths(run).token
        token.unlink()
        if link == "the token":
            token.symlink_to(secret)
        else:
            RunPaths(run).socket.rename(secret.with_name(RunPaths(run).socket.name))
            token.parent.rmdir()
            token.parent.symlink_to(secret.parent)
        with pytest.raises(NcclopsError):
            client.send(run, {"action": "stop"})
    assert heard == []


def test_a_token_is_not_sent_to_another_user(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_address, "user_of_peer", lambda _: 2**31)
    heard = list[bytes]()
    with (
        _listening(run, lambda: _answer(b'{"message": "well"}'), heard),
        pytest.raises(NcclopsError, match=f"a process of user {2**31} listens"),
    ):
        client.send(run, {"action": "stop"})
    assert heard == []
