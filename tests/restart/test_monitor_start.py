"""A death in the moment in which the monitor process comes up is reported all the same."""

from __future__ import annotations

import itertools
import json
import os
import select
import signal
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from ncclops.restart._monitor.link import Peer, Watch, receive_packet
from ncclops.restart._monitor.ring import Address, Ring, RingActions
from ncclops.restart.monitor_process import MonitorProcess, MonitorProcessSettings

_SECOND = timedelta(seconds=1)


def _settings(rank: int, logfile: Path) -> MonitorProcessSettings:
    return MonitorProcessSettings(
        rank=rank,
        host="127.0.0.1",
        monitor_process_interval=_SECOND,
        heartbeat_interval=_SECOND,
        heartbeat_timeout=30 * _SECOND,
        termination_grace_time=_SECOND,
        abort_timeout=_SECOND,
        logfile=str(logfile),
        pidfile=None,
        incident_dir=None,
        outside_view=None,
    )


def _main_process_that_dies_at_once(successor: list[Any], logfile: Path) -> None:
    """Give the monitor process its addresses, and die with its first question unread."""
    process = MonitorProcess(_settings(0, logfile))
    process.start()
    process.send({"op": "addresses", "addresses": [successor]})
    select.select([process.fileno()], [], [], 60)
    os.kill(os.getpid(), signal.SIGKILL)


def _main_process_that_calls_exec(successor: list[Any], logfile: Path) -> None:
    """Run threads, as in a call of a wrapped function, then another program."""
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    process = MonitorProcess(_settings(0, logfile))
    process.page.watch = Watch.OFF  # as it makes no progress
    process.page.group_made_in = process.page.iteration + 1
    started = process.page.monitor_tick = time.monotonic()
    process.start()
    process.send({"op": "addresses", "addresses": [successor]})
    while process.page.monitor_tick < started + 0.5:  # the second tick: it has seen the threads
        time.sleep(0.01)
    os.execv("/bin/sleep", ["sleep", "600"])


@pytest.mark.usefixtures("starts_processes")
def test_a_machine_that_stands_still_while_a_monitor_process_comes_up_is_noticed(
    tmp_path: Path,
) -> None:
    """By its first tick, which is due from a moment that is written before it runs.

    Written later, by a main process that has stood still as well, it would hide that: the new
    monitor process took the clocks of the main process for old ones, and ended it.
    """
    process, began = MonitorProcess(_settings(0, tmp_path / "log")), time.monotonic()
    process.start()
    shown = process.page.monitor_tick  # long before it has come up, and ticks itself
    process.stop()
    assert began <= shown == process.started_at


def _messages(connection: socket.socket) -> list[dict[str, Any]]:
    with connection.makefile() as lines:
        return [json.loads(line) for line in lines]


def test_a_packet_is_read_that_was_sent_before_the_other_end_went_without_reading() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        ours.setblocking(False)
        assert receive_packet(ours) is None
        theirs.send(b"last message")
        ours.send(b"a question")
        theirs.close()
        assert receive_packet(ours) == b"last message"
        assert receive_packet(ours) == b""


@pytest.mark.slow
def test_a_main_process_that_dies_before_it_has_read_anything_is_reported(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)
        address = [1, *listener.getsockname(), "the token"]
        if (main := os.fork()) == 0:
            _main_process_that_dies_at_once(address, tmp_path / "log")
        os.waitpid(main, 0)
        connection, _ = listener.accept()
    with connection:
        connection.settimeout(60)
        hello = json.loads(connection.makefile().readline())
        assert (hello["op"], hello["token"]) == ("hello", "the token")
        connection.sendall(b'{"op": "hello"}\n')
        report = json.loads(connection.makefile().readline())
        assert (report["cause"], report["rank"]) == ("died", 0), (tmp_path / "log").read_text()
        connection.sendall(json.dumps({"op": "confirm", "id": report["id"]}).encode() + b"\n")
        assert _messages(connection) == []  # with that its work is done


@pytest.mark.slow
def test_a_main_process_that_becomes_another_program_is_reported(tmp_path: Path) -> None:
    """The others would wait for it in a restart, of which that program knows nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)
        address = [1, *listener.getsockname(), "the token"]
        if (main := os.fork()) == 0:
            _main_process_that_calls_exec(address, tmp_path / "log")
        connection, _ = listener.accept()
    with connection, connection.makefile() as lines:
        connection.settimeout(60)
        lines.readline()
        connection.sendall(b'{"op": "hello"}\n')
        try:
            # It pings once a second, and says so as soon.
            messages = [json.loads(line) for line in itertools.islice(lines, 5)]
        finally:
            os.kill(main, signal.SIGKILL)  # the program goes on by itself
            os.waitpid(main, 0)
    reports = [each for each in messages if each["op"] == "report"]
    assert [(each["cause"], each["gone"]) for each in reports[:1]] == [("lost", True)]
    assert "another program" in reports[0]["detail"]


class _Hand:
    """Drives a ring by hand: what it watches, and whom it suspects."""

    def __init__(self) -> None:
        self.suspected: list[tuple[int, float]] = []
        self.withdrawn: list[int] = []
        self.callbacks: dict[Peer, Any] = {}
        actions = RingActions(
            lambda peer, callback, _connecting: self.callbacks.__setitem__(peer, callback),
            lambda peer: self.callbacks.pop(peer, None),
            lambda rank, _evidence, patience_s: self.suspected.append((rank, patience_s)),
            self.withdrawn.append,
            lambda _after: None,
            lambda: None,
        )
        self.ring = Ring(0, "token", 1, 30, actions)
        self.ring.clock = lambda: 0.0

    def serve(self) -> None:
        """All that can happen without waiting for the clock."""
        for peer, callback in list(self.callbacks.items()):
            connecting = callback in (self.ring._on_connect, self.ring._on_probe_connect)
            sides: tuple[list[Peer], list[Peer]] = ([], [peer]) if connecting else ([peer], [])
            if any(select.select(*sides, [], 10)):
                callback()


def _address_of(listener: socket.socket) -> tuple[str, int]:
    host, port = listener.getsockname()
    return host, port


def test_a_neighbour_that_accepts_until_it_is_gone_is_suspected() -> None:
    hand = _Hand()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        hand.ring.add_candidates([Address(1, *_address_of(listener), "token")], 0.0)
        for _ in range(3):  # the connections that a process may take on its way out
            hand.serve()
            listener.accept()[0].close()
            hand.serve()
            hand.ring.tick(0.0)
        assert hand.suspected == []
    hand.serve()
    hand.serve()
    hand.ring.tick(0.0)
    hand.serve()
    assert [rank for rank, _ in hand.suspected] == [1]


def test_a_stranger_that_takes_connections_and_closes_them_has_all_the_time_to_speak_up() -> None:
    hand = _Hand()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        hand.ring.add_candidates([Address(1, *_address_of(listener), "token")], 0.0)
        for _ in range(10):
            if not hand.ring.idle:
                hand.serve()
                listener.accept()[0].close()
                hand.serve()
                hand.ring.tick(0.0)
    assert hand.ring.idle
    assert hand.suspected == [(1, 30)]


def test_what_was_suspected_of_a_neighbour_is_withdrawn_when_it_answers_again() -> None:
    hand = _Hand()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        hand.ring.add_candidates([Address(1, *_address_of(listener), "token")], 0.0)
        hand.serve()
        silent = Peer(listener.accept()[0])
        hand.ring.tick(31.0)
        assert ([rank for rank, _ in hand.suspected], hand.withdrawn) == ([1], [])
        hand.ring.tick(60.0)  # tries it once more
        answers = Peer(listener.accept()[0])
        answers.send({"op": "hello"})
        for _ in range(2):  # the end of the connect, and the answer
            hand.serve()
        assert (hand.withdrawn, hand.ring.successor is not None) == ([1], True)
        assert [rank for rank in range(3) if hand.ring.hears(rank)] == [0, 1]
        hand.ring.leave()
        silent.close()
        answers.close()


@pytest.mark.usefixtures("starts_processes")
def test_other_users_cannot_read_the_token_of_a_monitor_process(tmp_path: Path) -> None:
    process = MonitorProcess(_settings(0, tmp_path / "log"))
    process.start()
    try:
        *_, token = process.address
        while not (command := Path(f"/proc/{process.pid}/cmdline").read_bytes()):
            time.sleep(0.01)  # it is empty for a moment within exec
        assert b"main_pid" in command
        assert token.encode() not in command
    finally:
        process.stop()
