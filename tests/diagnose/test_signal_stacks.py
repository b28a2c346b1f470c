"""Stacks of another process, by a signal."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from ncclops.capture.signal_stacks import STACKS_NAME, StackDumper, dump_stacks

# Deep stacks of many threads: a dump takes milliseconds, and that of the main thread comes last.
PROGRAM = f"""
import faulthandler, fcntl, json, os, signal, sys, threading
stacks = os.memfd_create({STACKS_NAME!r})
fcntl.fcntl(stacks, fcntl.F_SETFL, os.O_APPEND)
faulthandler.register(signal.SIGRTMIN + 9, stacks, all_threads=True)
at_rest = threading.Barrier(41)
def deep(left):
    if left:
        deep(left - 1)
    at_rest.wait()
    signal.pause()
for _ in range(40):
    threading.Thread(target=deep, args=(80,), daemon=True).start()
at_rest.wait()
pid = os.getpid()
main = threading.main_thread().ident
def be_read():
    print(json.dumps([pid, pid, signal.SIGRTMIN + 9, stacks, main]), flush=True)
    sys.stdin.read()
be_read()
"""


@pytest.mark.slow
def test_stacks_are_read_once_all_are_written() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        dumper = StackDumper(*json.loads(process.stdout.readline()))
        for _ in range(100):
            text = dump_stacks(dumper, 10.0)
            assert text is not None
            assert "in be_read" in text
