"""Programs whose annotations are text, one of them with a name that only type checkers see."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional

import torch.distributed as dist

from ncclops import restart as inprocess

if TYPE_CHECKING:
    from scenarios import Worker

    from ncclops.restart import CallWrapper as Hidden


def annotated(worker: Worker) -> Any:
    """The same function three times, each with another way to ask for the CallWrapper."""

    def qualified(number: int, call: inprocess.CallWrapper) -> int:
        return step(number, call)

    def optional(number: int, call: Optional[inprocess.CallWrapper] = None) -> int:  # noqa: UP045
        return step(number, call)

    def union(number: int, *, call: inprocess.wrap.CallWrapper | None = None) -> int:
        return step(number, call)

    def step(number: int, call: Hidden | None) -> int:
        assert isinstance(call, inprocess.CallWrapper)
        dist.init_process_group("gloo")
        if call.iteration == 0 and dist.get_rank() == 1:
            raise ValueError("example fault")
        dist.barrier()
        dist.destroy_process_group()
        return 10 * number + call.iteration

    wrapper = inprocess.Wrapper()
    return [wrapper(f)(n) for n, f in enumerate((qualified, optional, union), 1)]
