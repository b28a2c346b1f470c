"""Stacks as text and back, the user's own frame, and ranks that are at the same place."""

from __future__ import annotations

import sys
import threading

from ncclops.capture import python_stacks
from ncclops.capture.python_stacks import Frame
from ncclops.diagnose import places
from ncclops.diagnose.places import RankView, cluster, shown_ranks, user_frame

FAULTHANDLER = """\
# rank 1 on node7, pid 11, by signal
Thread 0x00007f11 (most recent call first):
  File "/usr/lib/python3.12/threading.py", line 355 in wait
  File "/home/me/ru n, dir/loader.py", line 7 in <lambda>

Current thread 0x00007f22 [ncclops-witness] (most recent call first):
  File "/usr/lib/python3.12/socket.py", line 295 in accept

Thread 0x00007f33 (most recent call first):
  File "/x/site-packages/torch/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "/home/me/train.py", line 41 in step
  File "/home/me/train.py", line ??? in <module>
"""


def test_faulthandlers_own_form_is_read() -> None:
    threads = python_stacks.parse(FAULTHANDLER)
    assert [thread.ident for thread in threads] == [0x7F11, 0x7F22, 0x7F33]
    assert threads[0].frames[1] == Frame("/home/me/ru n, dir/loader.py", 7, "<lambda>")
    assert threads[2].frames[-1].line == 0
    main = python_stacks.main_stack(threads)
    assert main is threads[2], "faulthandler begins with the newest thread"
    assert user_frame(main.frames) == Frame("/home/me/train.py", 41, "step")


def test_the_main_thread_is_known_by_name_wherever_it_is() -> None:
    text = FAULTHANDLER.replace("0x00007f11 (", "0x00007f11 [MainThread] (")
    main = python_stacks.main_stack(python_stacks.parse(text))
    assert main is not None
    assert main.ident == 0x7F11


def test_a_text_that_is_something_else_has_no_threads() -> None:
    assert python_stacks.parse("Traceback (most recent call last):\n  File 1\n\0\xff") == []
    assert python_stacks.main_stack([]) is None


def test_own_stacks_are_in_the_same_form_with_names() -> None:
    running, done = threading.Event(), threading.Event()

    def waits_here() -> None:
        running.set()
        done.wait()

    thread = threading.Thread(target=waits_here, name="the loader")
    thread.start()
    running.wait()
    try:
        current = dict(sys._current_frames())
        threads = python_stacks.parse(python_stacks.render_own(current))
    finally:
        done.set()
        thread.join()
    loader = next(each for each in threads if each.name == "the loader")
    assert any(frame.function.endswith("waits_here") for frame in loader.frames)
    assert threading.get_ident() not in {each.ident for each in threads}


def test_a_script_that_is_an_installed_package_has_frames_too() -> None:
    frames = [
        Frame("/v/lib/python3.12/site-packages/torch/nn/modules/module.py", 1, "_call_impl"),
        Frame("/v/lib/python3.12/site-packages/trainer/loop.py", 9, "fit"),
    ]
    assert user_frame(frames) == frames[1]
    assert user_frame(frames[:1]) is None


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


def test_many_ranks_are_told_in_few_lines() -> None:
    views = [view(rank, 7, "all_reduce") for rank in range(64) if rank not in (5, 9)]
    clusters = cluster([*views, view(5, 12), view(9, None)])
    assert [len(each.ranks) for each in clusters] == [62, 1, 1]
    assert clusters[0].place == "/home/me/train.py:7 in step, in all_reduce"
    assert clusters[1].place == "/home/me/train.py:12 in step"
    assert clusters[2].place == "unknown: the process died"
    assert shown_ranks(clusters[0].ranks) == "0-4, 6-8, 10-63"


def test_ranks_in_short() -> None:
    assert shown_ranks([3, 1, 0]) == "0, 1, 3"
    assert shown_ranks([]) == ""


def test_what_a_rank_waits_for_in_our_own_loop_is_said() -> None:
    loop = "/v/lib/python3.12/site-packages/ncclops/restart/loop.py"
    frames = (
        Frame("/usr/lib/python3.12/queue.py", 171, "get"),
        Frame(loop, 480, "RestartLoop._news"),
        Frame(loop, 237, "RestartLoop._await_abort"),
    )
    assert places._doing(frames) == "out of the script, by an exception"
