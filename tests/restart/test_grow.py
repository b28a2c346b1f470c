"""Lost ranks come back: new processes take their places, in the world size of the launch."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from torch import distributed as dist

from ncclops.restart._store import arrival_bitmap as bitmap
from ncclops.testing import Job, JobFactory, Note
from tests.restart import grow_programs as programs
from tests.restart.conftest import wait_until

pytestmark = pytest.mark.slow


def kill(job: Job, rank: int) -> None:
    """End the main process of ``rank``, and wait for that."""
    watch = job._started()
    job.signal(rank, signal.SIGKILL)
    job._until(lambda: watch.ranks[rank].code is not None, f"the end of rank {rank}")


def entered(job: Job, iteration: int, ranks: int) -> dict[int, Note]:
    """The notes of ``ranks`` ranks that have entered ``iteration``, by initial rank."""

    def there() -> dict[int, Note]:
        return {n.rank: n for n in job.notes("in") if n.fields["iteration"] == iteration}

    job._until(lambda: len(there()) == ranks, f"{ranks} ranks in iteration {iteration}")
    return there()


def test_the_place_of_each_lost_rank_is_taken_again(
    ncclops_job: JobFactory, tmp_path: Path
) -> None:
    """Rank 0 among them; processes that live go on, and each incident says who came back."""
    stop = tmp_path / "stop"
    job = ncclops_job(programs.train, world_size=3, args=(30.0, str(stop))).start()
    first = entered(job, 0, 3)
    for iteration, lost in enumerate((0, 2, 0), start=1):
        kill(job, lost)
        job.replace(lost)
        now = entered(job, iteration, 3)
        assert [now[rank].fields["number"] for rank in range(3)] == [0, 1, 2]
        assert {note.fields["size"] for note in now.values()} == {3}
    stop.touch()
    values = job.wait().values
    assert {value[:3] for value in values.values()} == {(3, 0, 3), (3, 1, 3), (3, 2, 3)}
    assert values[1][3] == first[1].fields["pid"]
    incidents = job._started().ranks[1].incidents
    assert [(i.ranks_lost, i.ranks_returned, i.world_size) for i in incidents] == [
        ((0,), (0,), 3),
        ((2,), (2,), 3),
        ((0,), (0,), 3),
    ]
    # Where the new process is rank 0, the first of those that know what happened speaks for all.
    assert [incident.speaks_for_all for incident in incidents] == [True, False, True]
    assert all(incident.phases_ms["grow"] > 0 for incident in incidents)


def test_the_others_go_on_and_grow_when_the_new_process_is_there(
    ncclops_job: JobFactory, tmp_path: Path
) -> None:
    stop = tmp_path / "stop"
    job = ncclops_job(programs.train, world_size=3, args=(0.0, str(stop))).start()
    entered(job, 0, 3)
    kill(job, 1)
    assert {note.fields["size"] for note in entered(job, 1, 2).values()} == {2}
    job.replace(1)
    grown = entered(job, 2, 3)
    assert [grown[rank].fields["number"] for rank in range(3)] == [0, 1, 2]
    stop.touch()
    result = job.wait()
    assert {value[:3] for value in result.values.values()} == {(2, 0, 3), (2, 1, 3), (2, 2, 3)}
    shrunk, back = result.ranks[0].incidents
    assert (shrunk.ranks_lost, shrunk.ranks_returned, shrunk.world_size) == ((1,), (), 2)
    assert (back.ranks_lost, back.ranks_returned, back.world_size) == ((), (1,), 3)
    assert back.summary == "rank 1: a new process takes its place"


def test_a_rank_that_does_not_come_back_is_waited_for_and_may_come_later(
    ncclops_job: JobFactory, tmp_path: Path
) -> None:
    stop = tmp_path / "stop"
    job = ncclops_job(programs.train, world_size=3, args=(0.5, str(stop))).start()
    entered(job, 0, 3)
    kill(job, 2)
    assert {note.fields["size"] for note in entered(job, 1, 2).values()} == {2}
    job.replace(2)
    assert {note.fields["size"] for note in entered(job, 2, 3).values()} == {3}
    stop.touch()
    incidents = job.wait().ranks[0].incidents
    assert [i.ranks_returned for i in incidents] == [(), (2,)]


def test_two_of_three_are_lost_at_once_and_come_back(
    ncclops_job: JobFactory, tmp_path: Path
) -> None:
    stop = tmp_path / "stop"
    job = ncclops_job(programs.train, world_size=3, args=(30.0, str(stop))).start()
    entered(job, 0, 3)
    job.lose_host([0, 1])
    job._until(lambda: all(job._started().ranks[r].code is not None for r in (0, 1)), "both ends")
    for rank in (0, 1):
        job.replace(rank)
    # Their monitor processes went as well: the losses are noticed one after the other.
    job._until(
        lambda: any(n.fields["size"] == 3 and n.fields["iteration"] for n in job.notes("in", 0)),
        "rank 0 in a whole world",
    )
    stop.touch()
    assert {value[2] for value in job.wait().values.values()} == {3}


def await_end(job: Job, rank: int) -> None:
    watch = job._started()
    job._until(lambda: watch.ranks[rank].code is not None, f"the end of rank {rank}")


def test_a_rank_is_lost_while_it_joins_anew(ncclops_job: JobFactory, tmp_path: Path) -> None:
    """Between two sessions no monitor process watches it: its new process joins in its place."""
    job = ncclops_job(programs.lost_while_joining, world_size=3, args=(str(tmp_path), True)).start()
    for rank in (1, 2):
        await_end(job, rank)
        job.replace(rank)
    assert job.wait().values == {0: 1, 1: 1, 2: 1}


def test_a_new_process_is_lost_before_the_others_have_joined(
    ncclops_job: JobFactory, tmp_path: Path
) -> None:
    """It has joined, and nobody watches it yet: the one that follows it shows that it has ended."""
    arguments = (str(tmp_path), False)
    job = ncclops_job(programs.lost_while_joining, world_size=3, args=arguments).start()
    await_end(job, 1)
    job.replace(1)
    wait_until((tmp_path / "joining").exists, "rank 2 on its way")
    wait_until(lambda: has_joined(job, 1), "the new process")
    kill(job, 1)
    job.replace(1)
    (tmp_path / "go").touch()
    assert set(job.wait().values.values()) == {2}


def has_joined(job: Job, rank: int) -> bool:
    """Whether it has come to the barrier of the first later generation."""
    store = dist.TCPStore("127.0.0.1", job.port, is_master=False)
    keys = [key for key in store.list_keys() if key.endswith("/g1/-1/arrived/0")]
    return any(rank in bitmap.arrived(0, store.add(key, 0)) for key in keys)


@pytest.mark.parametrize("assignment", ["reserve", "tree"])
def test_reserves_are_as_at_the_launch_once_all_are_back(
    ncclops_job: JobFactory, tmp_path: Path, assignment: str
) -> None:
    stop = tmp_path / "stop"
    arguments = (30.0, str(stop), assignment)
    active = {"reserve": 2, "tree": 3}[assignment]
    job = ncclops_job(programs.train, world_size=3, args=arguments).start()
    before = {r: n.fields["number"] for r, n in entered(job, 0, active).items()}
    kill(job, 1)
    job.replace(1)
    assert {r: n.fields["number"] for r, n in entered(job, 1, active).items()} == before
    stop.touch()
    assert set(job.wait().ranks) == {0, 1, 2}


def test_who_has_returned_is_not_started_again_for_a_rank_that_comes_back(
    ncclops_job: JobFactory, tmp_path: Path
) -> None:
    """The new process has come too late: it ends with the job, and says so."""
    stop = tmp_path / "stop"
    job = ncclops_job(programs.return_one_by_one, world_size=3, args=(str(stop),)).start()
    entered(job, 0, 3)
    kill(job, 2)
    job.wait_for("returns", 0, count=2)  # once more, after the restart without rank 2
    job.replace(2)
    wait_until(lambda: "waits for the others" in log(job, 2), "the new process")
    stop.touch()
    result = job.wait()
    assert (result.values[0], result.values[1]) == (1, 1)
    assert "JobEnded" in (result.ranks[2].error or "")
    assert [n.fields["iteration"] for n in job.notes("in")].count(0) == 3


def log(job: Job, rank: int) -> str:
    return (job.directory / f"log-{rank}").read_text()


def test_only_the_outermost_call_grows(ncclops_job: JobFactory) -> None:
    (said,) = ncclops_job(programs.inside_another, world_size=1).run().values.values()
    assert said == "grow_timeout is for the outermost wrapped function: leave it out"
