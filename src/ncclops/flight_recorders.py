"""torch's flight recorders, one of each engine. Looks at torch only where it is loaded."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

# torch's two engines of NCCL, and the rest, by the names of their recorders.
NCCL, SECOND_OF_NCCL, GLOO = "nccl", "nccl2", "gloo"
ALL_OF_NCCL = NCCL, SECOND_OF_NCCL
ALL = *ALL_OF_NCCL, GLOO


def dumps(*, as_json: bool = False) -> dict[str, Callable[..., bytes]]:
    """What dumps each of them that this torch has, as pickle or JSON; NCCL's first.

    The arguments are torch's: of a pickle whether with operations, with stacks, and only those that
    are pending; of JSON the first and the last. The generic one is there from torch 2.8 on, that of
    the second engine from 2.15 on.
    """
    module = sys.modules.get("torch._C._distributed_c10d")
    kind = "_json" if as_json else ""
    of_first = getattr(module, f"_dump_nccl_trace{kind}", None)
    generic = getattr(module, f"_dump_fr_trace{kind}", None)
    second = None
    # With torch 2.14 that engine has none, and the argument is not known.
    if generic and hasattr(module, "ProcessGroupNCCL2") and hasattr(module, "_reset_fr_trace"):
        second = partial(generic, backend=SECOND_OF_NCCL)
    found = {NCCL: of_first, SECOND_OF_NCCL: second, GLOO: generic}
    return {name: dump for name, dump in found.items() if dump is not None}
