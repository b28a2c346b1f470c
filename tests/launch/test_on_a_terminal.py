"""A run on a real terminal, from its start line to its bar, and a look at it from another one."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from tests.on_a_terminal import OnTerminal

pytestmark = pytest.mark.slow

# Draws as tqdm does: on stderr, a bar of characters of three bytes.
SCRIPT = """
import os, sys, time
from ncclops import receipt
while not os.path.exists("begin"):
    time.sleep(0.05)
step = 0
while not os.path.exists("enough"):
    receipt.step(step)
    done = min(step, 40)
    print(f"\\r{done:3}%|{'█' * done}{' ' * (40 - done)}| end{step}", end="", file=sys.stderr)
    sys.stderr.flush()
    if step == 30:
        print("\\rcheckpoint saved", file=sys.stderr, flush=True)
    step += 1
    time.sleep(0.05)
print(file=sys.stderr)
"""


def test_a_bar_passes_through_and_the_run_can_be_watched(
    tmp_path: Path, starts_processes: None
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    options = ("--restart", "none", "--nproc-per-node", "1", "--run-dir", "run")
    run = OnTerminal(tmp_path, "launch", *options, "train.py", columns=80)
    watch = None
    try:
        run.until(lambda it: b"ncclops: 1 worker started, no process group yet (" in it.said)
        (tmp_path / "begin").touch()
        run.until(lambda it: b"checkpoint saved" in it.said)
        whole = f"[rank0]:  40%|{'█' * 40}| end5"  # 79 columns and less: nothing is cut
        run.until(lambda it: whole.encode() in it.said)
        watch = OnTerminal(tmp_path, "status", "--watch", "run")
        watch.until_shown("training · step ", " · 1 rank on ", ">    0  training")
        watch.type("l")
        watch.until_shown("rank 0: stderr.log", "checkpoint saved", f"|{'█' * 40}| end")
        watch.type("s")
        watch.until_shown("stacks at ", "rank 0: ", "train.py:")
        (tmp_path / "enough").touch()
        watch.type("q")
        watch.until_shown("completed · exit code 0")
        assert run.ended() == 0
        watch.type("q")
        assert watch.ended() == 0
    finally:
        for each in (run, watch):
            if each is not None:
                with suppress(OSError):
                    each.kill()
