"""A store that stays: a second job under the same name is refused, and the first is left alone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from ncclops.restart._monitor.link import Page, create_page_fd

from .conftest import Job

SERVE = [sys.executable, "-m", "ncclops", "store", "serve", "--port"]


@pytest.fixture
def store(job: Job) -> Iterator[str]:
    server = subprocess.Popen([*SERVE, str(job.port)], stdout=subprocess.PIPE)
    yield f"127.0.0.1:{job.port}"
    server.kill()
    server.communicate()


def test_a_second_job_under_the_same_name_is_refused_at_once(job: Job, store: str) -> None:
    job.env["NCCLOPS_STORE"] = store
    job.start(3, "raising", on=[1], at=[0])
    assert job.wait() == {0: 0, 1: 0, 2: 0}
    job.start(3, "raising", on=[1], at=[0])
    assert job.wait() == {0: 1, 1: 1, 2: 1}
    errors = [event["error"] for event in job.events("raised")]
    assert len(errors) == 3
    assert all("NameSpaceUsed" in error and "NCCLOPS_STORE_PREFIX" in error for error in errors)
    job.env["NCCLOPS_STORE_PREFIX"] = "the second"
    job.start(3, "raising", on=[1], at=[0])
    assert job.wait() == {0: 0, 1: 0, 2: 0}


def test_a_restart_count_of_slurm_makes_another_name(job: Job, store: str) -> None:
    job.env |= {"NCCLOPS_STORE": store, "SLURM_JOB_ID": "7"}
    for count in ("0", "1"):
        job.env["SLURM_RESTART_COUNT"] = count
        job.start(2, "raising", on=[1], at=[0])
        assert job.wait() == {0: 0, 1: 0}


def test_a_later_change_of_timeouts_stands_whatever_the_clocks_say() -> None:
    one, other = Page(create_page_fd()), Page(create_page_fd())
    first = one.next_stamp(5)
    for page in (one, other):
        page.change_timeouts(1800, 2400, first)
    second = other.next_stamp(0)
    for page in (other, one):
        page.change_timeouts(10, 20, second)
        page.change_timeouts(1800, 2400, first)  # comes again, round the ring
    assert one.timeouts() == other.timeouts() == (10, 20)


def test_of_two_changes_at_the_same_time_all_ranks_take_the_same() -> None:
    pages = [Page(create_page_fd()) for _ in range(2)]
    changes = [(10.0 + rank, 20.0 + rank, page.next_stamp(rank)) for rank, page in enumerate(pages)]
    for page, order in zip(pages, (changes, changes[::-1]), strict=True):
        for change in order:
            page.change_timeouts(*change)
    assert pages[0].timeouts() == pages[1].timeouts() == (11.0, 21.0)
