"""A script that runs a second time in its process finds nothing of the first in its way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import CompletedText
from tests.launch.conftest import Run

Ncclops = Callable[..., CompletedText]
Script = Callable[..., Path]
OnlyRun = Callable[[], Run]

# Fails once, in the middle of the data, with the loaders' workers alive.
LOADERS = """
import multiprocessing, os, signal
import torch
from torch.utils.data import DataLoader

def main():
    again = os.path.exists("once")
    before = len(multiprocessing.active_children())
    total = 0.0
    loader = DataLoader(torch.arange(64.0), batch_size=4, num_workers=2, prefetch_factor=2)
    for index, batch in enumerate(loader):
        total += batch.sum().item()
        if index == 3 and not again:
            open("once", "w").close()
            raise RuntimeError("once")
    print(before, total, callable(signal.getsignal(signal.SIGCHLD)), flush=True)

if __name__ == "__main__":
    main()
"""


def test_loader_workers_of_the_first_run_do_not_disturb_the_second(
    ncclops: Ncclops, script: Script, only_run: OnlyRun
) -> None:
    """None is left, and torch again watches those of the second run."""
    done = ncclops("launch", "--nproc-per-node", "1", script(LOADERS))
    assert done.returncode == 0, done.stderr
    assert only_run().stdout(0) == "0 2016.0 True\n"
    assert "DataLoader worker" not in done.stderr


SETTINGS = """
import argparse, faulthandler, logging, os, signal, sys, threading
import helper
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
arguments = parser.parse_args()
sys.argv[1:] = ["--changed"]
log = logging.getLogger("train")
log.setLevel(logging.INFO)
log.addHandler(logging.StreamHandler(sys.stdout))
helper.set_up()
log.info("lr %s", arguments.lr)
logging.getLogger("helper").info("once a run")
print("here", os.path.basename(os.getcwd()) != "elsewhere", "MODE" in os.environ)
print("hooks", threading.excepthook is threading.__excepthook__,
      sys.unraisablehook is sys.__unraisablehook__, flush=True)
os.environ["MODE"] = "changed"
threading.excepthook = sys.unraisablehook = print
os.makedirs("elsewhere", exist_ok=True)
os.chdir("elsewhere")
if not os.path.exists("../once"):
    open("../once", "w").close()
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 2)
    faulthandler.dump_traceback_later(2, exit=True)
    raise RuntimeError("once")
assert threading.Event().wait(3) is False  # longer than the timers of the first run
"""

# Stays imported, and remembers that it has set up its logger.
HELPER = """
import logging, sys
done = False
def set_up():
    global done
    if not done:
        logging.getLogger("helper").setLevel(logging.INFO)
        logging.getLogger("helper").addHandler(logging.StreamHandler(sys.stdout))
    done = True
"""


@pytest.mark.extended
def test_settings_are_back_and_no_line_is_logged_twice(
    ncclops: Ncclops, script: Script, only_run: OnlyRun
) -> None:
    script(HELPER, "helper.py")
    done = ncclops("launch", "--nproc-per-node", "1", script(SETTINGS), "--lr", "0.5")
    assert done.returncode == 0, done.stderr
    once = "lr 0.5\nonce a run\nhere True False\nhooks True True\n"
    assert only_run().stdout(0) == once * 2


THREADS = """
import os, threading, time
print("started", flush=True)
again = os.path.exists("once")
if not again:
    open("once", "w").close()
    never = threading.Event()
    threading.Thread(target=never.wait, name="prefetcher").start()
    raise RuntimeError("once")
own = threading.Thread(target=lambda: (time.sleep(0.5), print("last line", flush=True)))
own.start()
import atexit
atexit.register(print, "at exit", flush=True)
"""


def test_a_thread_that_cannot_be_ended_does_not_keep_the_process(
    ncclops: Ncclops, script: Script, only_run: OnlyRun
) -> None:
    """The main thread that would have stopped it was interrupted."""
    done = ncclops("launch", "--nproc-per-node", "1", script(THREADS))
    assert done.returncode == 0, done.stderr
    run = only_run()
    assert run.stdout(0) == "started\nstarted\nlast line\nat exit\n"
    assert "threads of an interrupted run are left: prefetcher" in run.stderr(0)


@pytest.mark.parametrize("train_in", [pytest.param("main", marks=pytest.mark.extended), "thread"])
def test_steps_count_as_progress_wherever_they_are_made(
    train_in: str, ncclops: Ncclops, script: Script, only_run: OnlyRun
) -> None:
    """A main thread that only joins executes nothing, and must not be taken for stuck; nor must
    one that evaluates for longer than the timeout and makes no step, once steps have been made.
    """
    source = (
        "import sys, threading, time\n"
        "from ncclops import receipt\n"
        "def train():\n"
        "    for n in range(9):\n"
        "        time.sleep(0.5)\n"
        "        receipt.step(n)\n"
        "def evaluate():\n"
        "    until = time.monotonic() + 3\n"
        "    while time.monotonic() < until: time.sleep(0.01)\n"
        "if sys.argv[1] == 'thread':\n"
        "    thread = threading.Thread(target=train)\n"
        "    thread.start(); thread.join()\n"
        "else:\n"
        "    receipt.step(0); evaluate(); receipt.step(1)\n"
        "    with receipt.phase('checkpoint', limit='20s'): time.sleep(4)\n"
    )
    done = ncclops(
        "launch", "--nproc-per-node", "1", "--profile", "local-cpu", "--timeout", "soft=2s",
        "--timeout", "hard=60s", script(source), train_in,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert only_run().named("restart") == []
