"""The agent hears of a rank whose file has been removed, once its new process has another."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from ncclops.agent.worker_events import WorkerEvents
from ncclops.record import event_log, events
from ncclops.record.events import EnteredEvent, Event, FinishedEvent


def test_a_file_that_is_made_anew_is_followed_after_the_rest_of_the_one_before(
    tmp_path: Path,
) -> None:
    heard: list[tuple[int, type[Event]]] = []
    followed = WorkerEvents(events.decode, lambda rank, event: heard.append((rank, type(event))))
    file = tmp_path / "worker.jsonl"
    file.touch()
    followed.follow({1: file})
    event_log.append(file, EnteredEvent())
    followed.follow({1: file})  # the same: it is not read again
    followed.collect()
    assert heard == [(1, EnteredEvent)]

    event_log.append(file, FinishedEvent())
    file.unlink()  # with the directory of a run, in the middle of it
    file.touch()
    event_log.append(file, EnteredEvent())
    followed.follow({1: file})
    followed.collect()
    assert [event for _, event in heard] == [EnteredEvent, FinishedEvent, EnteredEvent]


def test_where_the_kernel_watches_no_more_files_they_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit on watches is a user's, and is reached when the agent follows its files already."""
    file = tmp_path / "worker.jsonl"
    file.touch()

    async def hear() -> None:
        heard = asyncio.Event()
        followed = WorkerEvents(events.decode, lambda rank, event: heard.set())
        followed.open()
        monkeypatch.setattr(followed._watch._libc, "inotify_add_watch", lambda *watch: -1)
        followed.follow({0: file})
        event_log.append(file, EnteredEvent())
        async with asyncio.timeout(30):
            await heard.wait()
        followed.close()

    asyncio.run(hear())
