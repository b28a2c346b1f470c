"""NCCL as torch's real ``ProcessGroupNCCL`` sees it: what it computes, and what does not end."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from ncclops.testing import JobFactory
from tests.fakegpu import nccl_programs as programs
from tests.fakegpu.host import Host
from tests.fakegpu.place import HERE

first_engine = pytest.mark.skipif(
    HERE.has_second_engine, reason="torch's second engine makes communicators with their groups"
)


@pytest.mark.gpu
def test_reductions_of_all_types_and_operations(ncclops_job: JobFactory, host: Host) -> None:
    job = ncclops_job(programs.types_and_operations, world_size=3, env=host.environment)
    assert job.run().value == []


@pytest.mark.gpu
def test_each_collective_over_several_rounds(ncclops_job: JobFactory, host: Host) -> None:
    job = ncclops_job(programs.collectives, world_size=3, env=host.environment)
    assert job.run().value == []


@pytest.mark.gpu
def test_operations_of_a_group_run_together(ncclops_job: JobFactory, host: Host) -> None:
    job = ncclops_job(programs.coalesced, world_size=3, env=host.environment)
    assert job.run().value == ([3.0, 6.0, 9.0], [0.0])


@pytest.mark.gpu
def test_messages_go_there_and_back(ncclops_job: JobFactory, host: Host) -> None:
    values = ncclops_job(programs.messages, world_size=2, env=host.environment).run().values
    assert values == {0: [2.0, 2.0], 1: [3.0, 3.0]}


# --- groups ---------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("eager", [False, True], ids=["lazy", "eager"])
def test_groups_have_communicators_of_their_own(
    ncclops_job: JobFactory, host: Host, eager: bool
) -> None:
    job = ncclops_job(programs.groups, world_size=4, args=(eager,), env=host.environment)
    values = job.run().values
    assert values == {0: [6, 1, 2], 1: [6, 1, 4], 2: [6, 5, 2], 3: [6, 5, 4]}
    made = {event.fields["function"] for event in host.events("nccl-init")}
    splits = eager or HERE.has_second_engine
    assert made == {"ncclCommInitRankConfig"} | ({"ncclCommSplit"} if splits else set())


def test_communicators_that_have_ended_do_not_pile_up(ncclops_job: JobFactory, host: Host) -> None:
    job = ncclops_job(programs.ended_communicators, world_size=1, args=(400,), env=host.environment)
    assert job.run().value < 400 * 500  # bytes; one is 2,900


@pytest.mark.gpu
def test_a_communicator_is_split(ncclops_job: JobFactory, host: Host) -> None:
    values = ncclops_job(programs.split, world_size=4, env=host.environment).run().values
    assert values == {0: 2, 1: 4, 2: 2, 3: 4}


@pytest.mark.gpu
def test_a_communicator_shrinks_by_a_rank_that_has_gone(
    ncclops_job: JobFactory, host: Host
) -> None:
    result = ncclops_job(programs.shrink, world_size=3, args=(1,), env=host.environment).run()
    assert result.values == {0: 1.0, 2: 1.0}


@pytest.mark.gpu
def test_gloo_beside_nccl(ncclops_job: JobFactory, host: Host) -> None:
    found = ncclops_job(programs.mixed, world_size=2, env=host.environment).run().value
    assert found == (3.0, 1.0, "cpu:gloo,cuda:nccl")


def test_all_gpus_in_one_process(ncclops_job: JobFactory, host: Host) -> None:
    found = ncclops_job(programs.one_process, world_size=1, env=host.environment).run().value
    assert found == [6.0, 6.0, 6.0]


@pytest.mark.gpu
def test_memory_is_registered(ncclops_job: JobFactory, host: Host) -> None:
    env = host.environment | {
        "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": "1",
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "REG",
    }
    result = ncclops_job(programs.registered, world_size=2, env=env).run()
    assert result.value == [2.0] * 4
    assert "NCCL INFO register comm" in result.ranks[0].log.read_text()


def test_the_version_is_what_a_test_sets(ncclops_job: JobFactory, host: Host) -> None:
    env = host.environment | {"FAKEGPU_NCCL_VERSION": "22105"}
    assert ncclops_job(programs.version, world_size=1, env=env).run().value == [2, 21, 5]


# --- what does not end ----------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_collective_ends_when_the_last_rank_has_begun_it(
    ncclops_job: JobFactory, host: Host, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    with ncclops_job(programs.late, world_size=3, args=(go,), env=host.environment) as job:
        job.start().wait_for("looked", count=2)
        go.touch()
        assert job.wait().value == (False, 9.0)


@pytest.mark.parametrize("kind", ["absence", "behind", "size", "order"])
def test_a_collective_that_ranks_do_not_share_waits_until_it_is_aborted(
    ncclops_job: JobFactory, host: Host, tmp_path: Path, kind: str
) -> None:
    go, args = tmp_path / "go", (kind, tmp_path / "go")
    shared = kind in ("size", "order")
    with ncclops_job(
        programs.hang_until_aborted, world_size=2, args=args, env=host.environment
    ) as job:
        job.start().wait_for("begun", count=2)
        if shared:  # each sees it once the other has begun
            host.wait_for("nccl-mismatch", count=2)
        go.touch()
        values = job.wait().values
    assert values == {0: "waits", 1: "waits" if shared else "no work"}
    mismatches = {event.rank for event in host.events("nccl-mismatch")}
    assert mismatches == ({0, 1} if shared else set())


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["broadcast", "messages"])
def test_what_needs_a_new_connection_waits_in_its_call_until_it_is_aborted(
    ncclops_job: JobFactory, host: Host, tmp_path: Path, kind: str
) -> None:
    args = kind, tmp_path / "go"
    with ncclops_job(
        programs.hang_before_connected, world_size=2, args=args, env=host.environment
    ) as job:
        job.start().wait_for("begun")
        time.sleep(0.2)
        args[1].touch()
        error = job.wait().values[0]
    assert "internal error" in error.lower()


@pytest.mark.gpu
def test_a_revoked_communicator_takes_no_more(ncclops_job: JobFactory, host: Host) -> None:
    error = ncclops_job(programs.revoke, world_size=2, env=host.environment).run().value
    said = " ".join(
        error.lower().split()
    )  # by torch's first engine on two lines, by its second on one
    assert "last error: allreduce : communicator has been revoked" in said


def test_a_communicator_grows_by_a_rank_that_is_new(ncclops_job: JobFactory, host: Host) -> None:
    job = ncclops_job(programs.grow, world_size=3, env=host.environment).run()
    assert job.values == {rank: (rank, 3, 6.0) for rank in range(3)}
    made = [each for each in host.events("nccl-init") if each.fields["function"] == "ncclCommGrow"]
    assert len(made) == 3


@first_engine
def test_groups_that_are_used_in_different_order_never_begin(
    ncclops_job: JobFactory, host: Host
) -> None:
    job = ncclops_job(programs.groups_in_other_order, world_size=2, env=host.environment)
    with job:
        job.start().wait_for("groups made", count=2)
        host.wait_for("nccl-begin")
    assert host.events("nccl-init") == []


@first_engine
def test_an_abort_ends_the_wait_for_a_rank_that_never_comes(
    ncclops_job: JobFactory, host: Host, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    env = host.environment | {
        "TORCH_NCCL_USE_COMM_NONBLOCKING": "1",
        "TORCH_NCCL_NONBLOCKING_TIMEOUT": "1",  # torch's abort waits so long for the start to end
    }
    with ncclops_job(programs.abort_of_init, world_size=2, args=(go,), env=env) as job:
        job.start()
        host.wait_for("nccl-begin")
        go.touch()
        assert "NCCL timeout" in job.wait().values[0]
    (ended,) = host.events("nccl-end")
    assert ended.fields["how"] == "Abort"


@pytest.mark.gpu
def test_a_dump_has_states_and_sizes(ncclops_job: JobFactory, host: Host, tmp_path: Path) -> None:
    go = tmp_path / "go"
    env = host.environment | {"TORCH_FR_BUFFER_SIZE": "100", "TORCH_NCCL_ENABLE_TIMING": "1"}
    with ncclops_job(programs.records_of_a_hang, world_size=2, args=(go,), env=env) as job:
        job.start().wait_for("recorded", count=2)
        go.touch()
        values: dict[int, Any] = job.wait().values
    # The second engine's recorder does not look whether one has started.
    engine, started = ("nccl2", "scheduled") if HERE.has_second_engine else ("nccl", "started")
    first = [
        (f"{engine}:all_reduce", "completed", [[3, 5]], ["Float"]),
        (f"{engine}:broadcast", "completed", [[5]], ["Float"]),
    ]
    assert values[1] == first
    assert values[0] == [
        *first,
        (f"{engine}:all_reduce", started, [[3, 5]], ["Float"]),
        (f"{engine}:broadcast", "scheduled", [[5]], ["Float"]),
    ]
