"""What a script's packages keep for the life of the process is forgotten between two runs of it."""

from __future__ import annotations

import atexit
import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from ncclops.worker import leftovers
from tests.conftest import LIMIT_S, clean_environ


def test_deepspeed_makes_its_groups_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its modules keep them, and a start that follows would be given those that are gone."""
    released: list[object] = []
    groups, comm = ModuleType("deepspeed.utils.groups"), ModuleType("deepspeed.comm.comm")
    vars(groups)["_release_process_group_references"] = lambda *, group: released.append(group)
    vars(comm)["cdb"] = "the backend of the last start"
    for module in (groups, comm):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    leftovers.forget_deepspeed()
    assert released == [None], "those of all groups"
    assert vars(comm)["cdb"] is None

    del vars(groups)["_release_process_group_references"]  # an older version
    leftovers.forget_deepspeed()


def test_callbacks_of_an_import_that_fails_are_those_of_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module may train while it is imported; the next run imports it again."""
    dropped: list[str] = []
    monkeypatch.setattr(atexit, "register", lambda function: function)
    monkeypatch.setattr(atexit, "unregister", lambda function: dropped.append(function.__name__))
    monkeypatch.syspath_prepend(tmp_path)
    registers = "import atexit\n@atexit.register\ndef of_{0}(): pass\n"
    (tmp_path / "once.py").write_text(registers.format("once"))
    (tmp_path / "trains.py").write_text("import once\n" + registers.format("trains") + "1 / 0\n")
    callbacks = leftovers._AtExit()
    callbacks.watch()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            importlib.import_module("trains")
        callbacks.forget()
    assert dropped == ["of_trains"] * 2
    del sys.modules["once"]


# The executors are a module's, which stays imported between the two runs.
FIRST_RUN = """
import threading, time
from concurrent.futures import ThreadPoolExecutor
from ncclops.worker import leftovers

executor, both = ThreadPoolExecutor({threads}), threading.Barrier(2)
{first}
leftovers.threads.note({{threading.main_thread()}})
def save():
    time.sleep(0.2)
    print("saved")
"""
# What each run does; whether a thread of the first one is left at the end.
RUNS = {
    "idle threads beside one that waits for ever": (
        "executor.submit(threading.Event().wait)",
        "for _ in range(2): executor.submit(both.wait)\nsave()",
        True,
    ),
    "the thread of the first run saves for the second": (
        "executor.submit(print, end='').result()",
        "executor.submit(save)",
        False,
    ),
    "it saves, and another one waits for ever": (
        "executor.submit(print, end='').result()\n"
        "threading.Thread(target=threading.Event().wait).start()",
        "executor.submit(save)",
        True,
    ),
    "it still works for the first run": (
        "executor.submit(time.sleep, 0.2)",
        "executor.submit(save)",
        False,
    ),
}


@pytest.mark.parametrize("runs", RUNS)
def test_what_the_last_run_has_handed_to_an_executor_is_done_and_nothing_else_is_waited_for(
    runs: str, starts_processes: None
) -> None:
    first, last, is_left = RUNS[runs]
    script = FIRST_RUN.format(threads=3 if "ever" in runs else 1, first=first) + last
    done = subprocess.run(
        [sys.executable, "-c", f"{script}\nleftovers.end_process(0)"],
        env=clean_environ(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "saved\n")
    assert ("threads of an interrupted run are left" in done.stderr) == is_left
