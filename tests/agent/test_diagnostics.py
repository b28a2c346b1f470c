"""The agent's log, and mistakes of ncclops: recorded with their traceback, and in nothing's way."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ncclops.agent.diagnostics import AgentLog, InternalErrors
from ncclops.record import event_log
from ncclops.record.events import InternalErrorEvent
from ncclops.record.run_directory import RunDirectory

LOGGER = logging.getLogger("ncclops")


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(exact=tmp_path / "run", parent=None, node="n0")


class Said(list[str]):
    """What the terminal gets, with the log open."""

    log: AgentLog


@pytest.fixture
def said(run: RunDirectory) -> Iterator[Said]:
    handlers, level, propagate = list(LOGGER.handlers), LOGGER.level, LOGGER.propagate
    lines = Said()
    lines.log = AgentLog(run, lines.append)
    lines.log.open()
    yield lines
    lines.log.close()
    for handler in list(LOGGER.handlers):
        LOGGER.removeHandler(handler)
        handler.close()
    for handler in handlers:
        LOGGER.addHandler(handler)
    LOGGER.setLevel(level)
    LOGGER.propagate = propagate


def errors_of(run: RunDirectory) -> list[InternalErrorEvent]:
    return [e for e in event_log.read(run.paths.events) if isinstance(e, InternalErrorEvent)]


def test_a_mistake_is_an_event_a_traceback_in_the_log_and_a_line_on_the_terminal(
    run: RunDirectory, said: Said
) -> None:
    errors = InternalErrors(run)
    with errors.recorded("judging the receipt"):
        dict[str, int]()["no such key"]
    (event,) = errors_of(run)
    assert (event.doing, event.error) == ("judging the receipt", "KeyError: 'no such key'")
    assert errors.count == 1
    said.log.close()
    text = run.paths.agent_log.read_text()
    assert "Traceback" in text
    assert "test_diagnostics.py" in text
    (line,) = said
    assert line.startswith("error: internal error in judging the receipt: KeyError")
    assert "agent.log" in line
    assert "\n" not in line


def test_a_value_that_cannot_be_had_is_none(run: RunDirectory, said: Said) -> None:
    errors = InternalErrors(run)
    assert errors.value_of("adding", lambda: 1 + 1) == 2
    assert errors.value_of("dividing", lambda: 1 // 0) is None
    assert [event.doing for event in errors_of(run)] == ["dividing"]
    assert len(said) == 1


def test_an_interrupt_is_no_mistake(run: RunDirectory, said: Said) -> None:
    errors = InternalErrors(run)
    with pytest.raises(KeyboardInterrupt), errors.recorded("waiting"):
        raise KeyboardInterrupt
    assert errors_of(run) == []
    assert said == []


def test_mistakes_in_callbacks_and_threads_are_recorded(
    run: RunDirectory, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)  # put back afterwards
    errors = InternalErrors(run)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        errors.watch(loop)
        loop.call_soon(lambda: 1 // 0)
        thread = threading.Thread(target=lambda: 1 // 0, name="ncclops-scan")
        thread.start()
        await asyncio.to_thread(thread.join)

    asyncio.run(main())
    assert sorted(event.doing for event in errors_of(run)) == [
        "the event loop",
        "thread ncclops-scan",
    ]
    assert len(said) == 2


def test_the_log_has_what_the_terminal_is_spared(run: RunDirectory, said: Said) -> None:
    logging.getLogger("ncclops.agent.agent").info("rank %d ended", 3)
    assert said == []
    said.log.close()
    text = run.paths.agent_log.read_text()
    assert "INFO ncclops.agent.agent: rank 3 ended" in text


def test_a_log_that_cannot_be_written_stops_nothing(run: RunDirectory, said: Said) -> None:
    run.paths.agent_log.unlink()
    run.paths.agent_log.mkdir()
    AgentLog(run, said.append).open()
    logging.getLogger("ncclops.x").warning("still said")
    assert [line.partition(":")[0] for line in said] == ["warning", "warning"]
    assert said[-1] == "warning: still said"


def test_a_log_on_a_full_disk_ends_without_a_word(run: RunDirectory, said: Said) -> None:
    said.log.close()
    run.paths.agent_log.unlink()
    run.paths.agent_log.symlink_to("/dev/full")
    full = AgentLog(run, said.append)
    full.open()
    logging.getLogger("ncclops.x").info("lost")
    full.close()  # a thread that fails is an error of this test
