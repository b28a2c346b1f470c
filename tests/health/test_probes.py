"""The edges: a worker seen from the outside, and NVML with everything that it may lack."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ncclops.health import probes
from ncclops.record import shared_page
from ncclops.record.paths import RunPaths
from tests.receipts.conftest import worker_environ

WORKER = """
import sys, time
from ncclops import receipt
from ncclops.receipts import recorder
for n in range(3):
    receipt.step(n)
recorder.current().note_collectives((8, 7))
with receipt.phase("checkpoint", limit="12m"):
    print("ready", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.slow
def test_a_worker_seen_from_the_outside(tmp_path: Path) -> None:
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER],
        env=worker_environ(tmp_path),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"ready\n"
        seen = probes.read_rank(tmp_path, 0, worker.pid, alive=True)
        assert seen.steps == 3
        assert seen.incarnation == (worker.pid, 0)
        assert seen.tick is not None
        assert not seen.warming_up
        assert seen.phase == "checkpoint"
        assert seen.phase_limit is not None
        assert seen.phase_age is not None
        assert seen.phase_age < seen.phase_limit
        assert (seen.enqueued, seen.completed) == (8, 7)
        assert seen.cpu_s is not None
        assert seen.cpu_s > 0
        assert seen.gpu_active is None
        stranger = probes.read_rank(tmp_path, 0, os.getpid())
        assert (stranger.steps, stranger.tick) == (None, None), "the page is of another process"
    finally:
        worker.kill()
        worker.communicate()
        shared_page.settle(RunPaths(tmp_path).rank(0).progress)
    assert probes.read_rank(tmp_path, 0, worker.pid).cpu_s is None


def test_a_script_that_only_prints_is_known_by_its_lines(tmp_path: Path) -> None:
    assert probes.read_rank(tmp_path, 0, os.getpid()).warming_up
    seen = probes.read_rank(tmp_path, 0, os.getpid(), printed_steps=40)
    assert seen.steps == 40
    assert not seen.warming_up


@pytest.mark.slow
def test_cpu_time_includes_children(tmp_path: Path) -> None:
    before = probes.tree_cpu_s(os.getpid())
    assert before is not None
    burn = "import time\nwhile time.process_time() < 0.5: pass"
    subprocess.run([sys.executable, "-c", burn], check=True)
    after = probes.tree_cpu_s(os.getpid())
    assert after is not None
    assert after - before > 0.4
