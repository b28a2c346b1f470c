"""Ending the process in which torch writes checkpoints, when an iteration is left.

With ``AsyncCheckpointerType.PROCESS``, ``torch.distributed.checkpoint.async_save`` keeps one for
the life of its rank, in a group of the ranks that there are when it is made. A rank in a new
process would make another one, by collectives in which the others take no part; and a save that
only some ranks had begun would meet the next one. So all ranks let go of it.
"""

from __future__ import annotations

import gc
import sys
from multiprocessing import active_children

from ncclops.restart.log import logged


def end_checkpoint_process() -> None:
    """What is being written stays incomplete. The next save makes another one. Main thread."""
    module = sys.modules.get("torch.distributed.checkpoint._async_process_executor")
    kept = getattr(module, "_CHECKPOINT_PROCESS", None)
    if module is None or (kept is None and not active_children()):
        return
    kind = module._AsyncCheckpointProcess
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), kind)]
    for each in found if kept is None else [kept, *found]:  # one may be half-made by a thread
        with logged("ending the process that writes checkpoints"):
            each._save_process.kill()
            each._save_process.join()
    setattr(module, "_CHECKPOINT_PROCESS", None)  # noqa: B010 - no attribute of every module
