"""A worker carries out its agent's commands, whatever came before them."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from ncclops.record import worker_commands
from ncclops.record.variables import COMMANDS_FD
from ncclops.record.worker_commands import AbortCommand, RestartCommand, WorkerCommand
from ncclops.worker import agent_commands

LIMIT_S = 60
Send = Callable[[bytes], object]


@pytest.fixture
def send(monkeypatch: pytest.MonkeyPatch) -> Iterator[Send]:
    agent, worker = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    monkeypatch.setenv(COMMANDS_FD, str(worker.detach()))
    agent_commands.listen()
    with agent:
        yield agent.send
    for thread in threading.enumerate():
        if thread.name == "ncclops-commands":
            thread.join(LIMIT_S)


def test_a_command_reaches_the_handler_of_its_kind(send: Send) -> None:
    carried_out: queue.Queue[WorkerCommand] = queue.Queue()
    agent_commands.on(RestartCommand, carried_out.put)
    agent_commands.on(AbortCommand, carried_out.put)
    restart = RestartCommand(reason="abort", hung=3)
    send(worker_commands.encode(restart))
    send(worker_commands.encode(AbortCommand()))
    assert carried_out.get(timeout=LIMIT_S) == restart
    assert carried_out.get(timeout=LIMIT_S) == AbortCommand()


def test_what_cannot_be_read_or_carried_out_stops_no_later_command(
    send: Send, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(command: RestartCommand) -> None:
        raise ValueError(command.reason)

    carried_out: queue.Queue[WorkerCommand] = queue.Queue()
    agent_commands.on(RestartCommand, fail)
    agent_commands.on(AbortCommand, carried_out.put)
    for message in (b"}", b"{}", b'{"command": "dance"}', b'{"command": "restart"}'):
        send(message)
    send(worker_commands.encode(RestartCommand(reason="busy")))
    send(worker_commands.encode(AbortCommand()))
    assert carried_out.get(timeout=LIMIT_S) == AbortCommand()
    assert "command 'restart' failed: ValueError('busy')" in capfd.readouterr().err
