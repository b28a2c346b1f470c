"""Start-up lasts until each process group has completed a collective, as the recorder knows."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import LIMIT_S, clean_environ

pytestmark = pytest.mark.slow

SOURCE = """
import time
from ncclops.receipts import recorder
from ncclops.receipts.collectives import CollectiveCounter
from ncclops.restart._interrupt.threads import main_thread_wait
from ncclops.restart.waiting import main_thread_is_in_collective
from ncclops.worker.start_up import StartUp

start_up = StartUp(
    CollectiveCounter(recorder.current(), main_thread_is_in_collective, main_thread_wait)
)

def leave():
    raise ValueError

def was_starting():
    try:
        start_up.observed(leave)()
    except ValueError:
        return start_up.was_starting

print("without torch", was_starting())
import torch, torch.distributed as dist
print("no group", was_starting())
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
print("no collective", was_starting())
second = dist.new_group([0])
for name, group in (("one of two groups", None), ("both", second)):
    dist.all_reduce(torch.ones(2), group=group)
    end = time.monotonic() + 20  # the recorder is told by another thread
    while group is not None and was_starting() and time.monotonic() < end:
        time.sleep(0.01)
    print(name, was_starting())
dist.new_group([0])
print("a third", was_starting())
dist.destroy_process_group()
print("afterwards", was_starting())
"""


def said(recorder: str) -> list[str]:
    """What the program prints with a recorder of so many entries."""
    names = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
    done = subprocess.run(
        [sys.executable, "-c", SOURCE],
        env=clean_environ(dict.fromkeys(names, recorder)),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_each_group_must_have_completed_a_collective() -> None:
    assert said("100") == [
        "without torch True",
        "no group True",
        "no collective True",
        "one of two groups True",
        "both False",
        "a third True",
        "afterwards False",
    ]


def test_without_a_recorder_it_is_not_known() -> None:
    lines = said("0")
    assert lines[0] == "without torch True"
    assert {line.rpartition(" ")[2] for line in lines[1:]} == {"None"}
