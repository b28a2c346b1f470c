"""What both rounds make of an edge, on a network that a function stands for."""

from __future__ import annotations

import asyncio
import select
import socket
import threading
import time
from collections.abc import Callable

import pytest

from ncclops.preflight.edges import wire
from ncclops.preflight.edges.model import How, Outcome, Place, Plan
from ncclops.preflight.edges.probe import Late, Probe, late_of, probe
from ncclops.preflight.edges.rounds import Network, Rounds
from ncclops.preflight.edges.states import LOSSES, losses
from tests.preflight.test_edges_judge import host

# Whether a port of the other host answers to a local port (0: the kernel's choice), at each try.
Answers = Callable[[int, int, int], How | None]
BAD = 38_000
LOCAL = 51_200


def both_rounds(answers: Answers, late: Late = "", late_tries: int = 9) -> tuple[Outcome, Outcome]:
    """What host 0 of two sees. ``late``: whose process was, at so many tries of a port."""
    plan = Plan(hosts=(host(0), host(1)))
    tried: dict[int, int] = {}

    async def probe(address: str, port: int, *, source_port: int = 0, **_: object) -> Probe:
        tried[port] = tried.get(port, 0) + 1
        how = answers(port, source_port, tried[port])
        was_late = late if tried[port] <= late_tries and (how or late == "here") else ""
        local = source_port or (LOCAL if port == BAD and tried[port] == 1 else 40_000 + tried[port])
        return Probe(
            how=how or ("timeout" if was_late else None),
            uid="" if how else plan.hosts[1].uid,
            rtt_ms=0.2,
            source_port=local,
            out_s=0.001,
            in_s=0.001,
            late=was_late,
        )

    async def run() -> tuple[Outcome, Outcome]:
        network = Network(probe=probe, neighbours=dict, source_towards=lambda _: "10.0.0.1")
        rounds = Rounds(plan, 0, network)
        return await rounds.first(5.0), await rounds.second([1], 5.0)

    return asyncio.run(run())


@pytest.mark.parametrize("how", ["timeout", "silent"])
def test_a_local_port_that_cannot_be_had_again_blocks_nothing(how: How) -> None:
    """The connection stood, though this host did not see it in time; then all ports pass."""

    def answers(port: int, source_port: int, tries: int) -> How | None:
        if port != BAD:
            return None
        return how if tries == 1 else "own" if source_port == LOCAL else None

    first, second = both_rounds(answers)
    assert list(first.seen[0].failed.values()) == [how]
    assert second.seen[0].failed == {}


def test_what_fails_twice_and_passes_from_another_local_port_was_lost() -> None:
    """The second time, too, it is the connection that has taken its local port along."""

    def answers(port: int, source_port: int, tries: int) -> How | None:
        if port != BAD:
            return None
        return "silent" if tries <= 2 else "own" if source_port else None

    _, second = both_rounds(answers)
    assert (second.seen[0].failed, second.seen[0].lost) == ({}, 1)


def test_what_fails_from_one_local_port_again_and_again_is_a_rule() -> None:
    def answers(port: int, source_port: int, tries: int) -> How | None:
        return "timeout" if port == BAD and (tries == 1 or source_port == LOCAL) else None

    _, second = both_rounds(answers)
    assert list(second.seen[0].failed.values()) == ["timeout"]
    assert second.seen[0].by_source


def test_what_is_dead_is_tried_from_local_ports_far_apart() -> None:
    """The kernel's own choice lies in a range whose answers a firewall drops."""
    _, second = both_rounds(lambda _, source_port, __: None if source_port else "timeout")
    assert second.seen[0].passed
    _, second = both_rounds(lambda *_: "timeout")
    assert not second.seen[0].passed


def test_a_request_that_arrived_and_got_no_answer_in_time_is_no_loss() -> None:
    """The process of the other host did not run: its kernel has said that all arrived."""

    def answers(port: int, source_port: int, tries: int) -> How | None:
        return "silent" if port // 1000 % 2 else None

    _, second = both_rounds(answers)
    assert losses(second.seen[0]) >= LOSSES
    first, second = both_rounds(answers, "there")
    assert losses(first.seen[0]) == losses(second.seen[0]) == 0
    assert second.seen[0].failed == {}


def test_a_connection_that_this_process_was_too_late_for_is_tried_again() -> None:
    first, second = both_rounds(lambda *_: None, "here", 1)
    assert not first.seen
    assert second.seen[0].failed == {}
    first, _ = both_rounds(lambda *_: "timeout", "here")
    assert not first.seen  # this host's lack says nothing of the edge


def test_the_kernel_says_whose_process_was_late() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as sock:
        assert late_of(sock, "timeout") == ""
        sock.connect(server.getsockname())
        assert late_of(sock, "timeout") == "here"  # the connection stands
        sock.sendall(b"request")
        while late_of(sock, "silent") != "there":  # until it has been acknowledged
            pass
        assert late_of(sock, "large-in") == ""
        with server.accept()[0] as other:
            other.sendall(b"answer")
            select.select([sock], [], [])
            assert late_of(sock, "silent") == late_of(sock, "large-out") == "here"
            sock.recv(6)
            assert late_of(sock, "large-out") == "there"


def test_a_host_that_is_busy_is_not_far_away() -> None:
    """Its process takes its time, which is no round trip of the network."""
    uid, pause_s = "ab" * 16, 0.02

    def answer_late(server: socket.socket) -> None:
        with server.accept()[0] as connection:
            connection.recv(wire.REQUEST_BYTES, socket.MSG_WAITALL)
            connection.sendall(wire.reply(uid))
            for _ in range(3):
                connection.recv(1)
                time.sleep(pause_s)  # as a process that waits for a processor
                connection.sendall(wire.PING)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer_late, args=(server,))
        thread.start()
        place = Place(interface="lo", address="127.0.0.1", prefix=8, family=4)
        port = server.getsockname()[1]
        found = asyncio.run(probe("127.0.0.1", port, own_uid=uid, place=place, pings=3))
        thread.join()
    assert found.uid == uid
    assert 0 < found.rtt_ms < 1000 * pause_s


def test_who_answers_at_the_end_is_asked_by_one_connection() -> None:
    """One answers, one has ended, in the place of a third another one does, one has no port."""
    hosts = tuple(host(number, ports=() if number == 4 else (0, 29_500)) for number in range(5))
    asked = list[str]()

    async def probe(address: str, port: int, **_: object) -> Probe:
        asked.append(f"{address}:{port}")
        uid = {"10.0.0.2": hosts[1].uid, "10.0.0.4": hosts[1].uid}.get(address, "")
        return Probe(how=None if uid else "timeout", uid=uid)

    rounds = Rounds(Plan(hosts=hosts), 0, Network(probe=probe, neighbours=dict))
    assert asyncio.run(rounds.answering([1, 2, 3, 4])) == {1}
    assert asked == [f"10.0.0.{number}:29500" for number in (2, 3, 4)]
