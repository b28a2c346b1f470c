"""Snapshots of what is on a GPU: copied by a stream of their own, in the right order."""

from __future__ import annotations

from pathlib import Path

import pytest

from ncclops.testing import JobFactory
from tests.fakegpu import snapshot_programs as programs
from tests.fakegpu.host import Host
from tests.lanes import profile_environment

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("overlap", [True, False])
def test_a_snapshot_has_what_was_queued_before_it_and_nothing_of_what_was_queued_after(
    ncclops_job: JobFactory, host: Host, tmp_path: Path, overlap: bool
) -> None:
    """All kernels are held up meanwhile: ``take`` and the next step wait for none of them."""
    released = tmp_path / "released"
    program = programs.goes_on_while_a_copy_is_under_way
    with ncclops_job(program, world_size=1, args=(released, overlap), env=host.environment) as job:
        job.start().wait_for("ready")
        host.set("device:kernel hang")
        released.touch()
        (queued,) = job.wait_for("queued")
        assert queued.fields["done"] is False
        host.set()
        result = job.wait()
    (after,) = result.notes_of("after", 0)
    assert after.fields["weight"] == 3
    assert result.value == (1, 2, 5, ["cuda", "cuda", "cpu"])


def test_a_snapshot_that_follows_an_aborted_collective_is_not_taken(
    ncclops_job: JobFactory, host: Host, tmp_path: Path
) -> None:
    environment = host.environment | profile_environment(tmp_path)
    program, queued = programs.loses_its_peer_in_a_collective, tmp_path / "queued"
    result = ncclops_job(program, world_size=2, args=(queued,), env=environment).run()
    assert result.value == (1, 2)
