"""Pools and queues of an earlier run of the script keep no later one from going on, or ending."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import LIMIT_S, clean_environ

# What stands between two runs of a script in one process.
SCRIPT = """
import multiprocessing, os, signal, sys
from ncclops.worker import fresh

def work(number):
    return number * number

def stay(number):
    import time
    time.sleep(1000)

if __name__ == "__main__":
    before = fresh.Snapshot.take()
    context = multiprocessing.get_context("fork")
    pool = context.Pool(2)
    assert pool.map(work, range(4)) == [0, 1, 4, 9]
    {then}
    before.restore()
    assert multiprocessing.active_children() == []
    del pool  # as the next run does with the module of this one
    again = context.Pool(2)
    assert again.map(work, range(4)) == [0, 1, 4, 9]
    again.terminate()
    again.join()
    print("again")
"""
KEPT = """
    globals()['kept'] = pool
    before.restore()
    try:
        kept.map_async(work, range(4)).get({limit})
    except ValueError as error:
        assert 'not running' in str(error)
    else:
        raise SystemExit('its tasks are done by nobody')
"""
THEN = {
    "waits": "pass",
    "works": "pool.map_async(stay, range(9))",
    "has lost a worker": "os.kill(pool._pool[0].pid, signal.SIGKILL)",
    "has a queue beside it": "queue = context.Queue(); queue.put(bytes(1 << 20))",
    "is to be freed later": "globals()['kept'] = pool",
    "is used again, as that of a module": KEPT.format(limit=LIMIT_S),
}


@pytest.mark.parametrize("then", THEN)
def test_a_pool_that_the_first_run_has_left_does_not_hold_the_second(
    then: str, tmp_path: Path, starts_processes: None
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.format(then=THEN[then]))
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env=clean_environ(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "again\n"), done.stderr
