"""A process whose script has ended, and which has threads or callbacks left that do not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ncclops.record import event_log
from ncclops.record.events import SlowExitEvent
from ncclops.record.paths import RunPaths
from ncclops.record.variables import RUN_DIR
from tests.conftest import clean_environ

pytestmark = pytest.mark.slow

CALLBACK = "import atexit\natexit.register(wait)"
THREAD = "threading.Thread(target=wait, name='uploader').start()"
PROGRAM = """
import threading, time
from ncclops.worker.exiting import watch_end
def wait():
    time.sleep(1000)
{leave}
threading.Thread(target=watch_end, args=(0.1, 1.0), daemon=True).start()
"""


@pytest.mark.parametrize(
    ("leave", "waits_for"),
    [
        (CALLBACK, "is in a callback at exit (<string>:5, in wait)"),
        (THREAD, "waits for its threads (uploader)"),
    ],
)
def test_it_is_said_what_keeps_the_process_which_is_ended_when_nothing_happens(
    tmp_path: Path, leave: str, waits_for: str
) -> None:
    RunPaths(tmp_path).rank(3).worker_events.parent.mkdir(parents=True)
    environ = clean_environ({RUN_DIR: str(tmp_path), "RANK": "3"})
    program = PROGRAM.format(leave=leave)
    done = subprocess.run([sys.executable, "-c", program], env=environ, timeout=60, check=False)
    assert done.returncode == 0
    said = event_log.read(RunPaths(tmp_path).rank(3).worker_events)
    assert [
        (event.waits_for, event.ended) for event in said if isinstance(event, SlowExitEvent)
    ] == [(waits_for, False), (waits_for, True)]


def test_a_process_that_works_at_its_end_is_left_to_that(tmp_path: Path) -> None:
    busy = "import atexit\natexit.register(lambda: print(sum(range(10**8))))"
    program = PROGRAM.format(leave=busy).replace("1.0)", "0.3)")
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=clean_environ({RUN_DIR: str(tmp_path), "RANK": "3"}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "4999999950000000\n")
