"""Letting process groups end without a deadlock, for torch before 2.8.

A Gloo backend ends by joining its worker threads. A worker that has just finished an operation
lets go of its tensors, and where Python has dropped such a tensor already that takes the GIL:
``all_reduce(torch.ones(1))`` just before ``destroy_process_group()`` is enough. Up to torch 2.7
the binding of ``ProcessGroup`` keeps the GIL while it frees the group and, with it, its backends:
each waits for the other, and the process stands still, all of its threads included. torch 2.8
gives the GIL back first (pytorch/pytorch#154976).

The bindings of the backends' own classes have always done so. All it takes is that the last
reference to a backend is its Python object's. It is not where torch's C++ holds the group for
longer than anything in Python does, as DDP's reducer may; but then its workers have long been idle.
"""

from __future__ import annotations

import functools
from typing import Any
from weakref import ref

import torch
from torch import distributed

# By group. A group's entry goes when its Python object has gone, and with it what that has freed;
# by a function in C, which RankShouldRestart cannot hit half-way.
_backends: dict[ref[Any], list[Any]] = {}


@functools.cache
def keep_backends_longer_than_groups() -> None:
    """From now on a backend outlives its group, by a moment. For the rest of the process.

    Groups are let go by torch's tables, the function's frames and the abort, on any thread: only
    where they are made can something be done for all of them. Groups made before stay as they are.
    """
    if not distributed.is_available() or torch.__version__ >= (2, 8):
        return
    register = distributed.ProcessGroup._register_backend

    def register_and_keep(group: Any, device: Any, backend_type: Any, backend: Any = None) -> None:
        register(group, device, backend_type, backend)
        _backends.setdefault(ref(group, _backends.pop), []).append(backend)

    distributed.ProcessGroup._register_backend = register_and_keep
