"""Ranks that are at the same place."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from ncclops.capture.run_snapshots import Collected, collect_run
from ncclops.diagnose import places
from ncclops.diagnose.culprit import did_not_come, failed_waiting, who_did_not_come
from ncclops.diagnose.places import RankView, cluster
from ncclops.diagnose.stacks_text import stack_lines
from ncclops.diagnose.where import Look
from ncclops.host import process_identity
from ncclops.host_name import host_name
from ncclops.rank_lists import rank_list
from ncclops.record import snapshot_server_record
from ncclops.record.incident_record import IncidentRecord
from ncclops.record.paths import RunPaths
from ncclops.record.snapshot_records import LastOperation
from ncclops.record.snapshot_server_record import SnapshotServerRecord
from ncclops.stacks.frame import Frame


def view(rank: int, line: int | None, doing: str | None = None) -> RankView:
    frame = None if line is None else Frame("/home/me/train.py", line, "step")
    return RankView(
        rank=rank,
        host="node7",
        pid=1,
        state="sleeping",
        frames=() if frame is None else (frame,),
        frame=frame,
        doing=doing,
        last=None,
        reason=None if frame else "the process died",
    )


def test_many_ranks_are_shown_in_few_lines() -> None:
    views = [view(rank, 7, "all_reduce") for rank in range(64) if rank not in (5, 9)]
    clusters = cluster([*views, view(5, 12), view(9, None)])
    assert [len(each.ranks) for each in clusters] == [62, 1, 1]
    assert clusters[0].place == "/home/me/train.py:7 in step, in all_reduce"
    assert clusters[1].place == "/home/me/train.py:12 in step"
    assert clusters[2].place == "unknown: the process died"
    assert rank_list(clusters[0].ranks) == "0-4, 6-8, 10-63"


def test_ranks_in_one_line_of_the_script_that_do_different_things_are_apart() -> None:
    """As in a trainer: all are in its ``fit``, and one of them reads data."""
    loading = Frame("/v/lib/python3.12/site-packages/torch/utils/data/dataloader.py", 701, "next")
    backward = Frame("/v/lib/python3.12/site-packages/torch/autograd/graph.py", 824, "run_backward")
    ranks = [(0, backward), (1, loading), (2, backward)]
    views = [replace(each := view(rank, 7), frames=(f, *each.frames)) for rank, f in ranks]
    waiting, alone = cluster(views)
    assert (waiting.ranks, waiting.place) == (
        (0, 2),
        "/home/me/train.py:7 in step, in run_backward",
    )
    assert (alone.ranks, alone.place) == ((1,), "/home/me/train.py:7 in step, in next")
    assert alone.frames[0] == loading


def test_what_a_rank_waits_for_in_our_own_loop_is_shown() -> None:
    loop = "/v/lib/python3.12/site-packages/ncclops/restart/loop.py"
    frames = (
        Frame("/usr/lib/python3.12/queue.py", 171, "get"),
        Frame(loop, 480, "RestartLoop._next_message"),
        Frame(loop, 237, "RestartLoop._await_abort"),
    )
    assert places.doing(frames) == "out of the script, by an exception"


def test_ranks_in_one_call_are_together_wherever_they_stand_in_it() -> None:
    """As while groups are made: one rank waits for the store, another one for its connections."""
    c10d = "/v/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py"
    rendezvous = "/v/lib/python3.12/site-packages/torch/distributed/rendezvous.py"
    called = (Frame(c10d, 1899, "init_process_group"), Frame("/home/me/train.py", 7, "main"))
    connecting = (Frame(c10d, 2169, "_new_process_group_helper"), *called)
    meeting = (Frame(rendezvous, 260, "_env_rendezvous_handler"), *called)
    assert [places.doing(connecting), places.doing(meeting)] == ["init_process_group"] * 2
    assert places.doing((connecting[0], called[1])) == "_new_process_group_helper"


def test_a_rank_in_an_import_below_a_call_does_not_wait_for_the_others_in_it() -> None:
    """They wait for it, while a file server is slow; so it is not at the same place."""
    torchs = "/v/lib/python3.12/site-packages/torch"
    c10d = f"{torchs}/distributed/distributed_c10d.py"
    importing = (
        Frame(f"{torchs}/_dynamo/config.py", 1, "<module>"),
        Frame("<frozen importlib._bootstrap>", 1360, "_find_and_load"),
    )
    called = (Frame(c10d, 1899, "init_process_group"), Frame("/home/me/train.py", 7, "main"))
    assert places.doing((*importing, *called)) is None
    rank = replace(
        view(0, None), frames=(*importing, *called), frame=called[-1], doing=None, reason=None
    )
    assert rank.place == (f"/home/me/train.py:7 in main, in an import ({torchs}/_dynamo/config.py)")
    # And torch.distributed itself, while it is imported, is no call of it.
    first = (Frame(c10d, 40, "<module>"), importing[1], Frame("/home/me/train.py", 1, "<module>"))
    assert places.doing(first) is None


def test_a_rank_in_our_own_code_is_outside_of_its_script_and_not_without_a_stack() -> None:
    """As before the script begins, and once more before a restart begins it again."""
    ours = "/v/lib/python3.12/site-packages/ncclops"
    frames = (
        Frame("/usr/lib/python3.12/functools.py", 1001, "cached_property.__get__"),
        Frame(f"{ours}/worker/in_process.py", 39, "_Attempts._attempt"),
        Frame(f"{ours}/restart/loop.py", 353, "RestartLoop._run_armed"),
    )
    outside = replace(view(0, None), frames=frames, reason="no flight recorder")
    assert outside.place == "outside of the script, in _Attempts._attempt of ncclops"
    torchs = (Frame("/v/lib/python3.12/site-packages/torch/nn/modules/linear.py", 7, "forward"),)
    assert replace(outside, frames=torchs).place == f"in {torchs[0]}"


@pytest.mark.parametrize(
    "tid", [2**22 + 1, threading.get_native_id()], ids=["of nobody", "of this process"]
)
def test_a_rank_that_has_become_another_program_is_said_to_be_one(tmp_path: Path, tid: int) -> None:
    """After an exec the process is there, its threads and descriptors are not. This one stands for
    it, with a thread that no process can have; with a thread of its own nothing is claimed."""
    here = process_identity.current()
    server = SnapshotServerRecord(
        rank=1,
        host=host_name(),
        pid=here.pid,
        started_ticks=here.started_ticks,
        tid=tid,
        stacks_fd=2**20,
        address="nobody-listens-here",
    )
    path = RunPaths(tmp_path).rank(1).snapshot_server
    path.parent.mkdir(parents=True)
    snapshot_server_record.write(path, server)
    collected = collect_run(tmp_path, [1], tmp_path / "where")
    seen = places.read_rank(tmp_path / "where", 1)
    if tid == threading.get_native_id():
        assert seen.doing is None
        assert "cannot be asked" in collected.reasons[1]
    else:
        assert collected.missing == (1,)
        name = (Path("/proc/self/stat").read_text().partition("(")[2]).rpartition(")")[0]
        assert seen.place == f"another program runs in its process (exec): {name}"


def test_of_ranks_at_one_place_what_each_entered_last() -> None:
    entered = LastOperation(op="all_reduce", seq=7, at=1.0, pending=True, desc="default_pg")
    last = {0: entered, 1: entered, 2: structs.replace(entered, seq=6)}
    views = tuple(replace(view(rank, 7), last=each) for rank, each in last.items())
    taken = Collected(Path("where/0"), (0, 1, 2), (), (), {})
    seen = stack_lines(Look(Path("run"), 1000.0, taken, views, tuple(cluster(views))))
    lines = ["".join(text for text, _ in parts).strip() for parts in seen]
    assert lines[1:3] == [
        "ranks 0, 1: last entered all_reduce number 7 of default_pg, not completed",
        "rank 2: last entered all_reduce number 6 of default_pg, not completed",
    ]


@pytest.mark.parametrize(
    ("said", "waited"),
    [
        ("RuntimeError: [Rank 0]: Rank 1 failed to pass monitoredBarrier in 3000 ms", True),
        ("RuntimeError: Rank 2 successfully reached monitoredBarrier, but received errors", True),
        ("RuntimeError: Connection closed by peer [127.0.0.1]:11924", False),
        (None, False),
    ],
)
def test_whoever_fails_in_a_monitored_barrier_has_waited(said: str | None, waited: bool) -> None:
    record = IncidentRecord(
        iteration=0, cause="exception", summary="s", first_faulty_rank=2, at=1.0, exception=said
    )
    assert failed_waiting(record, {"class": "peer-exit"}) == waited


@pytest.mark.parametrize(
    ("rank", "line", "known"),
    [("1", "12", (1, 12)), ("1", "9" * 5000, (1, 0)), ("9" * 5000, "12", None)],
)
def test_numbers_that_an_exception_names_may_be_of_any_length(
    rank: str, line: str, known: tuple[int, int] | None
) -> None:
    at = f"rank {rank} on n7 is at /t.py:{line} in f, in an import (/v/torch/_dynamo/config.py)"
    said = f"waited 60 s for rank {rank}, which had not come to a group: {at}"
    record = IncidentRecord(
        iteration=0, cause="exception", summary="s", first_faulty_rank=0, at=1.0, exception=said
    )
    missed = did_not_come(record, {"signature": "absent-rank"})
    found = None if missed is None else who_did_not_come(missed, [], {})
    frame = None if found is None else found.frame
    assert (None if found is None or frame is None else (found.rank, frame.line)) == known
    assert frame is None or frame.function == "f"
