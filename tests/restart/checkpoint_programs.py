"""Programs of test_checkpoint_process.py: a fault finds torch's process that writes checkpoints."""

from __future__ import annotations

from multiprocessing import active_children
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from scenarios import Worker
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from ncclops import restart as inprocess


def saving(worker: Worker) -> Any:
    """Rank 1 raises before a save that rank 0 has begun; then all save."""

    def save(name: str, value: float) -> Any:
        return dcp.async_save(
            {"value": torch.full((4,), value)},
            checkpoint_id=worker.directory / name,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )

    def main(call: inprocess.CallWrapper) -> str:
        worker.note("children", iteration=call.iteration, count=len(active_children()))
        worker.join()
        save(f"first-{call.iteration}", 1.0).result()
        dist.barrier()
        if call.iteration == 0:
            if worker.rank == 1:
                raise ValueError("boom")
            save("never", 2.0).result()
        save("second", 3.0).result()
        loaded = {"value": torch.zeros(4)}
        dcp.load(loaded, checkpoint_id=worker.directory / "second")
        worker.note("loaded", value=loaded["value"].tolist())
        return worker.finish(call)

    return worker.wrap(main)()
