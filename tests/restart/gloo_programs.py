"""Programs of test_blocked_in_gloo.py and of what peers notice of a rank that is done."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from scenarios import FAST, Worker

from ncclops import restart as inprocess
from ncclops.restart._groups import gloo_sockets


def sending_to_the_dead(worker: Worker) -> Any:
    """Rank 0 sends to rank 1, ``how``, which waits for that and is killed; the kernel refuses the
    send before Gloo's thread knows, as rank 0 has closed the connection for writing.

    Of a rank that is killed with unread data, the kernel does so by itself, for an instant.
    """

    def main(call: inprocess.CallWrapper) -> str:
        worker.join()
        if call.iteration > 0:
            return worker.finish(call)
        before = _connections()
        pair = dist.new_group([0, 1])
        (worker.directory / f"pid-{worker.rank}").write_text(str(os.getpid()))
        dist.barrier()
        is_send = worker.parameters["how"] == "send"
        if worker.rank == 1:
            received = worker.ones()
            if is_send:
                dist.irecv(received, 0, group=pair)
            else:
                dist.broadcast(received, 0, group=pair, async_op=True)
            time.sleep(0.3)  # nothing announces that rank 0 has been asked for it
            os.kill(os.getpid(), signal.SIGSTOP)
        if worker.rank == 0:
            while _state(int((worker.directory / "pid-1").read_text())) != "T":
                time.sleep(0.01)
            for connection in gloo_sockets.handles_on(_connections() - before):
                with connection:
                    connection.shutdown(socket.SHUT_WR)
            worker.note("sends")
            if is_send:
                dist.send(worker.ones(), 1, group=pair)
            else:
                dist.broadcast(worker.ones(), 0, group=pair, async_op=True).wait()
        dist.barrier()
        return worker.finish(call)

    return worker.wrap(main, **FAST)()


def returning_early(worker: Worker) -> Any:
    """In iteration 0, rank 1 returns while the others wait for it, and keeps its groups."""

    def main(call: inprocess.CallWrapper) -> str:
        worker.join()
        if call.iteration == 0 and worker.rank == 1:
            call.done_with_groups()
            return "early"
        dist.all_reduce(worker.ones())
        return worker.finish(call)

    return worker.wrap(main, **FAST)()


def one_rank_takes_longer(worker: Worker) -> Any:
    """Rank 1 is busy for 5 s after the last collective, and the others are done; where they say
    so, that is with the groups too. The groups are used by what follows the function."""

    def main(call: inprocess.CallWrapper) -> str:
        worker.join()
        if worker.rank == 1:
            time.sleep(5)
        if worker.parameters["done"]:
            call.done_with_groups()
        worker.note("done", iteration=call.iteration)
        return "done"

    value = worker.wrap(main, **FAST)()
    if not worker.parameters["done"]:
        dist.barrier()
    return value


def _connections() -> set[int]:
    """The inodes of Gloo's connections."""
    found = set()
    for sock in gloo_sockets.gloo_connections():
        with sock:
            found.add(os.fstat(sock.fileno()).st_ino)
    return found


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
