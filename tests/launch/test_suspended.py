"""Ctrl-Z in a terminal gives the shell back, and the run goes on; `fg` shows it again."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import sys
from pathlib import Path

import pytest

from tests.conftest import LIMIT_S, clean_environ
from tests.launch.test_kill import wait_until

pytestmark = pytest.mark.slow

SCRIPT = """
import os, time
from ncclops import receipt
for step in range(100_000):
    receipt.step(step)
    print("step", step, flush=True)
    time.sleep(0.05)
    if os.path.exists("enough"):
        break
"""


class Shell:
    """An interactive bash on a terminal of its own."""

    def __init__(self, directory: Path) -> None:
        self.shown = b""
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.chdir(directory)
            environ = clean_environ({"PS1": "$ ", "TERM": "dumb"})
            os.execvpe("bash", ["bash", "--norc", "--noprofile", "-i"], environ)

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def wait_for(self, text: str) -> str:
        """What was shown since the last such wait, up to and with ``text``."""
        wanted = text.encode()
        while wanted not in self.shown:
            ready, _, _ = select.select([self._fd], [], [], LIMIT_S)
            assert ready, f"no {text!r} in {self.shown[-2000:]!r}"
            self.shown += os.read(self._fd, 1 << 16)
        found, _, self.shown = self.shown.partition(wanted)
        return (found + wanted).decode()

    def close(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.close(self._fd)
        os.waitpid(self.pid, 0)


def last_step(run: Path) -> int:
    lines = (run / "ranks" / "0" / "receipt.jsonl").read_bytes().splitlines()
    steps = [json.loads(line).get("step") for line in lines if line.endswith(b"}")]
    return max((step for step in steps if step is not None), default=-1)


def test_a_run_is_asked_and_stopped_while_its_launcher_is_stopped(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    shell = Shell(tmp_path)
    ncclops = f"{sys.executable} -m ncclops"
    try:
        shell.type(f"{ncclops} launch --restart none --nproc-per-node 2 --run-dir run train.py\n")
        shell.wait_for("step 5\r\n")
        shell.type("\x1a")
        shell.wait_for("Stopped")
        shell.type(f"{ncclops} status run; echo a$((1 + 1))b\n")
        assert "is stopped" not in shell.wait_for("\r\na2b")
        shell.type(f"{ncclops} stop run; echo code $?\n")
        assert "stopping gracefully" in shell.wait_for("\r\ncode 0")
        wait_until((tmp_path / "run" / "verdict.json").exists, "verdict")
        shell.type("fg\n")
        shell.wait_for("verdict: run/verdict.json")
    finally:
        shell.close()
    assert json.loads((tmp_path / "run" / "verdict.json").read_text())["outcome"] == "stopped"


def test_the_run_goes_on_while_its_launcher_is_stopped(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    run = tmp_path / "run"
    options = "--restart none --nproc-per-node 2 --run-dir run"
    shell = Shell(tmp_path)
    try:
        shell.type(f"{sys.executable} -m ncclops launch {options} train.py\n")
        shell.wait_for("step 5\r\n")
        shell.type("\x1a")
        said = shell.wait_for("Stopped")
        assert "ncclops: the run goes on; `fg` shows it again, `ncclops stop` ends it" in said
        shell.type("echo a$((1 + 1))b\n")
        shell.wait_for("\r\na2b")
        before = last_step(run)
        wait_until(lambda: last_step(run) > before + 20, "steps")
        shell.type("touch enough; echo c$((1 + 1))d\n")
        assert "[rank0]" not in shell.wait_for("\r\nc2d")
        wait_until((run / "verdict.json").exists, "verdict")
        shell.type("echo e$((1 + 1))f; fg\n")
        assert "[rank0]" not in shell.wait_for("\r\ne2f")
        rest = shell.wait_for("verdict: run/verdict.json")
        assert f"step {last_step(run)}\r\n" in rest
        shell.type("echo code $?\n")
        shell.wait_for("\r\ncode 0")
    finally:
        shell.close()
    events = [json.loads(line)["event"] for line in (run / "events.jsonl").read_text().splitlines()]
    assert set(events).isdisjoint({"hang", "fault", "straggler", "compile-stall", "stop-requested"})
