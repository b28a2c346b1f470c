"""The script of the job of ``ncclops self-check``: an all_reduce on two ranks, one raises once."""

from __future__ import annotations

import os
from pathlib import Path


def main() -> None:
    """Ends well in the second run of the script, in the same process."""
    import torch
    import torch.distributed as dist

    from ncclops import receipt

    raised = Path(os.environ["NCCLOPS_RUN_DIR"]) / "self-check-raised"
    dist.init_process_group("gloo")
    for step in range(5):
        total = torch.ones(1)
        dist.all_reduce(total)
        if int(total) != dist.get_world_size():
            raise SystemExit(f"all_reduce of ones gave {total}")
        if step == 2 and dist.get_rank() == 1 and not raised.exists():
            raised.touch()
            raise RuntimeError("a fault on purpose")
        receipt.step(step)
    receipt.end()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
