"""NCCL's RAS service: asked over its protocol, and never of a release that crashes when asked."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from ncclops.flight import analyze, ras
from ncclops.flight.ras_client import RasError, ask, why_not
from tests.flight import dumps
from tests.flight.dumps import entry

PATIENCE = timedelta(seconds=20)
COUNTS = {"Broadcast": 1, "Reduce": 0, "AllGather": 0, "ReduceScatter": 0, "AllReduce": 40}


def member(rank: int, **counts: int) -> dict[str, Any]:
    status = {"init_state": 0, "async_error": 0, "abort_flag": False}
    return {
        "rank": rank,
        "host": f"node{rank}",
        "pid": 1000 + rank,
        "cuda_dev": 0,
        "nvml_dev": 0,
        "status": status,
        "collective_counts": COUNTS | counts,
    }


def answer(**changes: Any) -> dict[str, Any]:
    """The service's JSON about one communicator of three, of which one launched less."""
    missing = {"rank": 2, "host": "node2", "pid": 1002, "cuda_dev": 0, "nvml_dev": 0}
    comm = {
        "hash": "0xcf264af53edbe986",
        "secondary_hash": "0x1",
        "size": 3,
        "ranks_count": 2,
        "missing_ranks_count": 1,
        "ranks": [member(0), member(1, AllReduce=39)],
        "missing_ranks": [missing | {"status": {"unresponsive": True, "considered_dead": True}}],
    }
    return {
        "nccl_version": "2.29.3",
        "communicators_count": 1,
        "communicators": [comm | changes],
        "ras": {"collection_time_sec": 0.1, "timeouts_count": 0},
    }


TEXT = """\
NCCL version 2.29.2 compiled with CUDA 12.9
CUDA runtime version 12090, driver version 12090

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      4          8            1         32       32

Errors
======

INCOMPLETE
  Missing communicator data from 1 job process
  Process 1002 on node node2 managing GPU 5

Warnings
========

MISMATCH
  Communicator ranks have different collective operation counts
"""


class Server:
    """Implements the documented protocol on a free port; keeps what it received."""

    def __init__(self, reply: str, knows_json: bool = True) -> None:
        self._reply = reply
        self._known = {"client protocol 2": "SERVER PROTOCOL 2", "timeout 5": "OK"}
        if knows_json:
            self._known["set format json"] = "OK"
        self.received: list[str] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"

    def serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection, connection.makefile("rwb") as stream:
                self._converse(stream)

    def _converse(self, stream: Any) -> None:
        for raw in stream:
            line = raw.decode().strip().lower()
            self.received.append(line)
            if line == "verbose status":
                stream.write(self._reply.encode())
                return
            answer = self._known.get(line, f"ERROR: Unknown command '{line}'")
            stream.write(answer.encode() + b"\n")
            stream.flush()

    def close(self) -> None:
        # Wakes the thread in accept, which closing alone does not.
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


@contextmanager
def serving(server: Server) -> Iterator[Server]:
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield server
    finally:
        server.close()
        thread.join()


def folder(tmp_path: Path, version: str = "2.29.3") -> Path:
    """Dumps of ranks 0 and 1 of three, which wait for the third."""
    for rank in (0, 1):
        made = dumps.dump([entry(1), entry(2, state="scheduled")], {dumps.WORLD: [0, 1, 2]}) | {
            "comm_lib_version": version
        }
        stamp = {"rank": rank, "host": f"node{rank}", "pid": 1000 + rank, "taken_at": 2e9}
        (tmp_path / f"flight_{rank}.json").write_text(json.dumps(stamp | {"dump": made}))
    return tmp_path


@pytest.mark.slow
def test_json_is_asked_for_and_read(tmp_path: Path) -> None:
    """Who is dead, who launched less: as notes, in the document, and as evidence."""
    with serving(Server(json.dumps(answer()))) as server:
        report = analyze(folder(tmp_path), ras_address=server.address)
    assert server.received == [
        "client protocol 2",
        "timeout 5",
        "set format json",
        "verbose status",
    ]
    finding = report.findings[0]
    assert (finding.kind, finding.culprits) == ("rank-died", (2,))
    assert "rank 2 died (NCCL's RAS considers it dead)" in report.sentence
    assert any("rank 1 (pid 1001 on node1)" in note and "40" in note for note in report.notes)
    assert report.to_json()["ras"]["communicators"][0]["size"] == 3


@pytest.mark.slow
def test_a_release_without_json_answers_in_text(tmp_path: Path) -> None:
    """Its own words about errors and warnings are passed on."""
    with serving(Server(TEXT, knows_json=False)) as server:
        report = analyze(folder(tmp_path), ras_address=server.address)
    said = [note for note in report.notes if note.startswith("RAS: ")]
    assert "RAS: Process 1002 on node node2 managing GPU 5" in said
    assert "RAS: MISMATCH" in said
    assert not any("Job summary" in note for note in said)


@pytest.mark.parametrize(
    ("version", "safe"),
    [
        ("2.26.5", False),
        ("2.27.3", False),
        ("2.27.7", False),
        ("2.28.9", False),
        ("2.29.1", False),
        ("2.29.2", True),
        ("2.30", True),
        ("2.32.6", True),
        ("", False),
    ],
)
def test_which_releases_may_be_asked(version: str, safe: bool) -> None:
    """Those that are known not to crash in a report with missing ranks."""
    assert (why_not(version) is None) == safe


@pytest.mark.slow
def test_an_unsafe_release_is_not_connected_to(tmp_path: Path) -> None:
    """The sick job is not made worse; it is said why."""
    with serving(Server(json.dumps(answer()))) as server:
        report = analyze(folder(tmp_path, "2.27.3"), ras_address=server.address)
    assert server.received == []
    assert any("NVIDIA/nccl 1762" in note for note in report.notes)


@pytest.mark.slow
def test_a_saved_answer_is_read(tmp_path: Path) -> None:
    """An incident may hold one; nothing is asked for it."""
    (tmp_path / "ras.json").write_text(json.dumps(answer()))
    assert "RAS considers it dead" in analyze(folder(tmp_path)).sentence


@pytest.mark.slow
def test_no_rank_answers(tmp_path: Path) -> None:
    """The verdict stands without it."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        address = f"127.0.0.1:{held.getsockname()[1]}"
    report = analyze(folder(tmp_path), ras_address=address)
    assert report.findings[0].culprits == (2,)
    assert any("no answer" in note for note in report.notes)


def test_a_stopped_process_that_took_the_connection() -> None:
    """Connections are accepted by any process that shares the port: a second try, then an error."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(RasError, match="no answer"):
            ask(address, timedelta(seconds=0.4))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hello",
        "{",
        "{}",
        '{"nccl_version": 1, "communicators": 7}',
        '{"nccl_version": 1, "communicators": [{"hash": "a", "size": 1e999, "ranks": []}]}',
    ],
)
def test_an_answer_that_makes_no_sense(text: str) -> None:
    """One line, whatever it is."""
    with pytest.raises(RasError):
        ras.read(text)


def test_something_else_on_the_port() -> None:
    """Another service says something else than NCCL's does."""
    server = Server("")
    server._converse = lambda stream: stream.write(b"220 smtp ready\n")  # type: ignore[method-assign]
    with serving(server), pytest.raises(RasError, match="not NCCL's service"):
        ask(server.address, PATIENCE)


def test_ranks_in_trouble_are_named() -> None:
    """An asynchronous error or an abort on a rank that answers."""
    comm = answer()["communicators"][0]
    comm["ranks"][0]["status"]["async_error"] = "ncclRemoteError"
    comm["ranks"][1]["status"]["abort_flag"] = True
    view = ras.read(json.dumps(answer(ranks=comm["ranks"])))
    states = [rank.state for rank in view.communicators[0].broken]
    assert states == ["asynchronous error ncclRemoteError", "aborted"]
