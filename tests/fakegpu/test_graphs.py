"""Graphs that were captured before a restart."""

from __future__ import annotations

from ncclops.testing import JobFactory
from tests.fakegpu import graph_programs as programs
from tests.fakegpu.host import Host


def test_a_graph_with_collectives_of_aborted_groups_is_not_replayed(
    ncclops_job: JobFactory, host: Host
) -> None:
    """One without collectives is."""
    job = ncclops_job(programs.replays_after_a_restart, world_size=2, env=host.environment)
    result = job.run()
    said, replays = result.value
    assert len(said) == 1
    assert "capture it again after each restart" in said[0]
    assert replays == 3
    assert result.restarts == 1
