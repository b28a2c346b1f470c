"""Ranks in a tight loop of collectives, aborted at random moments, again and again.

One rank aborts, the others follow a moment later, as after a fault. Prints how often a rank was
left waiting. Gloo's own timeout is what ends such a wait here; in real life it is half an hour.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from datetime import timedelta

import torch
import torch.distributed as dist

from ncclops.restart._groups import gloo_sockets
from ncclops.restart._groups.ending import keep_backends_longer_than_groups

LONG = timedelta(seconds=100)
GLOO_TIMEOUT = timedelta(seconds=10)


def main(world: int, rounds: int) -> None:
    keep_backends_longer_than_groups()
    server = dist.TCPStore("127.0.0.1", 0, None, True, LONG, wait_for_workers=False)
    children = []
    rank = 0
    for child_rank in range(1, world):
        child = os.fork()
        if child == 0:
            rank = child_rank
            break
        children.append(child)
    store = connect(server.port)
    forgotten = sum(one_round(store, number, rank, world) for number in range(rounds))
    store.add("forgotten", forgotten)
    if rank:
        os._exit(0)
    for child in children:
        os.waitpid(child, 0)
    print("rounds", rounds, "forgotten", store.add("forgotten", 0), flush=True)
    os._exit(0)


def connect(port: int) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", port, None, False, LONG, wait_for_workers=False)


def one_round(store: dist.TCPStore, number: int, rank: int, world: int) -> bool:
    """Whether this rank was left waiting."""
    round_store = dist.PrefixStore(str(number), store)
    dist.init_process_group(
        "gloo", store=round_store, rank=rank, world_size=world, timeout=GLOO_TIMEOUT
    )
    out = threading.Event()
    aborter = threading.Thread(target=abort, args=(connect(store.port), number, rank, world, out))
    aborter.start()
    try:
        while True:
            dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        forgotten = "Timed out" in str(error)
    out.set()
    aborter.join()
    dist.destroy_process_group()
    if store.add(f"{number}/out", 1) == world:
        store.set(f"{number}/all-out", "1")
    store.wait([f"{number}/all-out"], LONG)
    gloo_sockets.release_gloo_connections()
    return forgotten


def abort(store: dist.Store, number: int, rank: int, world: int, out: threading.Event) -> None:
    if rank == number % world:
        out.wait(random.Random(number).uniform(0, 0.01))
        store.set(f"{number}/abort", "1")
    store.wait([f"{number}/abort"], LONG)
    gloo_sockets.shut_down_gloo_connections()
    while not out.wait(0.05):
        gloo_sockets.shut_down_gloo_connections()  # as the interrupter does


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
