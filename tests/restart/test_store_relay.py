"""The ranks of a host share one process's connections to the store, which may end at any time."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import psutil
import pytest
from torch import distributed as dist

from ncclops.restart import _relay_client
from ncclops.restart._relay_client import RelayClients, RelayedStore
from ncclops.restart._store_relay import Frames, Relay, encode

from .conftest import Job, wait_until
from .test_faults import returned_from
from .test_store_connection import ALL_WELL, lost, store_servers

slow = pytest.mark.slow


# --- jobs -----------------------------------------------------------------------------------------


@pytest.fixture
def sharing(job: Job) -> Job:
    """One whose ranks share a relay, although their store is on the same host."""
    job.env["NCCLOPS_STORE_RELAY"] = "1"
    return job


def clients(job: Job) -> list[int]:
    """The process at the other end of each connection to the job's store."""
    found = [
        connection.pid or 0
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_ESTABLISHED and connection.raddr[1:] == (job.port,)
    ]
    return [pid for pid in found if pid not in store_servers(job)]


def relays(job: Job) -> set[int]:
    return set(clients(job)) - set(job.pids.values())


def has_ended(pid: int) -> bool:
    """Also if init has yet to wait for it."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def the_relay(job: Job) -> int:
    (relay,) = relays(job)
    return relay


@slow
def test_the_ranks_of_a_host_have_two_connections_to_the_store(sharing: Job) -> None:
    """One for requests, and one that waits. Besides, each rank has torch's for its process group,
    and rank 0 one that keeps the server."""
    sharing.start(4, "store_programs:working", faulty=1).wait_for("entered", count=4)
    counts = Counter(clients(sharing))
    assert counts.pop(the_relay(sharing)) == 2
    assert {rank: counts[pid] for rank, pid in sharing.pids.items()} == {0: 2, 1: 1, 2: 1, 3: 1}
    (sharing.directory / "go").touch()
    assert sharing.wait() == dict.fromkeys(range(4), 0)
    assert returned_from(sharing, 1) == [0, 1, 2, 3]
    sharing.expect_no_orphans()


@contextlib.contextmanager
def served(port: int) -> Iterator[None]:
    """A store that no rank has started."""
    server = subprocess.Popen(
        [sys.executable, "-m", "ncclops.restart.store_server", str(port)],
        stdout=subprocess.PIPE,
    )
    try:
        yield
    finally:
        server.kill()
        server.communicate()


@slow
def test_each_host_has_its_own(sharing: Job) -> None:
    sharing.env_of = {
        rank: {"NCCLOPS_STORE": f"127.0.0.{2 if rank > 1 else 1}:{sharing.port}"}
        for rank in range(4)
    }
    with served(sharing.port):
        sharing.start(4, "store_programs:working", faulty=1).wait_for("entered", count=4)
        assert len(relays(sharing)) == 2
        (sharing.directory / "go").touch()
        assert sharing.wait() == dict.fromkeys(range(4), 0)


@slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda n: n.name)
def test_a_relay_that_ends_or_stops_in_the_middle_of_an_agreement(
    sharing: Job, number: signal.Signals
) -> None:
    sharing.start(3, "store_programs:waiting_in_the_barrier").wait_for("finalize", count=3)
    time.sleep(0.5)  # nothing shows from outside that a rank waits in the barrier
    relay = the_relay(sharing)
    os.kill(relay, number)
    (sharing.directory / "go").touch()
    assert sharing.wait() == ALL_WELL
    assert lost(sharing) == set()
    assert has_ended(relay)
    sharing.expect_no_orphans()


@slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda n: n.name)
def test_a_relay_that_ends_or_stops_just_before_a_fault(
    sharing: Job, number: signal.Signals
) -> None:
    sharing.start(3, "store_programs:working", faulty=1).wait_for("entered", count=3)
    relay = the_relay(sharing)
    (sharing.directory / "go").touch()
    os.kill(relay, number)
    assert sharing.wait() == ALL_WELL
    assert returned_from(sharing, 1) == [0, 1, 2]
    assert lost(sharing) == set()
    assert has_ended(relay)
    sharing.expect_no_orphans()


@slow
def test_ranks_whose_relay_has_ended_connect_directly(sharing: Job) -> None:
    sharing.start(3, "store_programs:finishing").wait_for("entered", count=3)
    os.kill(the_relay(sharing), signal.SIGKILL)
    wait_until(lambda: set(clients(sharing)) == set(sharing.pids.values()), "their connections")
    (sharing.directory / "go").touch()
    assert sharing.wait() == ALL_WELL
    assert sharing.events("incident") == []


@slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_takes_no_relay_with_it(sharing: Job, victim: int) -> None:
    """Whichever of them has started it."""
    sharing.start(3, "store_programs:working").wait_for("entered", count=3)
    relay = the_relay(sharing)
    sharing.kill(victim)
    (sharing.directory / "go").touch()
    assert sharing.wait() == ALL_WELL | {victim: -signal.SIGKILL}
    assert lost(sharing) == {victim}
    assert returned_from(sharing, 1) == sorted({0, 1, 2} - {victim})
    wait_until(lambda: has_ended(relay), "the relay to end")


# --- one relay ------------------------------------------------------------------------------------


class Counted:
    """A connection to a store, whose requests are noted; none is answered before ``gate`` opens."""

    def __init__(self, store: Any, noted: list[str], gate: threading.Event) -> None:
        self._store = store
        self._noted = noted
        self._gate = gate

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._store, name)

        def noted(*arguments: Any) -> Any:
            self._noted.append(name)
            self._gate.wait()
            return operation(*arguments)

        return noted


class Host:
    """A relay in this process, to a real server, and its ranks."""

    def __init__(self) -> None:
        self.server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self.requests: list[str] = []
        self._socks: list[socket.socket] = []
        self.gate = threading.Event()
        self.gate.set()
        listener = socket.socket(socket.AF_UNIX)
        listener.bind("")  # a name that is free
        listener.listen()
        self._name = listener.getsockname()
        self._relay = threading.Thread(target=Relay(listener, self.connect).run)
        self._relay.start()

    def end(self) -> None:
        """Also the connections that a test has left; without one it would wait for the first."""
        self._socks.append(socket.socket(socket.AF_UNIX))
        with contextlib.suppress(OSError):  # it has ended
            self._socks[-1].connect(self._name)
        while self._socks:
            self._socks.pop().close()
        self._relay.join()

    def connect(self) -> Counted:
        store = dist.TCPStore("127.0.0.1", self.server.port, None, False, wait_for_workers=False)
        return Counted(store, self.requests, self.gate)

    def rank(self) -> RelayedStore:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(self._name)
        self._socks.append(sock)
        store = RelayedStore(sock, "p", 60.0)
        store.greet(time.monotonic() + 60)
        return store

    def all_do(self, ranks: int, what: Callable[[RelayedStore, int], Any]) -> list[Any]:
        """What ``what`` returns on each of ``ranks``, done at once; one request is under way."""
        stores, results = [self.rank() for _ in range(ranks)], [None] * ranks
        first = self.rank()
        self.gate.clear()
        before = len(self.requests)
        busy = threading.Thread(target=first.set, args=("busy", "1"))
        busy.start()
        wait_until(lambda: len(self.requests) > before, "the first request")

        def do(rank: int) -> None:
            results[rank] = what(stores[rank], rank)

        threads = [threading.Thread(target=do, args=(rank,)) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        time.sleep(0.5)  # until all have asked: a request that gathers announces nothing
        self.gate.set()
        for thread in [busy, *threads]:
            thread.join()
        return results

    def asked(self, name: str) -> int:
        return self.requests.count(name)


@pytest.fixture
def on_host(starts_processes: None) -> Iterator[Host]:
    made = Host()
    yield made
    made.end()


def test_additions_that_gather_are_one_and_each_rank_has_its_number(on_host: Host) -> None:
    numbers = on_host.all_do(8, lambda store, rank: store.add("n", 1 << rank))
    assert on_host.asked("add") == 1
    assert max(numbers) == 255
    assert len(set(numbers)) == 8
    assert all(number >> rank & 1 for rank, number in enumerate(numbers))
    assert int(on_host.server.get("p/n")) == 255


def test_lines_that_gather_are_one_request(on_host: Host) -> None:
    on_host.all_do(8, lambda store, rank: store.append("log", f"{rank}\n"))
    assert on_host.asked("append") == 1
    assert sorted(on_host.server.get("p/log").decode().splitlines()) == list("01234567")


def test_the_first_value_stands_for_all_that_gather(on_host: Host) -> None:
    given = on_host.all_do(4, lambda store, rank: store.compare_set("k", "", str(rank)))
    assert len(set(given)) == 1
    assert on_host.server.get("p/k") == given[0]


def test_a_wait_is_one_request_for_all_ranks_also_for_those_that_come_later(on_host: Host) -> None:
    threading.Timer(0.7, on_host.server.set, ("p/k", "v")).start()
    assert on_host.all_do(8, lambda store, _: store.get("k")) == [b"v"] * 8
    assert on_host.rank().get("k") == b"v"
    assert on_host.asked("get") == 1


def test_waits_for_several_keys_do_not_wait_for_each_other(on_host: Host) -> None:
    first, second = on_host.rank(), on_host.rank()
    waits = threading.Thread(target=first.get, args=("late",))
    waits.start()
    on_host.server.set("p/early", "v")
    assert second.get("early") == b"v"
    on_host.server.set("p/late", "v")
    waits.join()


def test_a_wait_that_is_too_long_leaves_the_connection_usable(on_host: Host) -> None:
    store = on_host.rank()
    store.set_timeout(timedelta(seconds=0.2))
    with pytest.raises(dist.DistStoreError, match="never was not set"):
        store.get("never")
    assert store.add("n", 3) == 3
    on_host.server.set("p/never", "v")
    assert store.get("never") == b"v"


def test_a_log_is_read_as_it_is_now(on_host: Host) -> None:
    one, other = on_host.rank(), on_host.rank()
    for line in range(3):
        one.append("log", f"{line}\n")
        assert len(other.multi_get(["log"])[0].split()) == line + 1


def test_a_rank_that_takes_no_answer_holds_up_no_other(on_host: Host) -> None:
    on_host.server.set("p/large", "x" * 4_000_000)
    stopped, other = on_host.rank(), on_host.rank()
    stopped._sock.sendall(encode(["get", "p/large"]))
    wait_until(lambda: "get" in on_host.requests, "the request")
    assert other.add("n", 1) == 1
    assert len(other.get("large")) == 4_000_000


@contextlib.contextmanager
def relay_that_reads(
    monkeypatch: pytest.MonkeyPatch, once_in_s: float
) -> Iterator[tuple[RelayedStore, list[bytes]]]:
    """One whose process is busy, with five beats in 0.25 s; and what it has read so far."""
    monkeypatch.setattr(_relay_client, "BEAT_EVERY_S", 0.05)
    ours, theirs = socket.socketpair()
    parts: list[bytes] = []

    def read() -> None:
        frames = Frames()
        while data := theirs.recv(1 << 16):
            parts.append(data)
            if frames.feed(data):
                theirs.sendall(encode(None))
            time.sleep(once_in_s)

    reader = threading.Thread(target=read)
    store = RelayedStore(ours, "p", 60.0)
    reader.start()
    try:
        yield store, parts
    finally:
        store.shut_down()
        reader.join()
        theirs.close()


def test_a_relay_that_takes_a_long_message_slowly_is_not_taken_for_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with relay_that_reads(monkeypatch, once_in_s=0.05) as (store, parts):
        store.multi_set(["plan"], ["x" * 1_000_000])
        assert sum(map(len, parts)) > 1_000_000


def test_a_relay_that_takes_nothing_of_a_long_message_is_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with (
        relay_that_reads(monkeypatch, once_in_s=0.6) as (store, _),
        pytest.raises(dist.DistNetworkError, match="took nothing for"),
    ):
        store.multi_set(["plan"], ["x" * 4_000_000])


def test_a_relay_whose_store_has_gone_ends(on_host: Host) -> None:
    store = on_host.rank()
    del on_host.server
    with pytest.raises(dist.DistNetworkError, match="relay"):
        store.add("n", 1)


def test_a_rank_that_cannot_have_a_relay_connects_directly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Something else listens in its place, and does not answer."""
    relays = RelayClients(("127.0.0.1", 9), "test", 60.0)
    with socket.socket(socket.AF_UNIX) as impostor:
        impostor.bind(relays._name)
        impostor.listen()
        monkeypatch.setattr(_relay_client, "_UP_WITHIN_S", 0.2)
        assert relays.join("p") is None
