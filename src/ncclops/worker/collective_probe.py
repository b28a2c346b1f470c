"""The ranks of one node in a short all_reduce between its GPUs, or those of two nodes, for
``ncclops preflight``.

    python -m ncclops.worker.collective_probe nccl|gloo PARENT RANKS FIRST

``RANKS`` processes are forked from this one, which has imported torch, from the rank ``FIRST`` on.
Size and meeting place come from torchrun's variables. Sizes double until an all_reduce takes
long enough to be measured well, or the largest size is reached. Local rank 0 prints a line of JSON:
``{"bytes": …, "seconds": …, "right": …}``, of the size that moved most bytes a second. All end with
the process PARENT, by its id: whoever is ended while it measures leaves no GPU in use.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

from ncclops.host.prctl import die_with_parent

FIRST_BYTES = 1 << 20
# Thresholds are of 4 and 16 GiB; a GPU of the smallest memory in question has 40 GiB.
LAST_BYTES = 4 << 30
LAST_BYTES_GLOO = 64 << 20  # on processors it is no figure, only whether it ends
LONG_S = 0.05
ROUNDS = 5
LIMIT = timedelta(seconds=60)
MET = "ncclops: all ranks are here"  # also in preflight.machine.collective
NO_GPUS, NO_MEMORY = 9, 10  # also in preflight.machine.collective
"""Exit codes: this torch has no CUDA or sees too few GPUs; a GPU has not enough free memory."""
ELSEWHERE = "another rank failed"  # also in preflight.machine.collective
_ELSEWHERE = 11
_ENDED_WITHIN_S = 5
_KILLED = 128  # and the number of the signal, as shells have it
_FAILED, _TOLD_S = "ncclops/failed", 1.0


def main(backend: str, parent: str, ranks: str, first: str) -> int:
    """Run the ranks of this node; the exit code of the first that fails, 0 where none does."""
    die_with_parent(int(parent), signal.SIGKILL)
    import torch.distributed  # noqa: F401 - once, for all of them; it starts nothing on a GPU

    running = {_fork(backend, int(first) + local, local) for local in range(int(ranks))}
    while running:
        pid, status = os.wait()
        running.discard(pid)
        if (code := os.waitstatus_to_exitcode(status)) != 0:
            code = code if code > 0 else _KILLED - code
            _end_all(running, code)
            return code
    return 0


def _end_all(ranks: set[int], code: int) -> None:
    """End the processes ``ranks``, which may use GPUs; where a driver holds one, this as well."""
    signal.signal(signal.SIGALRM, lambda _number, _frame: _end(code))
    signal.alarm(_ENDED_WITHIN_S)
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)
    for pid in ranks:
        os.waitpid(pid, 0)


def _fork(backend: str, rank: int, local: int) -> int:
    """The process of ``rank``, which ends with this one."""
    leader = os.getpid()
    if (pid := os.fork()) == 0:
        die_with_parent(leader, signal.SIGKILL)
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(local)}
        _end_with(partial(_take_part, backend, rank, local))
    return pid


def _end_with(work: Callable[[], int]) -> NoReturn:
    """Do ``work``, and end this process with its exit code, or 1 for an exception."""
    code = 1
    try:
        code = work()
    except Exception:  # noqa: BLE001 - whatever it is, it is what this process says
        traceback.print_exc()
    finally:
        _end(code)


def _end(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a thread waits in torch's store: at an ordinary exit it would abort


def _take_part(backend: str, rank: int, local: int) -> int:
    """The exit code. Raises what torch raises where a collective fails."""
    import torch
    import torch.distributed as dist

    device, last = torch.device("cpu"), LAST_BYTES_GLOO
    if backend == "nccl":
        if not torch.cuda.is_available() or torch.cuda.device_count() <= local:
            print("torch sees no such GPU", file=sys.stderr)
            return NO_GPUS
        device, last = torch.device("cuda", local), LAST_BYTES
        torch.cuda.set_device(device)
    size = int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # It waits for all ranks: one that does not come is no word on those that did.
    store = dist.TCPStore(address, port, size, rank == 0, LIMIT)
    print(MET, file=sys.stderr, flush=True)
    # Of the other node nobody hears otherwise, until a collective of this one times out.
    watch = dist.TCPStore(address, port, size, False, LIMIT, wait_for_workers=False)
    threading.Thread(target=_end_with_others, args=(watch,), daemon=True).start()
    try:
        return _measure(backend, store, (rank, local, size), device, last)
    except Exception as error:
        said = f"{type(error).__name__}: {error}".partition("\n")[0]
        print(said, file=sys.stderr, flush=True)  # before any other says that it was told
        with suppress(RuntimeError):  # the rank that serves the store may have ended
            store.set(_FAILED, said)
        time.sleep(_TOLD_S)  # this one may serve it
        raise


def _end_with_others(store: Any) -> None:
    """End this process once another rank has failed."""
    with suppress(RuntimeError):  # nobody has: the store is gone with its rank, or time is up
        store.wait([_FAILED], 2 * LIMIT)
        said = store.get(_FAILED).decode(errors="replace")
        print(f"{ELSEWHERE}: {said}", file=sys.stderr, flush=True)
        os._exit(_ELSEWHERE)


def _measure(backend: str, store: Any, place: tuple[int, int, int], device: Any, last: int) -> int:
    import torch
    import torch.distributed as dist

    rank, local, size = place
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=size,
        timeout=LIMIT,
        device_id=device if backend == "nccl" else None,
    )
    best = (0, 0.0)
    count, right = FIRST_BYTES // 4, True
    try:
        while True:
            values = torch.full((count,), float(rank + 1), device=device)
            dist.all_reduce(values)  # the first of a size also makes what it needs
            right = right and _is_all(values, float(size * (size + 1) // 2))
            seconds = _slowest(values, device)
            if best[1] == 0 or count * 4 / seconds > best[0] / best[1]:
                best = (count * 4, seconds)
            # All ranks know the same time, and so stop at the same size.
            if seconds >= LONG_S or count * 8 > last:
                break
            del values
            count *= 2
    except torch.OutOfMemoryError as error:
        print(str(error).partition("\n")[0], file=sys.stderr)
        os._exit(NO_MEMORY)  # the others wait in a collective: whoever started us ends them
    verdict = torch.tensor([0.0 if right else 1.0], device=device)
    dist.all_reduce(verdict)
    if local == 0:
        found = {"bytes": best[0], "seconds": best[1], "right": float(verdict[0]) == 0}
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()
    return 0


def _slowest(values: Any, device: Any) -> float:
    """Seconds of one all_reduce on the rank that took longest, known to all ranks."""
    import torch
    import torch.distributed as dist

    wait = torch.cuda.synchronize if device.type == "cuda" else lambda _: None
    wait(device)
    began = time.perf_counter()
    for _ in range(ROUNDS):
        dist.all_reduce(values)
    wait(device)
    took = torch.tensor([(time.perf_counter() - began) / ROUNDS], device=device)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return max(float(took[0]), 1e-9)


def _is_all(values: Any, wanted: float) -> bool:
    low, high = values.min(), values.max()
    return float(low) == wanted == float(high)


if __name__ == "__main__":
    _end_with(partial(main, *sys.argv[1:]))
