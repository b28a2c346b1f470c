"""Messages by HTTP and to commands, with real receivers; what is wrong is told without secrets."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from ncclops.notify.sending import NotSent, Processes, send
from ncclops.notify.targets import Target
from tests.conftest import LIMIT_S, free_port
from tests.notify.conftest import Receiver

MESSAGE = {"rule": "failed"}


def post(url: str, *, limit_s: float = 10.0, **more: Any) -> None:
    target = Target(**{"name": "a", "kind": "json", "url": url} | more)
    send(target, MESSAGE, Processes(), limit_s)


def wait_for_end(pid: int) -> None:
    """Of a process that is no child of this one; a zombie has ended."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return
        except psutil.NoSuchProcess:
            return
        time.sleep(0.01)
    pytest.fail(f"process {pid} does not end")


def test_a_document_with_a_token(receiver: Receiver) -> None:
    post(receiver.url("/x"), key="tok")
    got = receiver.next()
    assert (got.path, got.authorization, got.body) == ("/x", "Bearer tok", MESSAGE)


def test_a_token_that_rotates_is_read_each_time(receiver: Receiver, tmp_path: Path) -> None:
    token = tmp_path / "token"
    for text in ("one", "two"):
        token.write_text(f"{text}\n")
        post(receiver.url("/x"), kind="kubeflow", token_file=str(token))
        assert receiver.next().authorization == f"Bearer {text}"


@pytest.mark.parametrize(
    ("code", "again"), [(404, False), (400, False), (302, False), (500, True), (429, True)]
)
def test_an_answer_that_is_none_is_told_by_its_number(
    receiver: Receiver, code: int, again: bool
) -> None:
    receiver.codes["/TopSecretPart"] = [code]
    with pytest.raises(
        NotSent, match=rf"^HTTP {code}{', a redirect, which' if code == 302 else '$'}"
    ) as refused:
        post(receiver.url("/TopSecretPart"))
    assert refused.value.again == again
    assert receiver.next().path == "/TopSecretPart"
    assert receiver.got.empty(), "a redirect is not followed"


def test_what_cannot_be_reached_is_told_without_the_address(receiver: Receiver) -> None:
    for url, why in (
        (f"http://127.0.0.1:{free_port()}/TopSecretPart", "Connection refused"),
        (f"https://127.0.0.1:{receiver.port}/TopSecretPart", ""),  # it does not speak TLS
    ):
        with pytest.raises(NotSent) as refused:
            post(url)
        assert refused.value.again
        assert why in str(refused.value) and "TopSecret" not in str(refused.value)


def test_who_does_not_answer_is_not_waited_for(receiver: Receiver) -> None:
    receiver.silent.add("/x")
    with pytest.raises(NotSent, match=r"no answer within 0\.3 s|timed out"):
        post(receiver.url("/x"), limit_s=0.3)
    receiver.go_on.set()


def test_nothing_goes_on_for_a_receiver_that_says_continue_for_ever() -> None:
    """The thread that listened to it went on, at full load, and the next message made another.

    The receiver's own waited for two minutes afterwards, with what nobody takes any more.
    """
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def go_on() -> None:
            connection, _ = server.accept()
            with connection, suppress(OSError):
                connection.settimeout(LIMIT_S)
                connection.recv(1 << 16)
                while True:
                    connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n" * 100)
            ended.set()

        threading.Thread(target=go_on, daemon=True).start()
        with pytest.raises(NotSent, match="no answer within"):
            post(f"http://127.0.0.1:{server.getsockname()[1]}/", limit_s=0.3)
        assert ended.wait(LIMIT_S)


@pytest.mark.slow
class TestCommand:
    @staticmethod
    def run(*command: str) -> None:
        send(Target(name="a", kind="command", command=command), MESSAGE, Processes())

    def test_it_gets_the_document_on_standard_input(self, tmp_path: Path) -> None:
        self.run("sh", "-c", 'cat > "$0"', str(tmp_path / "got"))
        assert json.loads((tmp_path / "got").read_text()) == MESSAGE

    def test_it_need_not_read_it(self) -> None:
        self.run("true")

    @pytest.mark.parametrize(
        ("command", "why"),
        [
            (("sh", "-c", "echo TopSecret >&2; exit 3"), "the command exited with 3"),
            (("/no/such/program",), "the command cannot be started: No such file or directory"),
        ],
    )
    def test_one_that_fails_is_told(self, command: tuple[str, ...], why: str) -> None:
        with pytest.raises(NotSent) as refused:
            self.run(*command)
        assert str(refused.value) == why

    def test_one_that_does_not_end_is_killed_with_its_children(self, tmp_path: Path) -> None:
        processes = Processes()
        pid = tmp_path / "pid"
        command = ("sh", "-c", f"sleep 60 & echo $! > {pid}; wait")
        with pytest.raises(NotSent, match="has not ended within 1 s"):
            send(Target(name="a", kind="command", command=command), MESSAGE, processes, 1.0)
        assert processes.pids == set()
        wait_for_end(int(pid.read_text()))  # it has got its SIGKILL

    def test_its_process_is_known_while_it_runs(self) -> None:
        processes = Processes()
        with processes.started((sys.executable, "-c", "input()")) as process:
            assert processes.pids == {process.pid} and not processes.is_starting
            process.communicate(b"\n", timeout=30)
        assert processes.pids == set()
