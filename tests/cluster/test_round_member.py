"""Nodes in one round over a real store, some of them with another version of ncclops."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import ANY

import pytest
import torch.distributed as dist

from ncclops.cluster import messages, store_values
from ncclops.cluster.fingerprint import Fingerprint
from ncclops.cluster.peers import Peers
from ncclops.cluster.records import RefusedRecord
from ncclops.cluster.rendezvous_backends import TorchBackend
from ncclops.cluster.rendezvous_link import Config, Link, NotNeeded, Refused
from ncclops.cluster.rendezvous_process import RendezvousProcess
from ncclops.cluster.round_member import RoundMember
from ncclops.cluster.shared_log import SharedLog
from ncclops.cluster.store_values import JobClaim, NodeFacts
from ncclops.host.kept_running import KeptRunning
from tests.conftest import clean_environ

LIMIT = timedelta(seconds=60)
# In the process: torch's optimizers show that all of torch is imported. In the second torch, the
# rendezvous needs more than the extension module, as that of another version may.
SHOWN = """
import sys
class Finder:
    def find_spec(name, path=None, target=None):
        if name == "torch.optim":
            print("all of torch", file=sys.stderr)
"""
NEEDS_MORE = """
        if name.endswith(".c10d_rendezvous_backend") and not hasattr(sys.modules["torch"], "optim"):
            raise ImportError("this torch needs more")
"""

IMPORTS_FOR_EVER = """
import sys, threading
class Finder:
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            print("imports torch", flush=True)
            threading.Event().wait()
sys.meta_path.insert(0, Finder)
"""
AGENT = """
import subprocess, sys
command = [sys.executable, "-P", "-m", "ncclops.cluster.rendezvous_process", *sys.argv[1:]]
process = subprocess.Popen(command, pass_fds=[int(sys.argv[1])])
print(process.pid, flush=True)
process.wait()
"""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> dist.TCPStore:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # a link sets it in its process
    return dist.TCPStore("127.0.0.1", 0, None, True, LIMIT, wait_for_workers=False)


def config(server: dist.TCPStore, run_dir: Path, rank: int) -> Config:
    return Config(
        backend="c10d", host="127.0.0.1", port=server.port, job_id="job", active=2, most=2,
        rank=rank, name=f"n{rank}", launcher=1, script="a.py", run_dir=str(run_dir),
        join_s=60, last_call_s=1, beat_s=0.2, missed_beats=300,
    )  # fmt: skip


def facts(rank: int) -> NodeFacts:
    print_ = Fingerprint(host=f"n{rank}", variables={}, facts={"ncclops": "1"})
    return NodeFacts(
        name=f"n{rank}", address="127.0.0.1", attempt=0, hosts=False, history=[], print=print_
    )


@pytest.fixture
def first(server: dist.TCPStore, tmp_path: Path) -> Iterator[RoundMember]:
    """Node 0 of two."""
    agent, ours = socket.socketpair()
    with agent, ours:
        yield RoundMember(Link(config(server, tmp_path, 0), ours), "round", 0, 2)


@pytest.mark.parametrize(
    "other", ["{}", "n1", json.dumps({"name": "n1", "address": "a", "attempt": 0, "print": []})]
)
def test_a_node_whose_facts_are_of_another_version_is_refused_for_all(
    server: dist.TCPStore, first: RoundMember, other: str
) -> None:
    server.set("round/facts/1", other)
    first._exchange(facts(0))
    refused = SharedLog(server, "round").read(0, LIMIT)
    assert isinstance(refused, RefusedRecord)
    assert refused.names == ["ncclops"]
    assert refused.lines == ["ncclops: node 0 cannot read what it knows of node 1"]
    assert server.check(["round/clock"]), "the others go on to read that they are refused"


@pytest.mark.parametrize(
    ("owner", "who"),
    [
        (
            store_values.encode(
                store_values.RankClaim(name="n 7", pid=1, at=2.0, run_dir="runs/x")
            ),
            r"already \(n 7: process 1, since 19.*, run directory runs/x\)",
        ),
        ("n7 1 2.0", "already: give"),
    ],
)
def test_a_rank_that_is_taken_is_refused_with_the_name_of_its_node(
    server: dist.TCPStore, first: RoundMember, owner: str, who: str
) -> None:
    server.set("round/node/0", owner)
    with pytest.raises(Refused, match=who):
        first.begin(facts(0))


@pytest.mark.parametrize(
    ("size", "why"),
    [
        (
            store_values.encode(JobClaim(nnodes="3:4", name="n 7", pid=1, at=2.0, script="a.py")),
            "but 3:4 on n 7: process 1, since 19",
        ),
        (
            store_values.encode(JobClaim(nnodes="2", name="n 7", pid=1, at=2.0, script="b.py")),
            "^a.py here, but job job in this store runs b.py on n 7: process 1, since 19",
        ),
        ("2 n7", "another version of ncclops has begun job job in this store"),
    ],
)
def test_another_job_of_the_same_name_is_refused(
    server: dist.TCPStore, tmp_path: Path, size: str, why: str
) -> None:
    server.set("ncclops/job/nnodes", size)
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(Refused, match=why):
        RendezvousProcess(config(server, tmp_path, 0), theirs).connect()


def test_a_clock_that_is_set_while_the_job_runs_is_no_difference(
    server: dist.TCPStore, first: RoundMember, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.set("round/facts/1", store_values.encode(facts(1)))
    server.set("round/offset/1", "0.0")
    monkeypatch.setattr(time, "time", lambda: 0.0)
    first._exchange(facts(0))
    assert abs(float(server.get("round/clock")) - datetime.now().timestamp()) < 3600


def test_torch_judges_nodes_by_a_clock_that_nobody_sets(
    server: dist.TCPStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    monkeypatch.setattr(dynamic_rendezvous, "datetime", datetime)
    agent, ours = socket.socketpair()
    with agent, ours:
        TorchBackend(Link(config(server, tmp_path, 0), ours))
        began = dynamic_rendezvous.datetime.now(UTC)
        boot = time.clock_gettime(time.CLOCK_BOOTTIME)
        monkeypatch.setattr(time, "clock_gettime", lambda _: boot + 7 * 86400)
        later = dynamic_rendezvous.datetime.now(UTC)
    assert timedelta(days=6) < later - began < timedelta(days=8)
    assert type(began) is datetime, "other nodes unpickle it"


@pytest.mark.parametrize(("rank", "size"), [(1, 1), (0, 1), (2, 2)])
def test_a_round_in_which_nodes_have_lost_each_other_is_refused(
    server: dist.TCPStore, tmp_path: Path, rank: int, size: int
) -> None:
    """As torch gives it out where clocks that differ were allowed: rank 1 of one node."""
    agent, ours = socket.socketpair()
    with agent, ours:
        backend = TorchBackend(Link(config(server, tmp_path, 0), ours))
        met = SimpleNamespace(rank=rank, world_size=size, store=server)
        backend._handler = SimpleNamespace(is_closed=lambda: False, next_rendezvous=lambda: met)
        with pytest.raises(Refused, match=f"node {rank} of {size} here.*do their clocks agree"):
            backend.meet(0)


@pytest.mark.parametrize(
    ("seen", "ends"),
    [(["n0"], Refused), (["n0", "n1"], NotNeeded), ([], NotNeeded)],
    ids=["too few", "enough", "not known"],
)
def test_a_node_was_in_reserve_only_where_enough_others_were_there(
    server: dist.TCPStore, tmp_path: Path, seen: list[str], ends: type[Exception]
) -> None:
    """One that gives up because too few nodes came ends the rendezvous for those that came."""
    from torch.distributed.elastic.rendezvous.api import RendezvousClosedError

    agent, ours = socket.socketpair()
    with agent, ours:
        backend = TorchBackend(Link(config(server, tmp_path, 0), ours))

        def closed() -> None:
            raise RendezvousClosedError

        backend._handler = SimpleNamespace(is_closed=lambda: False, next_rendezvous=closed)
        backend._seen = seen
        with pytest.raises(ends, match="^$" if ends is NotNeeded else "before 2 nodes were there"):
            backend.meet(0)


def test_the_job_ends_once_nodes_in_reserve_have_heard_it(
    server: dist.TCPStore, tmp_path: Path
) -> None:
    """With the first node goes its store: they would end with an error, "the store is lost"."""
    from torch.distributed.elastic.rendezvous.api import RendezvousClosedError

    waits, closed, heard = threading.Event(), threading.Event(), threading.Event()

    def next_round() -> None:
        waits.set()
        assert closed.wait(LIMIT.total_seconds())
        heard.set()
        raise RendezvousClosedError

    agent, ours = socket.socketpair()
    with agent, ours:
        reserve, last = (
            TorchBackend(Link(config(server, tmp_path, rank), ours)) for rank in range(2)
        )
        reserve._handler = SimpleNamespace(is_closed=lambda: False, next_rendezvous=next_round)
        last._handler = SimpleNamespace(shutdown=closed.set)

        def stay() -> None:
            with pytest.raises(NotNeeded):
                reserve.meet(0)

        waiting = threading.Thread(target=stay)
        waiting.start()
        assert waits.wait(LIMIT.total_seconds())
        last.close()
        assert heard.is_set()
        assert server.add("ncclops/job/waiting", 0) == 0
        waiting.join(LIMIT.total_seconds())


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", NEEDS_MORE])
def test_the_process_imports_no_more_of_torch_than_its_rendezvous_needs(
    server: dist.TCPStore, tmp_path: Path, more: str
) -> None:
    site = f"{SHOWN}{more}\nsys.meta_path.insert(0, Finder)\n"
    (tmp_path / "sitecustomize.py").write_text(site)
    (tmp_path / "events.jsonl").touch()
    path = os.pathsep.join([str(tmp_path), clean_environ()["PYTHONPATH"]])
    log, (ours, theirs) = tmp_path / "nodes.log", socket.socketpair()
    alone = replace(config(server, tmp_path, 0), active=1, most=1, beat_s=1)
    with ours, theirs, log.open("wb") as output:
        process = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "ncclops.cluster.rendezvous_process"),
                *(str(theirs.fileno()), alone.to_json()),
            ],
            env=clean_environ({"PYTHONPATH": path}),
            stderr=output,
            pass_fds=[theirs.fileno()],
        )
        ours.settimeout(60)
        ours.sendall(messages.encode(messages.Meet(0, facts(0))))
        with ours.makefile("rb") as lines:
            said = map(messages.decode, lines)
            met = next(each for each in said if isinstance(each, messages.Met | messages.NoRound))
        ours.sendall(messages.encode(messages.Leave(over=True)))
        assert process.wait(60) == 0, log.read_text()
    assert met == messages.Met(0, 1), log.read_text()
    assert ("ImportError: this torch needs more" in log.read_text()) is bool(more)
    assert ("all of torch\n" in log.read_text()) is bool(more)


def test_a_rendezvous_process_that_something_has_stopped_goes_on(
    starts_processes: None, server: dist.TCPStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KeptRunning, "PAUSE_S", 0.1)

    async def stop_it() -> None:
        received: asyncio.Queue[messages.Message] = asyncio.Queue()
        peers = Peers(config(server, tmp_path, 0), tmp_path / "nodes.log", received.put_nowait)
        peers.process.send_signal(signal.SIGSTOP)
        assert await received.get() == messages.Connected()
        await peers.leave(over=False)
        assert peers.process.returncode == 0

    asyncio.run(asyncio.wait_for(stop_it(), LIMIT.total_seconds()))


def test_a_node_that_is_stopped_while_it_waits_for_others_leaves_the_rendezvous(
    starts_processes: None, server: dist.TCPStore, tmp_path: Path
) -> None:
    """torch waits in the thread that would: the process was killed after 5 s, as if lost."""

    async def stop_it() -> None:
        received: asyncio.Queue[messages.Message] = asyncio.Queue()
        alone = replace(config(server, tmp_path, 0), beat_s=1)
        peers = Peers(alone, tmp_path / "nodes.log", received.put_nowait)
        peers.meet(0, facts(0))
        assert await received.get() == messages.Connected()
        assert await received.get() == messages.Waiting(["n0"], begun=False, first=ANY)
        await peers.leave(over=True)
        assert peers.process.returncode == 0
        assert server.add("ncclops/job/waiting", 0) == 0

    asyncio.run(asyncio.wait_for(stop_it(), LIMIT.total_seconds()))


def test_a_rendezvous_process_ends_with_its_agent_while_it_imports_torch(
    starts_processes: None, server: dist.TCPStore, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(IMPORTS_FOR_EVER)
    path = os.pathsep.join([str(tmp_path), clean_environ()["PYTHONPATH"]])
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen(
            [
                *(sys.executable, "-c", AGENT, str(theirs.fileno())),
                config(server, tmp_path, 0).to_json(),
            ],
            env=clean_environ({"PYTHONPATH": path}),
            stdout=subprocess.PIPE,
            pass_fds=[theirs.fileno()],
        )
        assert process.stdout is not None
        with process.stdout as output:
            number = int(output.readline())
            pidfd = os.pidfd_open(number)
            try:
                assert output.readline() == b"imports torch\n"
                process.kill()
                process.wait()
                assert select.select([pidfd], [], [], LIMIT.total_seconds())[0], "it is still there"
            finally:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                os.close(pidfd)


def test_a_rendezvous_process_whose_agent_has_ended_connects_to_no_later_store(
    starts_processes: None, server: dist.TCPStore, tmp_path: Path
) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, socket.socket() as nobody_listens:
        nobody_listens.bind(("127.0.0.1", 0))
        port = nobody_listens.getsockname()[1]
        waits_long = replace(config(server, tmp_path, 0), port=port, join_s=600)
        process = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "ncclops.cluster.rendezvous_process"),
                *(str(theirs.fileno()), waits_long.to_json()),
            ],
            env=clean_environ(),
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        ours.close()
        try:
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()
