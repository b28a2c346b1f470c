"""Which threads of a script are ended when process groups are aborted, and which live on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import concurrent.futures, os, queue, socket, sys, threading, time
from ncclops.restart._interrupt.other_threads import end_threads_at_work
from ncclops.restart.exception import RankShouldRestart

stop, ready = threading.Event(), []
there, here = socket.socketpair()
reading, writing = os.pipe()
jobs = queue.Queue()

def busy():
    ready.append(1)
    while not stop.is_set():
        sum(range(100))

def thread(target, name):
    made = threading.Thread(target=target, name=name, daemon=True)
    made.start()
    return made

def waits(call):
    def target():
        ready.append(1)
        call()
        lived.append(threading.current_thread().name)
    return target

lived = []
pool = concurrent.futures.ThreadPoolExecutor(2)
at_work = pool.submit(busy)
pool.submit(int).result()  # the pool's other thread has had work
working = thread(busy, "busy")
waiting = [
    thread(waits(jobs.get), "queue"),
    thread(waits(lambda: os.read(reading, 1)), "pipe"),
    thread(waits(lambda: here.recv(1)), "socket"),
    thread(waits(lambda: time.sleep(1)), "sleep"),
    thread(waits(stop.wait), "event"),
]
while len(ready) < 7:
    time.sleep(0.01)
time.sleep(0.2)  # those that wait are in the kernel
end_threads_at_work(RankShouldRestart)
working.join(60)
print("working:", working.is_alive())
print("job:", type(at_work.exception(60)).__name__)
jobs.put(1); os.write(writing, b"x"); there.send(b"x"); stop.set()
for each in waiting:
    each.join(60)
print("lived:", *sorted(lived))
print("pool:", pool.submit(sum, [2, 3]).result(60), pool.submit(sum, [4]).result(60))
"""


@pytest.mark.slow
def test_who_is_at_work_is_ended_and_who_waits_for_something_else_lives_on(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, script], env=os.environ, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [
        "working: False",
        "job: RankShouldRestart",
        "lived: event pipe queue sleep socket",
        "pool: 5 4",
    ]
    assert "Traceback" not in done.stderr
    assert "thread 'busy' is ended (now at " in done.stderr
