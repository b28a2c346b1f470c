"""Stacks as text, read; and our own, written and read back."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest

from ncclops.capture import python_stacks
from ncclops.stacks.frame import Frame
from ncclops.stacks.ownership import user_frame
from ncclops.stacks.parsing import last_traceback, main_thread, parse, traceback_frames

FAULTHANDLER = """\
# rank 1 on node7, pid 11, by signal
Thread 0x00007f11 (most recent call first):
  File "/usr/lib/python3.12/threading.py", line 355 in wait
  File "/home/me/ru n, dir/loader.py", line 7 in <lambda>

Current thread 0x00007f22 [ncclops-snapshots] (most recent call first):
  File "/usr/lib/python3.12/socket.py", line 295 in accept

Thread 0x00007f33 (most recent call first):
  File "/x/site-packages/torch/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "/home/me/train.py", line 41 in step
  File "/home/me/train.py", line ??? in <module>
"""


def test_faulthandlers_own_form_is_read() -> None:
    threads = parse(FAULTHANDLER)
    assert [thread.ident for thread in threads] == [0x7F11, 0x7F22, 0x7F33]
    assert threads[0].frames[1] == Frame("/home/me/ru n, dir/loader.py", 7, "<lambda>")
    assert threads[2].frames[-1].line == 0
    main = main_thread(threads)
    assert main is threads[2], "faulthandler begins with the newest thread"
    assert user_frame(main.frames) == Frame("/home/me/train.py", 41, "step")


def test_the_main_thread_is_known_by_name_wherever_it_is() -> None:
    text = FAULTHANDLER.replace("0x00007f11 (", "0x00007f11 [MainThread] (")
    main = main_thread(parse(text))
    assert main is not None
    assert main.ident == 0x7F11


def test_a_text_that_is_something_else_has_no_threads() -> None:
    assert parse("Traceback (most recent call last):\n  File 1\n\0\xff") == []
    assert main_thread([]) is None


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
        threads = parse(python_stacks.render_own(current).text)
    finally:
        done.set()
        thread.join()
    loader = next(each for each in threads if each.name == "the loader")
    assert any(frame.function.endswith("waits_here") for frame in loader.frames)
    assert threading.get_ident() not in {each.ident for each in threads}


PY_SPY = """\
Process 7: python train.py
Thread 12 (idle): "pin_memory"
    wait (threading.py:359)
Thread 0x7F3C (active): "MainThread"
    all_reduce (torch/distributed/distributed_c10d.py:2950)
    step (/home/me/train.py:57)
"""


def test_py_spys_form_is_read() -> None:
    threads = parse(PY_SPY)
    assert [thread.name for thread in threads] == ["pin_memory", "MainThread"]
    main = main_thread(threads)
    assert main is not None
    assert main.frames[-1] == Frame("/home/me/train.py", 57, "step")


TRACEBACK = """\
Traceback (most recent call last):
  File "/home/me/data.py", line 12, in fetch
    raise OSError
OSError

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/home/me/train.py", line 90, in <module>
    main()
  File "/home/me/train.py", line 57, in main
    raise ValueError
ValueError
"""


def test_a_traceback_has_its_innermost_frame_last() -> None:
    first, second = parse(TRACEBACK)
    assert first.frames == (Frame("/home/me/data.py", 12, "fetch"),)
    assert [frame.line for frame in second.frames] == [57, 90]
    assert [frame.line for frame in traceback_frames(TRACEBACK)] == [57, 90, 12]
    assert [frame.line for frame in traceback_frames(TRACEBACK.partition("\n")[2])] == [57, 90, 12]


def test_stacks_are_no_traceback() -> None:
    assert traceback_frames(FAULTHANDLER) == ()


def test_a_thread_that_was_dumped_twice_is_there_once() -> None:
    assert parse(FAULTHANDLER + FAULTHANDLER) == parse(FAULTHANDLER)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "line",
    [
        "  x" + " (a" * 300_000,
        "  x" + " (a:1)" * 150_000 + "b",
        "  " * 500_000 + "x",
        '  File "a", line 1, in x' + " " * 1_000_000 + "x",
        '  File "a' + '", line 1, in x' * 70_000 + "\t",
        '  File "a' + '", line 1' * 100_000 + "x",
        f'  File "a", line {"1" * 1_000_000}x',
        f'  File "a", line {"1" * 1_000_000}, in x',
        "Thread 0x1 [" + "] [" * 300_000,
        "Thread 1 (" + ") (" * 300_000,
    ],
    ids=lambda line: line[:16],
)
def test_the_time_grows_with_a_line_not_faster(line: str) -> None:
    """A script may have written it; what grew with its square kept a run from ending."""
    text = f"Traceback (most recent call last)\n{line}\nThread 0x2 (most recent call first):\n"
    assert len(parse(text)) <= 3
    assert len(traceback_frames(text)) <= 1
    assert len(last_traceback(text)) <= 1


OURS = """
def late():
    raise LookupError("late")

def wait(call, looks):
    try:
        call()
    except LookupError:
        looks.start()
        looks.join()
"""


def of_the_script() -> None:
    raise LookupError("in the script")


@pytest.mark.parametrize("whose", ["ours", "script"])
def test_what_our_own_code_raises_while_it_waits_is_not_how_the_script_was_left(whose: str) -> None:
    names: dict[str, Any] = {}
    exec(compile(OURS, "/x/ncclops/restart/_inbox.py", "exec"), names)
    found: list[python_stacks.OwnStacks] = []
    looks = threading.Thread(target=lambda: found.append(python_stacks.render_own()))
    names["wait"](names["late"] if whose == "ours" else of_the_script, looks)
    assert found[0].left_by == (None if whose == "ours" else "LookupError: in the script")


NOT_COMPILED = """\
Traceback (most recent call last):
  File "/home/me/train.py", line 3, in <module>
    import model
  File "/home/me/model.py", line 1
    def f(:
          ^
SyntaxError: invalid syntax
"""


def test_a_file_that_does_not_compile_is_where_the_user_stands() -> None:
    frames = (Frame("/home/me/model.py", 1, ""), Frame("/home/me/train.py", 3, "<module>"))
    assert traceback_frames(NOT_COMPILED) == frames
    assert [stack.frames for stack in parse(NOT_COMPILED)] == [frames]
    assert (str(frames[0]), frames[0].short) == ("/home/me/model.py:1", "model.py:1")
    assert parse('  File "/home/me/config.yaml", line 1\n') == []


def test_the_stack_of_one_who_left_by_it_begins_with_that_file() -> None:
    written: list[str] = []
    try:
        compile("def f(:", "/home/me/model.py", "exec")
    except SyntaxError as error:
        left_by = error
    looks = threading.Thread(
        target=lambda: written.append(python_stacks.render_own(None, left_by).text)
    )
    looks.start()
    looks.join()
    main = main_thread(parse(written[0]))
    assert main is not None
    assert main.frames[0] == Frame("/home/me/model.py", 1, "")
