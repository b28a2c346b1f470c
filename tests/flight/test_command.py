"""``ncclops flight analyze`` as a user runs it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import CompletedText
from tests.flight import dumps
from tests.flight.dumps import entry

pytestmark = pytest.mark.slow

Run = Callable[..., CompletedText]
MEMBERS = {dumps.WORLD: [0, 1, 2], ("1", "tp"): [0, 1]}


def write(folder: Path, *, hung: bool) -> None:
    last = entry(3, state="scheduled" if hung else "completed", line=60)
    made = {r: [entry(1), entry(2), *([] if hung and r == 1 else [last])] for r in range(3)}
    for rank in (0, 1):
        made[rank].append(entry(1, group=("1", "tp"), record_id=2))
    contents = {rank: dumps.dump(entries, MEMBERS) for rank, entries in made.items()}
    dumps.write_pickles(folder, contents, "nccl_trace_rank_")


def test_a_hang_is_exit_1_and_one_sentence_first(ncclops_in_process: Run, tmp_path: Path) -> None:
    """Then the kind, both sides, and the groups."""
    write(tmp_path / "d", hung=True)
    done = ncclops_in_process("flight", "analyze", "d")
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("rank 1 never entered all_reduce #3 of group default_pg (0-2)")
    assert "never-arrived" in lines[1]
    assert "/home/user/train.py:60 step" in done.stdout
    assert any(line.startswith("tp") for line in lines)


def test_nothing_wrong_is_exit_0(ncclops_in_process: Run, tmp_path: Path) -> None:
    """And says on how many ranks that rests."""
    write(tmp_path / "d", hung=False)
    done = ncclops_in_process("flight", "analyze", "d")
    assert (done.returncode, done.stderr) == (0, "")
    assert "what 3 ranks recorded" in done.stdout


def test_the_document(ncclops_in_process: Run, tmp_path: Path) -> None:
    """``ncclops.flight/1``, and nothing else on stdout."""
    write(tmp_path / "d", hung=True)
    done = ncclops_in_process("flight", "analyze", "d", "--json")
    document = json.loads(done.stdout)
    assert (done.returncode, document["schema"]) == (1, "ncclops.flight/1")
    verdict = document["verdict"]
    assert (verdict["kind"], verdict["culprits"], verdict["seq"]) == ("never-arrived", [1], 3)
    assert (verdict["op"], verdict["group"], verdict["hung"]) == ("all_reduce", "default_pg", True)
    [finding] = document["findings"]
    assert {side["role"] for side in finding["sides"]} == {"waiting", "culprit"}
    world = document["groups"][0]
    assert (world["entered"], world["not_entered"], world["first_behind"]) == ([0, 2], [1], 1)


def test_unreadable_is_exit_2_and_one_line(ncclops_in_process: Run, tmp_path: Path) -> None:
    """The file and the reason."""
    (tmp_path / "nccl_trace_rank_0").write_bytes(b"\x80\x02cos\nsystem\n(U\x02lstR.")
    done = ncclops_in_process("flight", "analyze", "nccl_trace_rank_0")
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert line.startswith("ncclops: error: cannot read nccl_trace_rank_0: a pickle that wants")


def test_what_was_left_out_is_listed(ncclops_in_process: Run, tmp_path: Path) -> None:
    """One damaged file among others: a line on stderr, and the answer from the rest."""
    write(tmp_path / "d", hung=True)
    (tmp_path / "d" / "nccl_trace_rank_2").write_bytes(b"\x80\x02}")
    done = ncclops_in_process("flight", "analyze", "d")
    assert done.returncode == 1
    assert "ncclops: left out d/nccl_trace_rank_2: a pickle that is cut short" in done.stderr
    assert "rank 1 never entered" in done.stdout


def test_one_group_only(ncclops_in_process: Run, tmp_path: Path) -> None:
    """By a pattern over names and descriptions; a pattern that matches none is an error."""
    write(tmp_path / "d", hung=True)
    assert ncclops_in_process("flight", "analyze", "d", "--group", "t?").returncode == 0
    assert ncclops_in_process("flight", "analyze", "d", "--group", "default*").returncode == 1
    done = ncclops_in_process("flight", "analyze", "d", "--group", "pp")
    assert done.returncode == 2
    assert "there are default_pg, tp" in done.stderr


def test_torch_is_asked_beside_it(ncclops_in_process: Run, tmp_path: Path) -> None:
    """Its own analyser, with the members that it needs; its answer changes nothing of ours."""
    write(tmp_path / "d", hung=True)
    done = ncclops_in_process("flight", "analyze", "d", "--with-torch", "--json")
    opinion = json.loads(done.stdout)["torch"]
    assert opinion["ok"], opinion
    assert "missing ranks: {1}" in opinion["says"]


@pytest.mark.extended
def test_torchs_analyser_is_survived(ncclops_in_process: Run, tmp_path: Path) -> None:
    """It stops at an operation it does not know; we say so and answer."""
    made = {
        rank: dumps.dump([entry(1, op="nccl:all_fold", state="scheduled")], {dumps.WORLD: [0, 1]})
        for rank in (0, 1)
    }
    dumps.write_pickles(tmp_path / "d", made, "trace_")
    done = ncclops_in_process("flight", "analyze", "d", "--with-torch")
    assert done.returncode == 1
    assert "all ranks entered all_fold #1" in done.stdout
    assert "torch's analyser failed: AssertionError: all_fold" in done.stdout
