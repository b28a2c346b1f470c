"""Hosts in network namespaces, with faults between them: the cause is named, and no other."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from ncclops.preflight.edges.model import Cause, Verdict
from ncclops.preflight.edges.sentences import tell
from tests.cluster.hosts import Background, Hosts, hosts, why_not
from tests.conftest import LIMIT_S, REPOSITORY

WHY_NOT = why_not()
pytestmark = [
    pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT)),
    pytest.mark.slow,
]


class Cluster:
    """``count`` hosts, and the preflight that they take part in."""

    def __init__(self, made: Hosts, directory: Path, count: int) -> None:
        self.hosts, self.directory, self.count = made, directory, count
        self.environs: dict[int, dict[str, str]] = {}
        self.files: dict[int, int] = {}
        # See edge_host. All that is waited for comes; a loaded machine starts eight interpreters
        # slowly, and some have to try several ports until one is not dropped.
        self.limits: tuple[str, ...] = ("100",)

    def preflight(self, *, store: str = "", absent: tuple[int, ...] = ()) -> Verdict:
        """What host 0 says; all hosts that take part are to say the same."""
        store = store or f"{self.hosts.address('h0')}:29400"
        took_part = [each for each in range(self.count) if each not in absent]
        started = [self._start(each, store) for each in took_part]
        for process in started:
            process.wait(2 * LIMIT_S)
        for number in range(self.count):
            print(self.hosts.output(f"h{number}") if number in took_part else "")
        verdicts = {
            number: (self.directory / f"{number}.json").read_bytes()
            for number in took_part
            if (self.directory / f"{number}.json").exists()
        }
        assert len(set(verdicts.values())) == 1
        verdict = msgspec.json.decode(next(iter(verdicts.values())), type=Verdict)
        assert all(told.what and told.remedy for told in tell(verdict))
        return verdict

    def _start(self, number: int, store: str) -> Background:
        command = [sys.executable, "-m", "tests.preflight.edge_host"]
        if number in self.files:
            limited = f'ulimit -n {self.files[number]}; exec "$@"'
            command = ["sh", "-c", limited, "sh", *command]
        return self.hosts.run(
            f"h{number}",
            *command,
            self.directory / f"{number}.json",
            *(store, str(self.count), str(number), *self.limits),
            env={"PYTHONPATH": str(REPOSITORY), **self.environs.get(number, {})},
        )


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[[int], Cluster]]:
    with_hosts = []

    def made(count: int) -> Cluster:
        context = hosts(count, tmp_path)
        with_hosts.append(context)
        return Cluster(context.__enter__(), tmp_path, count)

    yield made
    for context in with_hosts:
        context.__exit__(None, None, None)


def failures(verdict: Verdict) -> dict[str, Cause]:
    """The causes that convict, by kind; each kind once."""
    found = [each for each in verdict.causes if each.severity == "FAIL"]
    assert len({each.kind for each in found}) == len(found)
    return {each.kind: each for each in found}


def test_healthy_hosts_without_ipv4(make: Callable[[int], Cluster]) -> None:
    """NCCL takes IPv6 where there is nothing else, and so does the meeting."""
    cluster = make(4)
    for number in range(4):
        cluster.hosts.ip(f"h{number}", "addr", "flush", "dev", "eth0")
        address = f"fd00:93::{number + 1}/64"
        cluster.hosts.ip(f"h{number}", "addr", "add", address, "dev", "eth0", "nodad")
    verdict = cluster.preflight(store="[fd00:93::1]:29400")
    assert not failures(verdict)
    assert not verdict.failed_edges
    assert not verdict.unknown_edges
    assert {host.place.address for host in verdict.hosts if host.place} == {
        f"fd00:93::{number + 1}" for number in range(4)
    }


@pytest.mark.extended
def test_many_faults_at_once(make: Callable[[int], Cluster]) -> None:
    """A direction that is dropped, a blocked range of ports, small packets only, few descriptors,
    an interface that comes first and leads nowhere, 200 ms, and a name of the loopback."""
    cluster = make(8)
    made = cluster.hosts
    made.drop("h1", "from", f"dst {made.address('h2')}", "opening")
    made.drop("h3", "to", "dport 40000 50000")  # without state: what answers from there, too
    made.ip("hub", "link", "set", "to-h4", "mtu", "1400")
    cluster.files[5] = 64
    made.delay("h6", 0.2)
    made.ip("h7", "link", "set", "eth0", "down")
    made.ip("h7", "link", "set", "eth0", "name", "zzz0")
    made.ip("h7", "link", "set", "zzz0", "up")
    made.ip("h7", "addr", "flush", "dev", "zzz0")
    # Its number is higher, but its name begins as NCCL prefers.
    made.ip("h7", "link", "add", "ibmgmt", "type", "veth", "peer", "name", "peer0")
    made.ip("h7", "addr", "add", "172.31.9.1/24", "dev", "ibmgmt")
    made.ip("h7", "link", "set", "ibmgmt", "up")
    made.ip("h7", "link", "set", "peer0", "up")
    made.ip("h7", "addr", "add", f"{made.address('h7')}/24", "dev", "zzz0")
    cluster.environs[2] = {"GLOO_SOCKET_IFNAME": ""}
    made.names("h2", "127.0.0.1 localhost\n127.0.1.1 h2\n")
    verdict = cluster.preflight()
    found = failures(verdict)
    assert found.keys() == {"unreachable", "ports", "mtu", "files", "wrong-interface"}
    edge = found["unreachable"]
    assert (edge.shape, edge.a, edge.b, edge.how) == ("edge", (1,), (2,), "timeout")
    ports = found["ports"]
    assert (ports.shape, ports.a) == ("host-in", (3,))
    assert all(40000 <= port <= 50000 for port in ports.blocked)
    assert not any(40000 <= port <= 50000 for port in ports.open)
    mtu = found["mtu"]
    assert (mtu.shape, mtu.a, mtu.facts["passes"]) == ("host", (4,), "1400")
    assert found["files"].hosts == (5,)
    assert found["wrong-interface"].hosts == (7,)
    assert found["wrong-interface"].facts["better"] == "zzz0"
    remarks = {each.kind: each for each in verdict.causes if each.severity == "WARN"}
    assert remarks["loopback-name"].a == (2,)
    assert remarks["slow"].shape in ("host", "host-in", "host-out")
    assert remarks["slow"].a == (6,)
    assert float(remarks["slow"].facts["ms"]) >= 200


def test_who_does_not_take_part_is_named(make: Callable[[int], Cluster]) -> None:
    """One does not come, one falls silent, one has the address of another, one lacks the interface
    on which all others listen: nobody waits long."""
    cluster = make(8)
    cluster.limits = ("30", "12")  # a loaded machine starts eight interpreters slowly
    made = cluster.hosts
    made.ip("hub", "link", "add", "br1", "type", "bridge")
    made.ip("hub", "link", "set", "br1", "up")
    for number in (0, 1, 2, 3, 5, 7):
        made.add_link(f"h{number}", "ib0", "br1")
        address = f"192.168.50.{3 if number == 5 else number + 1}"  # that of host 2
        made.ip(f"h{number}", "addr", "add", f"{address}/24", "dev", "ib0")
    store = f"{made.address('h0')}:29400"
    mute = [sys.executable, "-m", "tests.preflight.mute_host", store, "8", "7"]
    made.run("h7", *mute, env={"PYTHONPATH": str(REPOSITORY)})  # often the first to arrive
    verdict = cluster.preflight(absent=(6, 7))
    found = failures(verdict)
    assert found.keys() == {"missing", "silent", "duplicate-address", "interface-missing"}
    assert "rank 6" in verdict.missing
    by_number = {n: each.rank for n, each in enumerate(verdict.hosts)}
    assert [by_number[each] for each in found["silent"].hosts] == [7]
    assert found["duplicate-address"].facts["address"] == "192.168.50.3"
    assert [by_number[each] for each in found["interface-missing"].hosts] == [4]


def test_the_command_says_it_on_every_host(tmp_path: Path) -> None:
    """Exit code, table, JSON and the list for the scheduler."""
    with hosts(3, tmp_path) as made:
        made.drop("h2", "to", "opening")
        meet = ["--nnodes", "3", "--rdzv-endpoint", f"{made.address('h0')}:29400"]
        command: list[str | Path] = ["preflight", *meet, "--exclude-file", tmp_path / "exclude"]
        agents = [made.start(f"h{n}", *command, *(["--json"] if n == 1 else [])) for n in range(3)]
        codes = [agent.wait(2 * LIMIT_S) for agent in agents]
        outputs = [made.output(f"h{number}") for number in range(3)]
        print(*outputs, sep="\n")
    assert codes == [3, 3, 3]
    for output in (outputs[0], outputs[2]):
        assert "FAIL  unreachable  no connection passes to h2 from every other host" in output
    document = json.loads(outputs[1][outputs[1].index("{") :])
    assert document["status"] == "FAIL"
    (cause,) = (each for each in document["edges"]["causes"] if each["severity"] == "FAIL")
    assert (cause["a"], cause["shape"], cause["hosts"]) == (["h2"], "host-in", ["h2"])
    assert document["edges"]["excluded"] == ["h2"]
    assert (tmp_path / "exclude").read_text() == "h2\n"


@pytest.mark.extended
def test_the_host_whose_collectives_fail_is_named_though_all_edges_pass(tmp_path: Path) -> None:
    """Gloo is led to an interface that host 1 does not have, which no connection shows."""
    with hosts(3, tmp_path) as made:
        meet = ["--nnodes", "3", "--rdzv-endpoint", f"{made.address('h0')}:29400"]
        skip = [f"--skip={name}" for name in ("host.shm", "host.space", "host.pids", "host.name")]
        command = ["preflight", "--collectives", *skip, *meet, "--window=50ms"]
        agents = [
            made.start(
                f"h{number}",
                *command,
                *(["--json"] if number == 0 else []),
                env={"GLOO_SOCKET_IFNAME": "ib0"} if number == 1 else None,
            )
            for number in range(3)
        ]
        codes = [agent.wait(4 * LIMIT_S) for agent in agents]
        outputs = [made.output(f"h{number}") for number in range(3)]
        print(*outputs, sep="\n")
    assert codes == [3, 3, 3]
    found = json.loads(outputs[0][outputs[0].index("{\n") :])["edges"]
    assert found["failed_edges"] == 0
    assert [(each["a"], each["b"], each["well"]) for each in found["pairs"]] == [
        (0, 1, False),
        (0, 2, True),
        (1, 2, False),
    ]
    (cause,) = (each for each in found["causes"] if each["severity"] == "FAIL")
    assert (cause["kind"], cause["a"], cause["hosts"]) == ("collective", ["h1"], ["h1"])
    assert "ib0" in cause["evidence"]
    for output in outputs[1:]:
        assert "FAIL  collective  an all_reduce of h1 with each other host" in output
