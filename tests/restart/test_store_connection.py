"""A connection to the store that is lost costs no rank; a rank that stays cut off is reported."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psutil
import pytest
import torch.distributed as dist

from ncclops.restart._groups.gloo_sockets import socket_inodes
from ncclops.restart._store.client import AdditionUnknown, Connection, Patience, StorePath
from ncclops.testing._store_proxy import StoreProxies

from .conftest import Job, wait_until
from .test_faults import returned_from

ALL_WELL = {0: 0, 1: 0, 2: 0}
# Of the barrier: long enough for an answer that does not come, and for a new connection.
SILENT_S = 25


@pytest.fixture
def proxy(job: Job) -> Iterator[StoreProxies]:
    """What stands between rank 1 and the store; the path of the others is their own."""
    made = StoreProxies([1], job.port)
    job.env_of[1] = {"NCCLOPS_STORE": made.addresses[1]}
    yield made
    made.close()


def lost(job: Job) -> set[int]:
    return {rank for incident in job.events("incident") for rank in incident["ranks_lost"]}


def store_servers(job: Job) -> set[int]:
    """Pids of those who listen on the store's port."""
    return {
        connection.pid
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
        and connection.laddr[1:] == (job.port,)
        and connection.pid is not None
    }


def test_what_was_written_on_a_connection_that_is_lost_is_written_again() -> None:
    """torch's store does not answer to it: nothing shows that it has not come."""
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    proxies = StoreProxies([0], server.port)
    host, port = proxies.addresses[0].split(":")

    def connect() -> Connection:
        before = set(socket_inodes().values())
        made = dist.TCPStore(host, int(port), None, False, wait_for_workers=False)
        return Connection(made, set(socket_inodes().values()) - before)

    client = StorePath(connect, Patience(answer_s=1.0)).client(connect())
    client.append("log", "answered")
    assert client.add("n", 1) == 1
    proxies.lose_connections(0, silent=True)
    client.append("log", "lost")
    client.set("key", "lost, too")
    with pytest.raises(AdditionUnknown):
        client.add("n", 1)
    assert client.read_log("log") == ["answered", "lost"]
    assert client.get("key") == "lost, too"
    proxies.lose_connections(0)
    proxies.close()


def test_a_rank_whose_connections_break_in_the_function_goes_on(
    job: Job, proxy: StoreProxies
) -> None:
    job.start(3, "store_programs:working").wait_for("entered", count=3)
    proxy.lose_connections(1)
    wait_until(lambda: "made again" in (job.directory / "log-1").read_text(), "a new connection")
    (job.directory / "go").touch()
    assert job.wait() == ALL_WELL
    assert job.events("incident") == []
    job.expect_no_orphans()


def test_a_wait_that_is_given_up_while_it_connects_again_fails() -> None:
    """The new connection is not there yet when that shuts the present one down."""
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    connects, goes_on = threading.Event(), threading.Event()

    def connect() -> Connection:
        before = set(socket_inodes().values())
        made = dist.TCPStore("127.0.0.1", server.port, None, False, wait_for_workers=False)
        return Connection(made, set(socket_inodes().values()) - before)

    def connect_again() -> Connection:
        connects.set()
        assert goes_on.wait(30)
        return connect()

    path = StorePath(connect_again, Patience(60, 30))
    client, other = path.client(connect()), path.client(connect())
    with ThreadPoolExecutor(1) as waiting:
        late = waiting.submit(client.wait, "never", timedelta(seconds=20))
        wait_until(client._in_use.locked, "the wait")
        client.renew()
        assert connects.wait(30)
        client.give_up()
        goes_on.set()
        with pytest.raises(dist.DistNetworkError):
            late.result(30)
    assert other.add("there", 1) == 1
    assert not path.lost


def test_a_server_that_ends_while_a_client_connects_to_it_again_is_gone() -> None:
    """torch goes on trying to connect for its own timeout, and tells nothing meanwhile."""
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    before = set(socket_inodes().values())
    made = dist.TCPStore("127.0.0.1", server.port, None, False, wait_for_workers=False)
    ends = threading.Event()

    def connect_in_vain() -> Connection:
        ends.wait(60)
        raise ConnectionRefusedError("too late")

    def see_that_server_listens() -> None:
        raise ConnectionRefusedError("it does not")

    path = StorePath(connect_in_vain, Patience(60, 30), see_that_server_listens)
    client = path.client(Connection(made, set(socket_inodes().values()) - before))
    client.renew()
    with pytest.raises(dist.DistNetworkError):
        client.wait("never", timedelta(seconds=20))
    assert path.lost and not ends.is_set()
    ends.set()


@pytest.mark.parametrize("faulty", [0, 1])
def test_connections_that_break_just_before_a_fault(
    job: Job, proxy: StoreProxies, faulty: int
) -> None:
    job.start(3, "store_programs:working", faulty=faulty).wait_for("entered", count=3)
    (job.directory / "go").touch()
    proxy.lose_connections(1)
    assert job.wait() == ALL_WELL
    assert returned_from(job, 1) == [0, 1, 2]
    assert lost(job) == set()


@pytest.mark.parametrize("silent", [False, pytest.param(True, marks=pytest.mark.extended)])
def test_connections_that_break_while_the_rank_waits_in_the_barrier(
    job: Job, proxy: StoreProxies, silent: bool
) -> None:
    limit_s = SILENT_S if silent else 60
    program = "store_programs:waiting_in_the_barrier"
    job.start(3, program, barrier_s=limit_s).wait_for("finalize", count=3)
    time.sleep(0.5)  # nothing shows from outside that a rank waits in the barrier
    proxy.lose_connections(1, silent=silent)
    (job.directory / "go").touch()
    assert job.wait() == ALL_WELL
    assert lost(job) == set()


def test_connections_that_break_while_the_rank_waits_for_others_to_finish(
    job: Job, proxy: StoreProxies
) -> None:
    job.start(3, "store_programs:finishing").wait_for("entered", count=3)
    proxy.lose_connections(1)
    (job.directory / "go").touch()
    assert job.wait() == ALL_WELL
    assert job.events("incident") == []


@pytest.mark.slow
@pytest.mark.parametrize("faulty", [0, pytest.param(1, marks=pytest.mark.extended)])
def test_connections_that_are_dropped_without_a_sign(
    job: Job, proxy: StoreProxies, faulty: int
) -> None:
    """Nothing comes back on them any more; what is sent is even acknowledged."""
    program = "store_programs:working"
    job.start(3, program, faulty=faulty, barrier_s=SILENT_S).wait_for("entered", count=3)
    proxy.lose_connections(1, silent=True)
    (job.directory / "go").touch()
    assert job.wait() == ALL_WELL
    assert returned_from(job, 1) == [0, 1, 2]
    assert lost(job) == set()
    proxy.close()
    job.expect_no_orphans()


@pytest.mark.parametrize("lingers", [False, True], ids=["ends", "lives on"])
def test_the_others_go_on_without_a_rank_that_stays_cut_off(
    job: Job, proxy: StoreProxies, lingers: bool
) -> None:
    """Reported at once, and not only when the process ends."""
    job.start(3, "store_programs:working", lingers=lingers).wait_for("entered", count=3)
    proxy.cut_off(1)
    job.wait_for("cut off", rank=1)
    assert len(job.wait_for("returned", count=2)) == 2
    assert returned_from(job, 1) == [0, 2]
    assert lost(job) == {1}
    (job.directory / "end").touch()
    assert job.wait() == {0: 0, 1: 1, 2: 0}
    job.expect_no_orphans()


@pytest.mark.slow
def test_the_others_go_on_without_a_rank_whose_path_to_the_store_swallows_everything(
    job: Job, proxy: StoreProxies
) -> None:
    program = "store_programs:working"
    job.start(3, program, faulty=0, barrier_s=SILENT_S).wait_for("entered", count=3)
    proxy.cut_off(1, silent=True)
    (job.directory / "go").touch()
    assert job.wait() == {0: 0, 1: 1, 2: 0}
    assert returned_from(job, 1) == [0, 2]
    assert lost(job) == {1}
    proxy.close()
    job.expect_no_orphans()


def test_a_rank_that_is_cut_off_in_the_barrier_is_not_waited_for(
    job: Job, proxy: StoreProxies
) -> None:
    job.start(3, "store_programs:waiting_in_the_barrier").wait_for("finalize", count=3)
    proxy.cut_off(1)
    (job.directory / "go").touch()
    assert job.wait() == {0: 0, 1: 1, 2: 0}
    assert lost(job) == {1}


@pytest.mark.slow
@pytest.mark.parametrize(
    "program", [pytest.param("working", marks=pytest.mark.extended), "waiting_in_the_barrier"]
)
def test_a_store_that_stands_still_for_ten_seconds_costs_no_rank(job: Job, program: str) -> None:
    job.start(3, f"store_programs:{program}", faulty=0)
    job.wait_for("entered" if program == "working" else "finalize", count=3)
    servers = store_servers(job)
    assert servers
    for pid in servers:
        os.kill(pid, signal.SIGSTOP)
    (job.directory / "go").touch()
    time.sleep(10)  # that is the case
    for pid in servers:
        os.kill(pid, signal.SIGCONT)
    assert job.wait() == ALL_WELL
    assert returned_from(job, 1) == [0, 1, 2]
    assert lost(job) == set()
