"""Of a stack the user's own lines are shown, and the frames of installed packages are counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from ncclops.diagnose import own_code
from ncclops.stacks.frame import Frame

NN = "/env/lib/python3.11/site-packages/torch/nn/modules"
TRACEBACK = f"""\
Traceback (most recent call last):
  File "/env/lib/python3.11/site-packages/ncclops/worker/script.py", line 107, in _run
    exec(load(), main.__dict__)
  File "/home/me/train.py", line 61, in main
    loss = mse_loss(model(x), y)
           ^^^^^^^^^^^^^^^^^^^^^
  File "{NN}/module.py", line 1778, in _wrapped_call_impl
    return self._call_impl(*args, **kwargs)
  File "{NN}/linear.py", line 134, in forward
    return F.linear(input, self.weight, self.bias)
RuntimeError: mat1 and mat2 shapes cannot be multiplied
"""


def shown(text: str) -> list[tuple[str, int, str, str, str | None]]:
    return [
        (line.file, line.line, line.function, line.text, line.calls)
        for line in own_code.of_traceback(text)
    ]


@pytest.mark.parametrize("prefix", ["", "[rank3]: "])
def test_the_frames_of_packages_are_counted_behind_the_line_that_led_there(prefix: str) -> None:
    text = "".join(prefix + line for line in TRACEBACK.splitlines(keepends=True))
    line = ("/home/me/train.py", 61, "main", "loss = mse_loss(model(x), y)", "2 frames in torch")
    assert shown(text) == [line]


def test_what_a_package_calls_back_is_the_users_again() -> None:
    text = TRACEBACK.replace("RuntimeError", '  File "/home/me/layers.py", line 9, in forward\nX')
    assert [(line[0], line[4]) for line in shown(text)] == [
        ("/home/me/train.py", "2 frames in torch"),
        ("/home/me/layers.py", None),
    ]


def test_of_two_exceptions_the_one_that_was_raised_in_the_end_counts() -> None:
    cause = TRACEBACK.replace("/home/me/train.py", "/home/me/earlier.py")
    both = f"{cause}\nThe above exception was the direct cause of the following:\n\n{TRACEBACK}"
    assert shown(both) == shown(TRACEBACK)


def test_a_file_that_does_not_compile_has_a_line_too() -> None:
    text = (
        'Traceback (most recent call last):\n  File "/home/me/train.py", line 2\n'
        "    def f(:\n          ^\nSyntaxError: invalid syntax\n"
    )
    assert shown(text) == [("/home/me/train.py", 2, "", "def f(:", None)]


def test_a_recursion_is_one_line_and_a_deep_stack_its_innermost_lines() -> None:
    again = '  File "/home/me/train.py", line 5, in walk\n    walk(n - 1)\n'
    text = TRACEBACK.replace("RuntimeError", again * 300 + "RuntimeError")
    assert [line[1] for line in shown(text)] == [61, 5]
    chain = "".join(f'  File "/home/me/f.py", line {n}, in f{n}\n' for n in range(20))
    deep = shown(TRACEBACK.replace("RuntimeError", chain + "RuntimeError"))
    assert [line[1] for line in deep] == list(range(14, 20))


def test_where_all_is_installed_the_package_that_is_not_the_framework_stands_in() -> None:
    text = TRACEBACK.replace("/home/me/", "/env/lib/python3.11/site-packages/trainer/")
    assert [line[2] for line in shown(text)] == ["main"]
    assert shown(TRACEBACK.replace("/home/me/", f"{NN}/")) == []
    assert shown("no traceback") == []


def test_a_running_stack_is_shown_with_the_text_of_its_files(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import time\n\n\ntime.sleep(1000)\n")
    frames = [Frame(f"{NN}/module.py", 3, "wait"), Frame(str(script), 4, "<module>")]
    (line,) = own_code.of_stack(frames)
    assert (line.text, line.calls) == ("time.sleep(1000)", "1 frame in torch")


def test_a_name_without_end_is_cut() -> None:
    """Of a function that a program has made, say: it is shown in a line, and kept in records."""
    text = TRACEBACK.replace("in main", f"in {'m' * 200_000}").replace("/home", f"/{'h' * 200_000}")
    ((file, _, function, _, _),) = shown(text)
    assert len(function) == 400
    assert len(file) <= 4096


def test_of_a_thread_the_users_frames_are_lines_and_what_they_have_called_is_counted() -> None:
    ours = "/env/lib/python3.11/site-packages/ncclops"
    frames = [
        Frame(f"{NN}/linear.py", 134, "forward"),
        Frame(f"{NN}/module.py", 1778, "call"),
        Frame("/home/me/train.py", 61, "step"),
        Frame(f"{ours}/worker/waits.py", 9, "wait"),
        Frame("/home/me/train.py", 70, "main"),
        Frame("/home/me/train.py", 70, "main"),
        Frame(f"{ours}/worker/script.py", 46, "run_script"),
    ]
    assert own_code.lines_of(frames) == [
        "... 2 frames in torch, the innermost linear.py:134 forward",
        "/home/me/train.py:61 in step",
        "... 1 frame in ncclops, the innermost waits.py:9 wait",
        "/home/me/train.py:70 in main",
    ]
    assert own_code.lines_of(frames[-1:]) == [
        "... 1 frame in ncclops, the innermost script.py:46 run_script"
    ]
    assert own_code.lines_of([]) == []
