"""The ranks of a host share one process's connections to the store, which may end at any time."""

from __future__ import annotations

import contextlib
import os
import select
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

from ncclops import restart
from ncclops.restart._store import client as _store_client
from ncclops.restart._store import relay_client
from ncclops.restart._store.client import Connection, Patience, StoreClient, StorePath
from ncclops.restart._store.connections import Connections
from ncclops.restart._store.relay import Frames, Relay, encode
from ncclops.restart._store.relay_client import RelayClients, RelayedStore
from ncclops.restart._store.variables import relay_is_wanted
from ncclops.restart.ledger import Ledger
from ncclops.restart.store import job_prefix

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


def is_shared(job: Job) -> bool:
    """Whether a relay has taken the place of the ranks' connections: of those they have one for the
    process group, and rank 0 one that keeps the server."""
    counts = Counter(clients(job))
    most = {pid: 1 + (rank == 0) for rank, pid in job.pids.items()}
    return len(relays(job)) == 1 and all(counts[pid] <= most[pid] for pid in most)


def has_ended(pid: int) -> bool:
    """Also if init has yet to wait for it."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def the_relay(job: Job) -> int:
    """Once all ranks use it."""
    wait_until(lambda: is_shared(job), "the ranks to use a relay")
    (relay,) = relays(job)
    return relay


@slow
def test_the_ranks_of_a_host_have_two_connections_to_the_store(sharing: Job) -> None:
    """One for requests, and one that waits."""
    sharing.start(4, "store_programs:working", faulty=1).wait_for("entered", count=4)
    relay = the_relay(sharing)
    wait_until(lambda: clients(sharing).count(relay) == 2, "its connections")
    counts = Counter(clients(sharing))
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
def test_who_moves_to_the_relay_stays_in_the_name_space_of_its_generation(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while those of the generation before are being moved: both wait for a slow relay."""
    place = {"NCCLOPS_STORE": f"127.0.0.1:{job.port}", "RANK": "0", "WORLD_SIZE": "1"}
    for name, value in (place | {"NCCLOPS_STORE_RELAY": "1"}).items():
        monkeypatch.setenv(name, value)
    with served(job.port):
        direct = dist.TCPStore("127.0.0.1", job.port, is_master=False)
        other = RelayClients(("127.0.0.1", job.port), job_prefix(), 60.0).join("other")
        assert other is not None
        os.kill(other._pid, signal.SIGSTOP)
        try:
            connections = Connections(restart.Wrapper(grow_timeout=timedelta(0)).settings)
            before = [connections.another() for _ in range(2)]
            connections.enter_generation(1)
            after = [connections.first, *(connections.another() for _ in range(30))]
        finally:
            os.kill(other._pid, signal.SIGCONT)
        wait_until(lambda: not any(client.is_to_move for client in after), "all on the relay")
        wait_until(lambda: not any(client.is_to_move for client in before), "those before as well")
        for number, client in enumerate(after):
            client.set(f"after/{number}", "here")
            assert client.check([f"after/{number}"])
        space = connections._prefix
        assert space.endswith("/g1")
        assert direct.check([f"{space}/after/{number}" for number in range(len(after))])
        for store in (other, *(client.store for client in (*before, *after))):
            if isinstance(store, RelayedStore):
                store._sock.close()  # a collector that finds one in a cycle would warn


@slow
def test_each_host_has_its_own(sharing: Job) -> None:
    sharing.env_of = {
        rank: {"NCCLOPS_STORE": f"127.0.0.{2 if rank > 1 else 1}:{sharing.port}"}
        for rank in range(4)
    }
    with served(sharing.port):
        sharing.start(4, "store_programs:working", faulty=1).wait_for("entered", count=4)
        wait_until(lambda: len(relays(sharing)) == 2, "two relays")
        (sharing.directory / "go").touch()
        assert sharing.wait() == dict.fromkeys(range(4), 0)


@slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda n: n.name)
def test_a_relay_that_ends_or_stops_in_the_middle_of_an_agreement(
    sharing: Job, number: signal.Signals
) -> None:
    sharing.start(3, "store_programs:waiting_in_the_barrier", told=True)
    sharing.wait_for("entered", count=3)
    relay = the_relay(sharing)
    (sharing.directory / "fail").touch()
    sharing.wait_for("finalize", count=3)
    time.sleep(0.5)  # nothing shows from outside that a rank waits in the barrier
    os.kill(relay, number)
    (sharing.directory / "go").touch()
    assert sharing.wait() == ALL_WELL
    assert lost(sharing) == set()
    assert has_ended(relay)
    sharing.expect_no_orphans()


@slow
@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGKILL, marks=pytest.mark.extended), signal.SIGSTOP],
    ids=lambda n: n.name,
)
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
def test_after_a_restart_ranks_whose_relay_had_ended_share_a_new_one(sharing: Job) -> None:
    sharing.start(3, "store_programs:working", faulty=1, goes_on=True)
    sharing.wait_for("entered", count=3)
    first = the_relay(sharing)
    os.kill(first, signal.SIGKILL)
    (sharing.directory / "go").touch()
    sharing.wait_for("entered", count=6)
    assert the_relay(sharing) != first
    (sharing.directory / "end").touch()
    assert sharing.wait() == ALL_WELL
    assert returned_from(sharing, 1) == [0, 1, 2]
    sharing.expect_no_orphans()


@slow
def test_no_rank_waits_for_a_relay_that_does_not_come_up(sharing: Job) -> None:
    """What listens in its place answers nothing: rank 1 fails while it is being joined."""
    sharing.env["NCCLOPS_STORE"] = f"127.0.0.1:{sharing.port}"
    with contextlib.ExitStack() as stack:
        impostors = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(2)]
        for impostor, host in zip(impostors, ["127.0.0.1", "::ffff:127.0.0.1"], strict=True):
            impostor.bind(RelayClients((host, sharing.port), "ncclops", 60.0)._name)
            impostor.listen()
        stack.enter_context(served(sharing.port))
        sharing.start(3, "store_programs:working", faulty=1).wait_for("entered", count=3)
        assert any(select.select(impostors, [], [], 60.0))
        (sharing.directory / "go").touch()
        assert sharing.wait() == ALL_WELL
    assert returned_from(sharing, 1) == [0, 1, 2]
    assert lost(sharing) == set()


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

    @property
    def timeout(self) -> timedelta:
        limit: timedelta = self._store.timeout
        return limit

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

    def connect(self, prefix: str = "") -> Counted:
        store: Any = dist.TCPStore(
            "127.0.0.1", self.server.port, None, False, wait_for_workers=False
        )
        store = dist.PrefixStore(prefix, store) if prefix else store
        return Counted(store, self.requests, self.gate)

    def direct(self) -> Connection:
        """Of a rank, too, without the relay."""
        store: Any = self.connect("p")
        return Connection(store)

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


def test_what_a_relay_lists_is_deleted_over_it(on_host: Host) -> None:
    store = StoreClient(Connection(on_host.rank()))
    for key in ("2/groups/a", "10/groups/a", "2/call0/0/outcome", "2/outcome", "groups/a"):
        store.set(key, "")
    on_host.server.set("q/2/groups/a", "of another job")
    ledger = Ledger(store, 2)
    found = ledger.outdated(10)
    assert sorted(found) == ["2/call0/0/outcome", "2/groups/a"]
    ledger.delete(found)
    assert ledger.outdated(10) == []
    assert on_host.server.check(["q/2/groups/a"])


def test_a_key_that_is_no_text_does_not_end_the_relay(on_host: Host) -> None:
    store = StoreClient(Connection(on_host.rank()))
    store.set("k", "v")
    on_host.server.set(b"\xff", "v")
    on_host.server.add("n", 1)  # once this is answered, that is there
    assert store.list_keys() == []
    assert store.add("n", 1) == 1


@slow
@pytest.mark.parametrize(
    "answers", [pytest.param(True, marks=pytest.mark.extended), False], ids=["server", "no answer"]
)
def test_a_relay_ends_when_the_rank_that_starts_it_does(on_host: Host, answers: bool) -> None:
    """Also before it is up, and where the store does not answer."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        expect_to_end_with_its_rank(on_host.server.port if answers else silent.getsockname()[1])


def expect_to_end_with_its_rank(port: int) -> None:
    program = (
        "import contextlib, os, sys;"
        "from ncclops.restart._store.relay_client import RelayClients;"
        "relays = RelayClients(('127.0.0.1', int(sys.argv[1])), 'orphan', 60.0);"
        "relays._start(contextlib.ExitStack());"
        "os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", program, str(port)], check=True)
    name = RelayClients(("127.0.0.1", port), "orphan", 60.0)._name

    def is_free() -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            with contextlib.suppress(OSError):
                probe.bind(name)
                return True
            return False

    wait_until(is_free, "the relay to end")


# --- moving to a relay ----------------------------------------------------------------------------


class Unhurried:
    """A connection to the store on which what is written arrives when an answer is asked for."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._written: list[tuple[str, str]] = []

    def has_extended_api(self) -> bool:
        return True

    def append(self, key: str, line: str) -> None:
        self._written.append((key, line))

    def check(self, keys: list[str]) -> bool:
        while self._written:
            self._store.append(*self._written.pop(0))
        return bool(self._store.check(keys))


def test_what_a_client_has_written_is_there_before_it_is_moved(on_host: Host) -> None:
    direct: Any = Unhurried(on_host.connect("p"))
    client = StoreClient(Connection(direct))
    client.append("log", "first")
    client.move(on_host.rank())
    client.append("log", "second")
    assert client.read_log("log") == ["first", "second"]


def test_a_client_that_waits_is_not_moved(on_host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_store_client, "_IDLE_WITHIN_S", 0.1)
    client = StoreClient(on_host.direct())
    waits = threading.Thread(target=client.get, args=("k",))
    waits.start()
    wait_until(lambda: "get" in on_host.requests, "the wait")
    client.move(on_host.rank())
    assert client.is_to_move
    on_host.server.set("p/k", "v")
    waits.join()
    client.move(on_host.rank())
    assert not client.is_to_move


def test_a_long_wait_begins_when_the_client_is_moved(on_host: Host) -> None:
    path = StorePath(on_host.direct, Patience())
    client, found = path.client(path.connect()), []
    path.settled.clear()
    waits = threading.Thread(
        target=lambda: found.append(client.wait_long("k", timedelta(seconds=60)))
    )
    waits.start()
    wait_until(lambda: on_host.asked("check") > 1, "it to look")
    assert on_host.asked("get") == 0
    client.move(on_host.rank())
    path.settled.set()
    wait_until(lambda: on_host.asked("get") == 1, "the wait")
    assert not client.is_to_move
    on_host.server.set("p/k", "v")
    waits.join()
    assert found == ["v"]


@pytest.mark.parametrize(
    ("chosen", "here", "everywhere", "wanted"),
    [
        (None, "8", "16", True),
        ("", "8", "16", True),
        (None, "8", "8", False),
        (None, "1", "16", False),
        (None, "8", "4", False),  # hosts were lost
        (None, None, "16", False),
        (None, "2(x3)", "16", False),
        (None, "8", None, False),
        ("1", None, None, True),
        ("1", "8", "8", True),
        ("0", "8", "16", False),
    ],
)
def test_where_ranks_share_a_relay(
    chosen: str | None, here: str | None, everywhere: str | None, wanted: bool
) -> None:
    given = {"NCCLOPS_STORE_RELAY": chosen, "LOCAL_WORLD_SIZE": here, "WORLD_SIZE": everywhere}
    assert (
        relay_is_wanted({name: value for name, value in given.items() if value is not None})
        is wanted
    )


@pytest.mark.parametrize("value", ["2", "true", "off", " 1"])
def test_another_value_is_refused_in_one_line(value: str) -> None:
    with pytest.raises(ValueError, match=f"^NCCLOPS_STORE_RELAY='{value}': 1 .*, 0 .*, or unset"):
        relay_is_wanted({"NCCLOPS_STORE_RELAY": value})


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
    monkeypatch.setattr(relay_client, "BEAT_EVERY_S", 0.05)
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
        monkeypatch.setattr(relay_client, "_UP_WITHIN_S", 0.2)
        assert relays.join("p") is None
