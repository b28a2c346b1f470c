"""The script's own SIGTERM handler runs once, whichever thread is given the signals."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import os, signal, sys, threading, time
from ncclops.record import worker_record
from ncclops.worker.stopping import StopSignal

ready = threading.Event()
worker_record.report = lambda event: ready.set()  # there is no launcher here

def leave(*_):
    print("saved", flush=True)
    sys.exit(5)

def launcher():
    os.kill(os.getpid(), signal.SIGTERM)
    ready.wait()
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)  # as the kernel may choose

stop = StopSignal()
stop.watch()
signal.signal(signal.SIGTERM, leave)
try:
    threading.Thread(target=launcher, daemon=True).start()
    time.sleep(60)
finally:
    print("left", flush=True)
"""


def test_a_handler_s_exit_waits_for_a_signal_to_any_thread() -> None:
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (5, "saved\nleft\n"), done.stderr


FORKS = """
import os, signal, sys
from ncclops.worker.stopping import StopSignal

stop = StopSignal()
stop.watch()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
if (child := os.fork()) == 0:
    os.kill(os.getpid(), signal.SIGTERM)
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status))
"""


def test_a_child_that_the_script_has_forked_ends_at_once() -> None:
    """Nobody tells it that the others are ready: whoever joins it would wait for ever."""
    command = [sys.executable, "-c", FORKS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout == "5\n", done.stderr


ALONE = """
import os, signal, sys
from ncclops.record import worker_record
from ncclops.worker import stopping

worker_record.report = lambda event: None
stopping._STOP_COMES_WITHIN_S = 0.0
stop = stopping.StopSignal()
stop.watch()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
os.kill(os.getpid(), signal.SIGTERM)
"""


def test_a_handler_s_exit_waits_for_nobody_where_no_stop_is_under_way() -> None:
    """The others do not end: they may wait for this rank in a collective."""
    command = [sys.executable, "-c", ALONE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 5, done.stderr


TWICE = """
import os, signal
from ncclops.worker.stopping import StopSignal

def save(*arguments):
    print("begins", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    before(*arguments)
    print("ends", flush=True)

stop = StopSignal()
stop.watch()
signal.signal(signal.SIGTERM, lambda *_: print("before", flush=True))
before = signal.signal(signal.SIGTERM, save)
os.kill(os.getpid(), signal.SIGTERM)
"""


def test_a_second_signal_does_not_start_the_handler_within_itself() -> None:
    """It would write a checkpoint over the one that is being written."""
    command = [sys.executable, "-c", TWICE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout == "begins\nbefore\nends\n", done.stderr
