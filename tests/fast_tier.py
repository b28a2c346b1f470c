"""The tiers of tests: fast, slow, and more combinations of what slow tests cover.

The fast tier: ``pytest -m "not slow"`` is every test that starts no process and does not sleep.

A test is slow if it is marked so, or if it asks, directly or through another fixture, for
``starts_processes``. What is left is watched: a fast test that starts a process or sleeps fails.
Slow tests run first.

With ``--extended`` run as well those marked ``extended``: slow ones that repeat, on another lane or
in another mode, what a test of the gate covers there or elsewhere, and scenes of several hosts for
which the gate has no time.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from typing import Any, SupportsIndex

import pytest

# The interpreter's own events, see "Audit events table" in Python's documentation.
_STARTS = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"})


class _Watch:
    """Notes what the main thread does while a fast test runs."""

    def __init__(self) -> None:
        self.seen: list[str] | None = None
        sys.addaudithook(self._audit)
        self._sleep = time.sleep
        time.sleep = self._noting_sleep  # Python raises an event for it from 3.13 on only

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in _STARTS:
            self._note(f"{event}{arguments[:2]!r}"[:200])

    def _noting_sleep(self, seconds: SupportsIndex | float, /) -> None:
        self._note(f"time.sleep({seconds!r})")
        self._sleep(seconds)

    def _note(self, what: str) -> None:
        # What a slow test of the same process left running in a thread is not this test's.
        if self.seen is not None and threading.current_thread() is threading.main_thread():
            self.seen.append(what)

    @contextmanager
    def watching(self) -> Iterator[list[str]]:
        """The list that what happens in the body is noted in."""
        before = _traces_of_children()
        self.seen = seen = list[str]()
        try:
            yield seen
        finally:
            self.seen = None
            # multiprocessing starts processes in a way that no event announces.
            if not seen and _traces_of_children() != before:
                seen.append("a child process")


def _traces_of_children() -> tuple[frozenset[str], int]:
    # Not psutil, which reads what all processes of the machine are: 5 ms, four times a test.
    children = set[str]()
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended
            children.update((thread / "children").read_text().split())
    # Each child that is waited for leaves the pages it touched in the sum.
    return frozenset(children), getrusage(RUSAGE_CHILDREN).ru_minflt


_WATCH = _Watch()


@pytest.fixture(scope="session")
def starts_processes() -> None:
    """Asked for by fixtures that start processes: their tests are slow ones."""


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark as slow what asks for ``starts_processes``."""
    if isinstance(item, pytest.Function) and "starts_processes" in item.fixturenames:
        item.add_marker(pytest.mark.slow)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--extended", action="store_true", help="also tests marked `extended`")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files with most slow tests first: the short ones then fill what is left of the time."""
    if not config.getoption("--extended"):
        left_out = [item for item in items if item.get_closest_marker("extended")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("extended")]
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Watch what fixtures do."""
    return (yield from _watched(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Watch what the test does."""
    return (yield from _watched(item))


def _watched(item: pytest.Item) -> Iterator[None]:
    if item.get_closest_marker("slow"):
        return (yield)
    with _WATCH.watching() as seen:
        yield
    if seen:
        pytest.fail(
            f"a fast test starts no process and does not sleep, and this one did: {seen[0]}. "
            "Mark it pytest.mark.slow, or ask for the fixture starts_processes",
            pytrace=False,
        )
    return None
