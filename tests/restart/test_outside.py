"""What a monitor process has its view of the main process look at, and when."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ncclops.restart._monitor.link import Page, create_page_fd
from ncclops.restart._monitor.outside import Outside
from ncclops.restart.snapshots import LastProgress

STACKS = "the stacks of all threads"


class View:
    """Notes what it is asked; it cannot see how an iteration has failed."""

    def __init__(self, rank: int, pid: int, *, asked: list[tuple[Any, ...]]) -> None:
        self._asked = asked

    def iteration_failed(self, directory: Path | None, progress: LastProgress) -> None:
        raise OSError("nothing is to be seen")

    def main_silent(self, directory: Path | None, progress: LastProgress, reason: str) -> str:
        self._asked.append((directory, reason))
        return STACKS

    def main_ended(
        self, directory: Path | None, progress: LastProgress, reason: str, *, by_monitor: bool
    ) -> None:
        self._asked.append((directory, reason, by_monitor))


@pytest.fixture
def page() -> Iterator[Page]:
    made = Page(create_page_fd())
    yield made
    made.close()


def config(asked: list[tuple[Any, ...]], view: str = "View") -> dict[str, Any]:
    made_by = (f"{__name__}:{view}", {"asked": asked})
    return {"incident_dir": "/run/incidents", "rank": 1, "main_pid": 7, "outside_view": made_by}


def test_a_silent_process_is_looked_at_once_in_an_iteration(page: Page) -> None:
    asked = list[tuple[Any, ...]]()
    outside = Outside(page, config(asked))
    page.incidents_from = 1 + 5
    for iteration in (0, 0, 2):
        page.iteration = iteration
        outside.main_silent(f"silent in {iteration}")
    outside.iteration_failed(2)  # what a view cannot do ends no monitor process
    outside.main_ended("killed", by_monitor=True)
    assert outside.stacks == STACKS
    assert asked == [
        (Path("/run/incidents/5"), "silent in 0"),
        (Path("/run/incidents/7"), "silent in 2"),
        (Path("/run/incidents/7"), "killed", True),
    ]


def test_before_the_number_of_the_first_incident_is_known_there_is_no_directory(page: Page) -> None:
    asked = list[tuple[Any, ...]]()
    Outside(page, config(asked)).main_ended("killed", by_monitor=False)
    assert asked == [(None, "killed", False)]


def test_a_view_that_cannot_be_made_is_done_without(page: Page) -> None:
    outside = Outside(page, config([], view="NoSuchView"))
    outside.main_silent("silent")
    assert outside.stacks is None
