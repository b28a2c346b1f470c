"""Where a rank stands, from stacks of several tools."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from ncclops.capture import python_stacks
from ncclops.flight import rank_files
from ncclops.flight.model import FlightEvidence, RankEvidence
from ncclops.flight.rank_files import read_stacks
from ncclops.flight.rank_place import place_in
from ncclops.record import snapshot_files
from ncclops.stacks.frame import Frame

WAITING = "done with the script, waiting for the others"
TORCH = "/opt/lib/python3.12/site-packages/torch"
FAULTHANDLER = f"""\
Thread 0x00007f3b58bfe6c0 [pin_memory] (most recent call first):
  File "/opt/lib/python3.12/threading.py", line 359 in wait
  File "/home/user/prefetch.py", line 12 in run

Current thread 0x00007f3c9c3f7740 (most recent call first):
  File "{TORCH}/distributed/distributed_c10d.py", line 2950 in all_reduce
  File "{TORCH}/distributed/c10d_logger.py", line 83 in wrapper
  File "/home/user/train.py", line 57 in step
  File "/home/user/train.py", line 90 in <module>
  File "<frozen runpy>", line 88 in _run_code
"""


def read_snapshot(folder: Path) -> RankEvidence:
    rank = RankEvidence(2)
    rank_files.read(FlightEvidence("run"), rank, folder)
    return rank


def short(frame: Frame | None) -> str | None:
    return None if frame is None else frame.short


def test_faulthandler_main_thread_comes_last() -> None:
    """And is inside what the user called."""
    place = place_in(FAULTHANDLER)
    assert place is not None
    assert (short(place.frame), place.inside) == ("train.py:57 step", "all_reduce")


@pytest.mark.parametrize(
    "inner",
    [
        f'File "{TORCH}/distributed/distributed_c10d.py", line 2169 in _new_process_group_helper',
        f'File "{TORCH}/distributed/rendezvous.py", line 260 in _env_rendezvous_handler',
    ],
)
def test_all_that_make_the_first_group_are_inside_one_call(inner: str) -> None:
    """Else one of them is said not to have entered what is a part of the other's call."""
    place = place_in(
        "Thread 0x1 [MainThread] (most recent call first):\n"
        f"  {inner}\n"
        f'  File "{TORCH}/distributed/distributed_c10d.py", line 1899 in init_process_group\n'
        '  File "/home/user/train.py", line 7 in <module>\n'
    )
    assert place is not None and place.inside == "init_process_group"


def test_a_named_main_thread_wins() -> None:
    """Pictures that a process takes of itself name their threads, the main one first."""
    text = FAULTHANDLER.replace("[pin_memory]", "[MainThread]")
    place = place_in(text)
    assert place is not None and short(place.frame) == "prefetch.py:12 run"


def test_a_traceback_has_its_innermost_frame_last() -> None:
    """As an exception prints it."""
    text = (
        "Traceback (most recent call last):\n"
        '  File "/home/user/train.py", line 90, in <module>\n    main()\n'
        '  File "/home/user/data.py", line 12, in fetch\n    raise OSError\nOSError\n'
    )
    place = place_in(text)
    assert place is not None and short(place.frame) == "data.py:12 fetch"


def test_a_rank_that_is_done_reports_it() -> None:
    """It waits in our loop until the others have finished as well."""
    loop = "/venv/lib/python3.11/site-packages/ncclops/restart/loop.py"
    text = (
        "Thread 0x1 [MainThread] (most recent call first):\n"
        f'  File "{loop}", line 260 in Loop._await_outcome\n'
        f'  File "{loop}", line 185 in Loop._iterate\n'
    )
    place = place_in(text)
    assert place is not None
    assert (place.frame, place.inside, place.what) == (None, None, WAITING)


def test_nothing_that_looks_like_a_stack() -> None:
    """Text of any kind has no place in it."""
    assert place_in("hello\nworld\n") is None


@pytest.mark.parametrize(
    ("below", "what"),
    [
        (f"{TORCH}/utils/data/dataloader.py", "its data loader"),
        (f"{TORCH}/distributed/checkpoint/state_dict_saver.py", "saving or loading a checkpoint"),
        ("/opt/lib/python3.12/subprocess.py", "a subprocess"),
        (f"{TORCH}/_inductor/compile_fx.py", "compiling"),
    ],
)
def test_what_a_rank_is_busy_with(below: str, what: str) -> None:
    """The machinery below the user's line says it in words; it is no collective."""
    text = (
        "Thread 0x1 (most recent call first):\n"
        f'  File "{below}", line 3 in inner\n  File "/home/user/train.py", line 4 in load\n'
    )
    place = place_in(text)
    assert place is not None
    assert (place.what, place.inside, short(place.frame)) == (what, None, "train.py:4 load")


@pytest.mark.parametrize("head", ["", "# the main thread has left the script, in other words\n"])
def test_a_rank_that_has_raised_is_in_no_collective(tmp_path: Path, head: str) -> None:
    """Our own snapshots say that it left, in a field, and show where it raised."""
    snapshot_files.write_stacks(tmp_path, head + FAULTHANDLER, "RuntimeError: connection closed")
    rank = read_snapshot(tmp_path)
    assert rank.place is not None
    assert rank.place.inside is None
    assert rank.place.left == "RuntimeError: connection closed"
    assert short(rank.place.frame) == "train.py:57 step"


def test_later_stacks_of_a_rank_replace_what_was_said_of_earlier_ones(tmp_path: Path) -> None:
    """A signal has the stacks dumped of a rank that has raised and then does not answer."""
    snapshot_files.write_stacks(tmp_path, FAULTHANDLER, "RuntimeError: connection closed")
    snapshot_files.write_stacks(tmp_path, FAULTHANDLER)
    place = read_snapshot(tmp_path).place
    assert place is not None and (place.left, place.inside) == (None, "all_reduce")


@pytest.mark.parametrize("left", [None, "", "[]", '{"exception": 3}', "{}"])
def test_stacks_without_a_readable_word_on_leaving_are_read(
    tmp_path: Path, left: str | None
) -> None:
    """Runs of older versions said so in a line of the stacks, which is for people."""
    line = "# the main thread has left the script by RuntimeError: over; it was raised at\n"
    (tmp_path / snapshot_files.STACKS).write_text(line + FAULTHANDLER)
    if left is not None:
        (tmp_path / snapshot_files.LEFT).write_text(left)
    place = read_snapshot(tmp_path).place
    assert place is not None and (place.left, place.inside) == (None, "all_reduce")


def test_what_a_process_that_has_raised_writes_of_itself_is_read_back(tmp_path: Path) -> None:
    try:
        raise RuntimeError("connection\n  closed")
    except RuntimeError as raised:
        error = raised
    written: list[python_stacks.OwnStacks] = []
    # From another thread: a process shows all but the one that asks.
    other = threading.Thread(target=lambda: written.append(python_stacks.render_own(None, error)))
    other.start()
    other.join()
    snapshot_files.write_stacks(tmp_path, written[0].text, written[0].left_by)
    place = read_snapshot(tmp_path).place
    assert place is not None and place.left == "RuntimeError: connection closed"


def test_waiting_in_c_is_read_off_the_users_line(tmp_path: Path) -> None:
    """`work.wait()` has no Python frame of its own."""
    script = tmp_path / "train.py"
    script.write_text("work = all_reduce(t)\nwork.wait()\n")
    (tmp_path / "stacks.txt").write_text(
        f'Thread 0x1 (most recent call first):\n  File "{script}", line 2 in <module>\n'
    )
    rank = RankEvidence(0)
    read_stacks(rank, tmp_path / "stacks.txt")
    assert rank.place is not None and rank.place.inside == "wait"
