"""Captured CUDA graphs, and what has become of the communicators that they hold."""

from __future__ import annotations

from typing import Any
from weakref import ref

import pytest
from torch.distributed import distributed_c10d

from ncclops.restart._groups import reconfiguring
from ncclops.restart._groups.cuda_graphs import _GROUPS, refuse_graphs_over_dead_groups
from ncclops.restart.exception import RestartError


class Graph:
    """As ``torch.cuda.CUDAGraph``."""

    def capture_begin(self) -> None:
        """As torch's."""

    def capture_end(self) -> None:
        """As torch's."""

    def replay(self) -> str:
        """As torch's."""
        return "replayed"


class Group:
    """One of torch's."""


def test_one_is_refused_once_its_group_has_another_communicator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refuse_graphs_over_dead_groups(Graph)
    graph: Any = Graph()
    group: Any = Group()
    monkeypatch.setitem(distributed_c10d._world.pg_map, group, ("nccl", None))
    monkeypatch.setitem(reconfiguring._communicators, group, 1)
    setattr(graph, _GROUPS, [(ref(group), "default_pg", 1)])
    assert graph.replay() == "replayed"
    monkeypatch.setitem(reconfiguring._communicators, group, 2)
    with pytest.raises(RestartError, match="was captured with process group default_pg"):
        graph.replay()
