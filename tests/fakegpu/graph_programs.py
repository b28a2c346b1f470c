"""What ranks run in tests of captured graphs; a class stands in for the graph itself."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ncclops import restart as inprocess
from ncclops.restart._groups.cuda_graphs import refuse_graphs_over_dead_groups
from ncclops.testing import note
from tests.fakegpu.nccl_programs import begin


class Graph:
    """As ``torch.cuda.CUDAGraph``: what is called between the two is not recorded here."""

    replays = 0

    def capture_begin(self) -> None:
        """As torch's."""

    def capture_end(self) -> None:
        """As torch's."""

    def replay(self) -> None:
        """Count."""
        self.replays += 1


kept: list[Graph] = []  # outside of the function, as a cache of graphs is


@inprocess.Wrapper()
def replays_after_a_restart(call: inprocess.CallWrapper) -> tuple[list[str], int]:
    """The second iteration replays what the first one has captured, with a collective and without.

    What each of its replays raised, and how often graphs were replayed in all.
    """
    if not call.iteration:
        refuse_graphs_over_dead_groups(Graph)
    device = torch.device("cuda", begin())
    if not call.iteration:
        for has_collective in (True, False):
            graph = Graph()
            graph.capture_begin()
            if has_collective:
                dist.all_reduce(torch.ones(1, device=device))
            graph.capture_end()
            graph.replay()
            kept.append(graph)
        dist.barrier()
        note("captured")
        raise ValueError("as asked")
    said = []
    for graph in kept:
        try:
            graph.replay()
        except inprocess.exception.RestartError as error:
            said.append(str(error))
    dist.barrier()
    dist.destroy_process_group()
    return said, sum(graph.replays for graph in kept)
