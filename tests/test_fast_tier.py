"""The watch over the fast tier, on a suite of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import LIMIT_S, REPOSITORY, clean_environ

SUITE = """
import multiprocessing, os, subprocess, threading, time
import pytest

def test_computes(): pass

def test_starts_a_command(): subprocess.run(["true"])

def test_forks():
    if child := os.fork():
        os.waitpid(child, 0)
    else:
        os._exit(0)

def test_spawns():
    process = multiprocessing.get_context("spawn").Process(target=len, args=("",))
    process.start()
    process.join()

def test_starts_a_command_in_a_thread():
    thread = threading.Thread(target=subprocess.run, args=(["true"],))
    thread.start()
    thread.join()

def test_sleeps(): time.sleep(0.001)

@pytest.fixture
def server(starts_processes): subprocess.run(["true"])

def test_asks_for_a_process(server): time.sleep(0.001)

@pytest.mark.slow
def test_says_that_it_is_slow(): subprocess.run(["true"])
"""


@pytest.mark.slow
def test_a_fast_test_that_starts_a_process_or_sleeps_fails(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["tests.fast_tier"]\n')
    (tmp_path / "test_suite.py").write_text(SUITE)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    suite = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "--tb=no"],
        cwd=tmp_path,
        env=clean_environ({"PYTHONPATH": str(REPOSITORY)}),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    passed, failed = (
        {
            line.split("::")[1].split(" ")[0]
            for line in suite.stdout.splitlines()
            if line.startswith(word)
        }
        for word in ("PASSED", "FAILED")
    )
    assert passed == {"test_computes", "test_asks_for_a_process", "test_says_that_it_is_slow"}
    assert failed == {
        "test_starts_a_command",
        "test_forks",
        "test_spawns",
        "test_starts_a_command_in_a_thread",
        "test_sleeps",
    }
