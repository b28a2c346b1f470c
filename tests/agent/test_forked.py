"""A child that another process has started for this one."""

from __future__ import annotations

import os
import signal

import pytest

from ncclops.agent.forked import ForkedProcess


@pytest.mark.slow
def test_how_it_ended_is_known_for_good_and_its_number_is_not_used_again() -> None:
    if (pid := os.fork()) == 0:
        signal.pause()
        os._exit(0)
    process = ForkedProcess(pid)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    process.kill()  # nothing is left of it
    assert process.wait() == -signal.SIGKILL
