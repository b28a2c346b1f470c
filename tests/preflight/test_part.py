"""A node's part in the check of all nodes: its process, to its end."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from ncclops.preflight.part import NodeCheck, Part, Result
from tests.conftest import LIMIT_S, clean_environ

# A wait in the store that was given up, and that torch wakes once Python takes itself down.
LEFT_WAITING = """
import threading, time
from datetime import timedelta
import torch.distributed as dist
from ncclops.preflight import part

limit = timedelta(seconds=60)
store = dist.TCPStore("127.0.0.1", 0, None, True, limit, wait_for_workers=False)
other = dist.TCPStore("127.0.0.1", store.port, None, False, limit)
waiting = threading.Thread(target=store.wait, args=(["said"], limit), daemon=True)

class AtTheEnd:
    def __del__(self, say=other.set, sleep=time.sleep):
        say("said", "late")
        sleep(1.0)

def take_part(given):
    waiting.start()
    time.sleep(0.2)
    return part.Result(why=f"{given.name} did not hear")

at_the_end = AtTheEnd()
part.take_part = take_part
part.main()
"""


@pytest.mark.usefixtures("starts_processes")
def test_a_wait_that_was_given_up_does_not_abort_the_process() -> None:
    check = NodeCheck(edges=True)
    part = Part(
        host="127.0.0.1", port=1, meeting="m", count=2, least=2, rank=1, name="n1", check=check
    )
    done = subprocess.run(
        [sys.executable, "-c", LEFT_WAITING],
        input=msgspec.json.encode(part),
        capture_output=True,
        env=clean_environ(),
        timeout=LIMIT_S,
    )
    assert (done.returncode, done.stderr.decode()) == (0, "")
    assert msgspec.json.decode(done.stdout, type=Result).why == "n1 did not hear"
