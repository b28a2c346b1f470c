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


# The thread of the first run waits for ever; the executor is a module's, which stays imported.
TWO_RUNS = """
import threading
from concurrent.futures import ThreadPoolExecutor
from ncclops.worker import leftovers

executor, both = ThreadPoolExecutor(3), threading.Barrier(2)
executor.submit(threading.Event().wait)
leftovers.threads.note({threading.main_thread()})
for _ in range(2):
    executor.submit(both.wait)
executor.submit(print, "the last task").result()
leftovers.end_process(7)
"""


def test_idle_threads_of_an_executor_do_not_keep_a_process_whose_first_run_was_left(
    starts_processes: None,
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TWO_RUNS],
        env=clean_environ(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (7, "the last task\n")
    assert "threads of an interrupted run are left: ThreadPoolExecutor-0_0" in done.stderr
