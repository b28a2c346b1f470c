"""A script that puts another clock into ``time``: it does not stop, nor hide, what others watch."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest

from ncclops.receipts.recorder import Recorder
from ncclops.record import progress
from ncclops.restart._monitor.link import Page, create_page_fd
from ncclops.restart.monitor_process import MonitorProcess
from ncclops.restart.progress_watchdog import ProgressWatchdog


class Monitor:
    """A monitor process that is there and says nothing."""

    def __init__(self) -> None:
        self.page, self.pid, self.started_at = Page(create_page_fd()), os.getpid(), 0.0

    def fileno(self) -> int:
        return -1


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> Callable[[], float]:
    """The clock itself; the module's stands still, soon after the boot of the machine."""
    clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: 1.0)
    monkeypatch.setattr(time, "monotonic_ns", lambda: 10**9)
    return clock


def test_the_monitor_process_is_shown_the_real_clock(real: Callable[[], float]) -> None:
    monitor, looks = Monitor(), list[float]()
    watchdog = ProgressWatchdog(
        cast("MonitorProcess", monitor),
        timedelta(seconds=1),
        timedelta(seconds=30),
        lambda: True,
        lambda _: None,
        lambda: looks.append(real()),
    )
    began = real()
    monitor.page.touch()
    monitor.page.monitor_tick = began
    assert monitor.page.main_beat >= began
    watchdog._tick(0.0)
    assert looks and began <= monitor.page.watchdog_tick <= real()
    monitor.page.close()


def test_the_agent_is_shown_the_real_clock(real: Callable[[], float], tmp_path: Path) -> None:
    began, fd = real(), os.open(tmp_path / "receipt.jsonl", os.O_WRONLY | os.O_CREAT, 0o600)
    (tmp_path / "ranks" / "0").mkdir(parents=True)
    recorder: Any = Recorder(tmp_path, 0, fd)
    recorder.step(0, None, None, None)
    for number in (progress.STARTED_NS, progress.STEP_NS, progress.TICK_NS):
        assert began <= recorder._numbers[number] / 1e9 <= real()
    recorder._writer.close()
