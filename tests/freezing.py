"""Processes that SIGKILL does not end, as in a driver or on a file system that hangs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

# Of version 1; that of version 2 lets SIGKILL through.
_FREEZER = Path("/sys/fs/cgroup/freezer")


@contextmanager
def frozen_group() -> Iterator[Path]:
    """A control group: a process whose number is put into its ``cgroup.procs`` is frozen by
    ``FROZEN`` in its ``freezer.state``. What is in it is ended here. Skips where none can be made.
    """
    group = _FREEZER / f"ncclops-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be frozen here: {error}")
    try:
        yield group
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            os.kill(int(pid), signal.SIGKILL)
        (group / "freezer.state").write_text("THAWED")
        while (group / "cgroup.procs").read_text():
            time.sleep(0.05)  # no event comes of it
        group.rmdir()
