"""One rank of a short all_reduce between the GPUs of a node, for ``ncclops preflight``.

    python -m ncclops.worker.collective_probe

Rank, size and meeting place come from torchrun's variables. Sizes double until an all_reduce takes
long enough to be measured well, or the largest size is reached. Local rank 0 prints a line of JSON:
``{"bytes": …, "seconds": …, "right": …}``, of the size that moved most bytes a second.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta

FIRST_BYTES = 1 << 20
# Thresholds are of 4 and 16 GiB; a GPU of the smallest memory in question has 40 GiB.
LAST_BYTES = 4 << 30
LONG_S = 0.05
ROUNDS = 5
LIMIT = timedelta(seconds=60)
MET = "ncclops: all ranks are here"  # also in preflight.machine.collective
NO_GPUS, NO_MEMORY = 9, 10  # also in preflight.machine.collective
"""Exit codes: this torch has no CUDA or sees too few GPUs; a GPU has not enough free memory."""


def main() -> int:
    """Take part; the exit code. Raises what torch raises where a collective fails."""
    import torch
    import torch.distributed as dist

    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    if not torch.cuda.is_available() or torch.cuda.device_count() <= local:
        print("torch sees no such GPU", file=sys.stderr)
        return NO_GPUS
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    size = int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # It waits for all ranks: one that does not come is no word on those that did.
    store = dist.TCPStore(address, port, size, rank == 0, LIMIT)
    print(MET, file=sys.stderr, flush=True)
    dist.init_process_group(
        "nccl", store=store, rank=rank, world_size=size, timeout=LIMIT, device_id=device
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
            if seconds >= LONG_S or count * 8 > LAST_BYTES:
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


def _slowest(values: object, device: object) -> float:
    """Seconds of one all_reduce on the rank that took longest, known to all ranks."""
    import torch
    import torch.distributed as dist

    torch.cuda.synchronize(device)
    began = time.perf_counter()
    for _ in range(ROUNDS):
        dist.all_reduce(values)
    torch.cuda.synchronize(device)
    took = torch.tensor([(time.perf_counter() - began) / ROUNDS], device=device)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return max(float(took[0]), 1e-9)


def _is_all(values: object, wanted: float) -> bool:
    low, high = values.min(), values.max()  # type: ignore[attr-defined]
    return float(low) == wanted == float(high)


if __name__ == "__main__":
    sys.exit(main())
