"""Agents that do not meet say why, and one that stood still is still one of them."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.conftest import LIMIT_S, CompletedText, free_port
from tests.launch.conftest import Background

Start = Callable[..., Background]
Ncclops = Callable[..., CompletedText]


def of_two(
    rank: int,
    port: int,
    *,
    nnodes: str = "2",
    conf: str = "join_timeout=120",
    work: str = "true",
) -> list[str]:
    """The command line of a node of a static job, which does ``work`` in a shell."""
    return [
        *("launch", "--profile", "local-cpu", "--run-dir", f"node-{rank}", "--nnodes", nnodes),
        *("--node-rank", str(rank), "--master-addr", "127.0.0.1", "--master-port", str(port)),
        *("--rdzv-conf", conf, "--nproc-per-node", "1", "--no-python", "sh", "-c", work),
    ]


def start_and_wait_for(start: Start, output: Path, words: str, command: list[str]) -> Background:
    """Start the agent, and return when ``words`` are in what it says, which goes to ``output``."""
    with output.open("wb") as file:
        agent = start(*command, stderr=file)
    wait_for(output, words)
    return agent


def wait_for(output: Path, words: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while words not in output.read_text():
        assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.05)


def test_jobs_of_different_sizes_or_scripts_are_not_begun(
    background: Start, ncclops: Ncclops, tmp_path: Path
) -> None:
    """Else the workers of one node would wait for ranks that the other one never starts, or train
    with those of another job."""
    port, output = free_port(), tmp_path / "output"
    first = start_and_wait_for(background, output, "1/2 nodes", of_two(0, port))
    second = ncclops(*of_two(1, port, nnodes="3"))
    assert second.returncode == 1
    assert "--nnodes 3 here, but 2 on" in second.stderr
    another = [*of_two(1, port)[:-3], "true"]
    another[another.index("node-1")] = "another"
    third = ncclops(*another)
    assert third.returncode == 1
    where = f": process {first.pid}, since 2"
    assert "true here, but job none in this store runs sh on " in third.stderr
    assert where in third.stderr
    assert "run directory node-0: " in third.stderr  # as seen from here
    first.send_signal(signal.SIGTERM)
    assert first.wait(LIMIT_S) == 128 + signal.SIGTERM
    assert "stopping; no worker runs" in output.read_text()


@pytest.mark.extended
def test_when_the_first_node_gives_up_the_others_say_what_is_gone(
    background: Start, tmp_path: Path
) -> None:
    port, outputs = free_port(), [tmp_path / "output-0", tmp_path / "output-1"]
    first, second = (
        start_and_wait_for(
            background, outputs[rank], f"{rank + 1}/3", of_two(rank, port, nnodes="3")
        )
        for rank in range(2)
    )
    wait_for(outputs[0], "2/3 nodes")
    first.send_signal(signal.SIGTERM)
    assert (first.wait(LIMIT_S), second.wait(LIMIT_S)) == (128 + signal.SIGTERM, 1)
    output = outputs[1].read_text()
    assert "look at the output of the host that serves it" in output
    assert "Error: " not in output


def test_a_port_without_a_store_is_reported(ncclops: Ncclops) -> None:
    conf = "join_timeout=2,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=1"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        done = ncclops(*of_two(1, silent.getsockname()[1], conf=conf))
    assert done.returncode == 1
    assert "does not answer" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_agent_that_was_stopped_can_be_ended(background: Start, tmp_path: Path) -> None:
    """By SIGSTOP: SIGTERM alone would wait for it for ever."""
    first = start_and_wait_for(background, tmp_path / "output", "1/2 nodes", of_two(0, free_port()))
    (agent,) = psutil.Process(first.pid).children()
    agent.suspend()
    first.send_signal(signal.SIGTERM)
    assert first.wait(LIMIT_S) == 128 + signal.SIGTERM


def with_second_agent_stopped(
    background: Start, directory: Path, *, missed_beats: int
) -> tuple[list[Background], list[Path], psutil.Process]:
    """A job of two nodes that works until `go` is there: launchers, outputs, the stopped agent."""
    port, outputs = free_port(), [directory / "output-0", directory / "output-1"]
    conf = f"keep_alive_interval=1,keep_alive_max_attempt={missed_beats}"
    work = "until [ -e go ]; do sleep 0.1; done"
    agents = []
    for rank, output in enumerate(outputs):
        with output.open("wb") as file:
            agents.append(background(*of_two(rank, port, conf=conf, work=work), stderr=file))
    wait_for(outputs[1], "node 1 of 2")
    (second,) = psutil.Process(agents[1].pid).children()
    second.suspend()
    return agents, outputs, second


def test_an_agent_that_was_stopped_takes_no_node_for_lost(
    background: Start, tmp_path: Path
) -> None:
    """What the others have said meanwhile is there for it to read."""
    agents, outputs, second = with_second_agent_stopped(background, tmp_path, missed_beats=3)
    time.sleep(6)  # longer than a host may be silent, which is what this is about
    second.resume()
    (tmp_path / "go").touch()
    assert [agent.wait(LIMIT_S) for agent in agents] == [0, 0]
    for output in outputs:
        assert "2 workers exited 0 on 2 nodes" in output.read_text()
        assert "is lost" not in output.read_text()


@pytest.mark.extended
def test_the_end_of_a_node_whose_agent_does_not_answer_is_not_waited_for(
    background: Start, tmp_path: Path
) -> None:
    """Its rendezvous process goes on with the heartbeats, so the node is not lost by itself."""
    agents, outputs, second = with_second_agent_stopped(background, tmp_path, missed_beats=2)
    wait_for(outputs[0], "its agent has not answered for 8s; its workers run on")
    (tmp_path / "go").touch()
    assert agents[0].wait(LIMIT_S) == 1
    assert "was lost: its agent does not answer" in outputs[0].read_text()
    second.resume()
    assert agents[1].wait(LIMIT_S) == 1


@pytest.mark.extended
def test_a_node_in_reserve_that_was_not_needed_ends_well(background: Start, tmp_path: Path) -> None:
    """Its scheduler would take the whole job for failed."""
    port, go = free_port(), tmp_path / "go"
    background("store", "serve", "--port", str(port))  # else it may be gone before all have read it
    work = f"until [ -e {go} ]; do sleep 0.1; done"

    def node(number: int, words: str) -> Background:
        command = [
            *("launch", "--profile", "local-cpu", "--run-dir", f"node-{number}"),
            *("--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "job"),
            *("--rdzv-conf", "is_host=false", "--restart", "process", "--nproc-per-node", "1"),
            *("--no-python", "sh", "-c", work),
        ]
        return start_and_wait_for(background, tmp_path / f"output-{number}", words, command)

    agents = [node(0, "1/2 nodes"), node(1, "of 2: "), node(2, "waits to be needed")]
    go.touch()
    assert [agent.wait(LIMIT_S) for agent in agents] == [0, 0, 0]
    output = (tmp_path / "output-2").read_text()
    assert "stopped after" in output
    assert "this node in reserve was not needed" in output
    assert "they have begun, and this node waits to be needed (job job of " in output
    assert f", run directory {tmp_path / 'node-0'}; another job needs its own --rdzv-id" in output
