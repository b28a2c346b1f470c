"""Blocks in Gloo on a peer that is stopped, in the way argv names; prints how it ended."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from ncclops.restart._groups import gloo_sockets

LONG = timedelta(seconds=100)


def join(port: int, rank: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, None, False, LONG, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=LONG)


def say(line: str) -> None:
    """In one piece: two threads print."""
    os.write(1, f"{line}\n".encode())


def main(how: str) -> None:
    server = dist.TCPStore("127.0.0.1", 0, None, True, LONG, wait_for_workers=False)
    before = server.num_keys()
    peer = os.fork()
    if peer == 0:
        os.close(1)
        join(server.port, 1)
        time.sleep(1000)
    if how == "rendezvous":
        while server.num_keys() <= before:  # until the peer publishes its address
            time.sleep(0.05)
        time.sleep(1.0)  # ... and waits for ours
        os.kill(peer, signal.SIGSTOP)

    about_to_block = threading.Event()

    def abort() -> None:
        about_to_block.wait()
        time.sleep(1.0)  # nothing announces that a thread is blocked in C
        say(f"connections {gloo_sockets.shut_down_gloo_connections()}")
        say(f"listeners {gloo_sockets.answer_gloo_rendezvous(range(3))}")

    thread = threading.Thread(target=abort)
    thread.start()
    try:
        if how == "rendezvous":
            about_to_block.set()
        join(server.port, 0)
        if how == "collective":
            os.kill(peer, signal.SIGSTOP)
            about_to_block.set()
            dist.all_reduce(torch.ones(1))
        say("went on")
    except RuntimeError:
        say("raised")
    thread.join()
    server.set("alive", "1")
    say(f"store works {server.get('alive') == b'1'}")
    os.kill(peer, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
