"""Ends with a group that it has not destroyed, while one of its workers wants the GIL.

A reducer of DDP may be the last to hold the group when Python clears its modules.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from ncclops.restart._groups.ending import keep_backends_longer_than_groups

LONG = timedelta(seconds=100)

keep_backends_longer_than_groups()
server = dist.TCPStore("127.0.0.1", 0, None, True, LONG, wait_for_workers=False)
peer = os.fork()
store = dist.TCPStore("127.0.0.1", server.port, None, False, LONG, wait_for_workers=False)
dist.init_process_group("gloo", store=store, rank=int(peer == 0), world_size=2, timeout=LONG)
weights = [torch.nn.Parameter(torch.ones(1))]
of_model = dist.Reducer(weights, [[0]], [1 << 20], dist.group.WORLD)
if peer == 0:
    store.wait(["go"], LONG)
    dist.all_reduce(torch.ones(1))
    os._exit(0)

called = threading.Event()


def linger(_: torch.futures.Future[list[torch.Tensor]]) -> None:
    called.set()
    time.sleep(0.2)  # while the main thread has the GIL


dist.all_reduce(torch.ones(1), async_op=True).get_future().then(linger)
store.set("go", "1")  # not before: what is finished already calls back at once, and from here
called.wait()
os.waitpid(peer, 0)
print("last line", flush=True)
sys.setswitchinterval(1000)  # so that the worker does not get the GIL before Python ends
end = time.monotonic() + 1
while time.monotonic() < end:
    pass
