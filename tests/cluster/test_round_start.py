"""What node 0 makes of everybody's facts, and what each node makes of the start."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ncclops.agent.fork_server import seen_at_import
from ncclops.agent.hosted_store import StoreAddress
from ncclops.classify.policy import PastAttempt
from ncclops.cluster import round_start
from ncclops.cluster.fingerprint import Fingerprint
from ncclops.cluster.node_info import NodeInfo
from ncclops.cluster.records import StartRecord
from ncclops.cluster.rendezvous_config import RendezvousConfig
from ncclops.cluster.store_values import NodeFacts
from ncclops.record.event_values import NodeEntry

PAST = PastAttempt(class_="peer-exit", signature=None, policy="retry", progressed=False)
TWO_OF_THREE = RendezvousConfig(
    backend="c10d", active=2, most=3, host="n1", port=29400, job_id="job"
)


def facts(
    number: int,
    *,
    attempt: int = 0,
    failed: int = 0,
    variables: dict[str, str] | None = None,
    clock_offset_s: float = 0.0,
) -> NodeFacts:
    return NodeFacts(
        name=f"n{number}",
        address=f"10.0.0.{number}",
        attempt=attempt,
        hosts=False,
        history=[PAST] * failed,
        print=Fingerprint(host=f"n{number}", variables=variables or {}, facts={}),
        clock_offset_s=clock_offset_s,
    )


def start(*gathered: NodeFacts, external: bool = False) -> StartRecord:
    address = StoreAddress("n1", 4711)
    return round_start.start_record(gathered, "job", address, external=external)


def test_a_node_that_came_later_counts_with_those_that_were_there() -> None:
    """Else an agent that was started anew would have all nodes count from the start again."""
    made = start(facts(1), facts(2, attempt=3, failed=3), facts(3, attempt=1))
    assert (made.attempt, made.history) == (3, [PAST] * 3)
    assert made.names == ["n1", "n2", "n3"]
    assert made.addresses == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]


def test_each_start_has_a_place_of_its_own_in_the_store() -> None:
    first, second = start(facts(1)), start(facts(1))
    assert first.prefix.startswith("ncclops/job/")
    assert first.prefix != second.prefix


@pytest.mark.parametrize(
    ("rendezvous", "external", "expected"),
    [
        (replace(TWO_OF_THREE, most=2), False, {}),
        (replace(TWO_OF_THREE, most=2), True, {"NCCLOPS_STORE": "n1:4711"}),
        (
            replace(TWO_OF_THREE, most=2, local_addr="10.9.9.9"),
            False,
            {"NCCLOPS_RESTART_HOST": "10.9.9.9"},
        ),
    ],
)
def test_workers_get_the_store_and_the_address_that_they_cannot_know(
    rendezvous: RendezvousConfig, external: bool, expected: dict[str, str]
) -> None:
    made = start(facts(1, attempt=2), facts(2), external=external)
    given = dict(round_start.workers_environ(made, rendezvous, in_process=True, nproc=8))
    assert given.pop("NCCLOPS_STORE_PREFIX") == f"{made.prefix}/2"
    assert given.pop("NCCLOPS_NODES") == "n1 n2"
    assert given == expected


def test_with_spares_workers_get_the_number_of_ranks_that_train() -> None:
    made = start(facts(1), facts(2), facts(3))
    given = round_start.workers_environ(made, TWO_OF_THREE, in_process=True, nproc=8)
    assert given["NCCLOPS_ACTIVE_RANKS"] == "16"
    alone = round_start.workers_environ(made, TWO_OF_THREE, in_process=False, nproc=8)
    assert alone == {"NCCLOPS_NODES": "n1 n2 n3"}


def test_the_fork_server_of_before_the_round_serves_its_workers() -> None:
    """Another one would import everything once more, while all nodes wait."""
    made = start(facts(1), facts(2), facts(3), external=True)
    told = replace(TWO_OF_THREE, local_addr="10.9.9.9")
    given = round_start.workers_environ(made, told, in_process=True, nproc=8)
    assert seen_at_import({"HOME": "/home/me", **given}) == {"HOME": "/home/me"}


def test_the_nodes_are_recorded_and_introduced_with_the_spares_last() -> None:
    made = start(facts(1), facts(2), facts(3))
    assert round_start.nodes_of(made, 2) == [
        NodeEntry(rank=0, name="n1", address="10.0.0.1", spare=False),
        NodeEntry(rank=1, name="n2", address="10.0.0.2", spare=False),
        NodeEntry(rank=2, name="n3", address="10.0.0.3", spare=True),
    ]
    assert round_start.describe_round(made, 1, 2) == "node 1 of 3: n1 n2, in reserve: n3"
    assert round_start.describe_round(made, 1, 3) == "node 1 of 3: n1 n2 n3"


@pytest.mark.parametrize(
    ("here", "begun", "expected", "line"),
    [
        (["n2"], False, (), "1/2 nodes: n2; waiting for 1"),
        (["n2"], True, (), "1/2 nodes: n2; waiting for 1"),
        (["n2"], False, ("n1", "n2"), "1/2 nodes: n2; waiting for n1"),
        (["n1", "n2"], False, (), "2/2 nodes: n1 n2; last call for spares"),
        (
            ["n1", "n2"],
            True,
            (),
            "2/2 nodes: n1 n2; they have begun, and this node waits to be needed"
            f" (job {TWO_OF_THREE.job_id} of n1: process 7; another job needs its own --rdzv-id)",
        ),
    ],
)
def test_the_line_while_waiting_names_nodes_that_are_there_and_missing(
    here: list[str], begun: bool, expected: tuple[str, ...], line: str
) -> None:
    rendezvous = replace(TWO_OF_THREE, expected=expected)
    assert round_start.describe_missing(rendezvous, here, begun, "n1: process 7") == line


@pytest.mark.parametrize(
    ("expected", "line"),
    [
        ((), "1/3 nodes: n1; waiting for node 1 node 2"),
        (("n1", "n2", "n3"), "1/3 nodes: n1; waiting for n2 n3"),
        (("n1", "n2"), "1/3 nodes: n1; waiting for n2 node 2"),
    ],
)
def test_where_ranks_are_given_the_missing_ones_are_named(
    expected: tuple[str, ...], line: str
) -> None:
    rendezvous = replace(TWO_OF_THREE, expected=expected)
    assert round_start.describe_missing_ranks(rendezvous, ["n1"], [1, 2]) == line


def test_nodes_are_compared_by_their_own_facts() -> None:
    """With the offset of its clock, which only the meeting shows."""
    node = NodeInfo(
        rendezvous=TWO_OF_THREE,
        name="n1",
        print=Fingerprint(host="n1", variables={}, facts={}),
        allowed=(),
        script="train.py",
        listener=None,
    )
    odd = facts(2, variables={"NCCL_ALGO": "Tree"})
    compared = round_start.compare_hosts([facts(1, variables={"NCCL_ALGO": "Ring"}), odd], node)
    assert [each.lines()[0] for each in compared.of_weight("refused")] == [
        "NCCL_ALGO: must be equal on all ranks"
    ]
    allowed = replace(node, allowed=("NCCL_ALGO",))
    assert not round_start.compare_hosts([facts(1), odd], allowed).of_weight("refused")
    late = facts(2, clock_offset_s=3600.0)
    assert round_start.compare_hosts([facts(1), late], node) != round_start.compare_hosts(
        [facts(1), facts(2)], node
    )
