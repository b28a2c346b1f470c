"""Destroys a group while one of its workers is still busy with Python.

The worker runs the callback of a finished operation. It lingers there without the GIL, and cannot
end before it has had it once more.
"""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from ncclops.restart._groups.ending import keep_backends_longer_than_groups

LONG = timedelta(seconds=100)


def main() -> None:
    keep_backends_longer_than_groups()
    server = dist.TCPStore("127.0.0.1", 0, None, True, LONG, wait_for_workers=False)
    peer = os.fork()
    store = dist.TCPStore("127.0.0.1", server.port, None, False, LONG, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=int(peer == 0), world_size=2, timeout=LONG)
    if peer == 0:
        os.close(1)
        store.wait(["go"], LONG)
        dist.all_reduce(torch.ones(1))
        os._exit(0)

    called = threading.Event()

    def linger(_: torch.futures.Future[list[torch.Tensor]]) -> None:
        called.set()
        time.sleep(1.0)  # nothing announces that the other thread waits in the destructor

    done = dist.all_reduce(torch.ones(1), async_op=True).get_future().then(linger)
    store.set("go", "1")  # not before: what is finished already calls back at once, and from here
    called.wait()
    dist.destroy_process_group()
    done.wait()
    os.waitpid(peer, 0)
    print("went on", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
