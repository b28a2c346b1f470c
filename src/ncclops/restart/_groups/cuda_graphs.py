"""Captured CUDA graphs with collectives of process groups that are no more: refused, not replayed.

A graph holds the kernels of the communicators that it was captured over. After a restart these are
aborted, and a replay would wait in them for ever, or read memory that is freed. A graph that lives
on outside the function is therefore asked, at each replay, whether its groups are still torch's. No
call of CUDA is made for that, and nothing before the first capture.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import distributed

from ncclops.restart._groups import kept_beside, reconfiguring
from ncclops.restart._groups.backends import backends_of, has_watchdog
from ncclops.restart.exception import RestartError

# Of a graph: weak references to groups, their names, and how many communicators each has had.
_GROUPS = "_ncclops_groups"
_BEFORE = "_ncclops_numbers"  # of a graph that is being captured


@functools.cache
def refuse_graphs_over_dead_groups(graph_class: Any = None) -> None:
    """Have ``replay`` of graphs raise a ``RestartError`` instead, for the rest of the process.

    Which groups a capture has used is told by their numbers of collectives; messages between two
    ranks (``send``, ``recv``) are not counted there, and not seen. ``graph_class``: another one
    than ``torch.cuda.CUDAGraph``.
    """
    graph_class = graph_class or getattr(torch.cuda, "CUDAGraph", None)
    if graph_class is None or not distributed.is_available():
        return
    begin, end, replay = (
        getattr(graph_class, name) for name in ("capture_begin", "capture_end", "replay")
    )

    def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> Any:
        setattr(graph, _BEFORE, _numbers())
        return begin(graph, *args, **kwargs)

    def capture_end(graph: Any, *args: Any, **kwargs: Any) -> Any:
        before = getattr(graph, _BEFORE, {})
        used = [each for each, number in _numbers().items() if before.get(each, 0) != number]
        setattr(graph, _GROUPS, [_described(each) for each in used])
        setattr(graph, _BEFORE, {})
        for each in used:
            kept_beside.doubt(each(), "a CUDA graph holds operations of it")
        return end(graph, *args, **kwargs)

    def checked_replay(graph: Any, *args: Any, **kwargs: Any) -> Any:
        alive = distributed.distributed_c10d._world.pg_map
        for group, name, communicators in getattr(graph, _GROUPS, ()):
            found = group()
            if found not in alive or reconfiguring.communicators_of(found) != communicators:
                raise RestartError(
                    f"this CUDA graph was captured with process group {name}, which has been"
                    " aborted or destroyed since: capture it again after each restart"
                )
        return replay(graph, *args, **kwargs)

    _replace(graph_class, capture_begin, capture_end, checked_replay)


def _replace(graph_class: Any, *functions: Callable[..., Any]) -> None:
    for name, function in zip(("capture_begin", "capture_end", "replay"), functions, strict=True):
        setattr(graph_class, name, functools.wraps(getattr(graph_class, name))(function))


def _described(group: ref[Any]) -> tuple[ref[Any], str, int]:
    found = group()
    return group, getattr(found, "group_desc", ""), reconfiguring.communicators_of(found)


def _numbers() -> dict[ref[Any], int]:
    """How many collectives each group of NCCL has had; no graph keeps a group alive."""
    return {
        ref(group): group._get_sequence_number_for_group()
        for group in list(distributed.distributed_c10d._world.pg_map)
        if any(map(has_watchdog, backends_of(group)))
    }
