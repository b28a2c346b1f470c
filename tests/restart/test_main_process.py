"""The main process of a rank, as its monitor process sees it."""

from __future__ import annotations

import os
import select
import subprocess
import sys

import pytest

from ncclops.restart._monitor.main_process import MainProcess
from tests.conftest import LIMIT_S
from tests.freezing import frozen_group

pytestmark = pytest.mark.slow


def test_a_process_that_sigkill_has_not_ended_is_seen() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        pidfd = os.pidfd_open(process.pid)
        seen = MainProcess(process.pid, pidfd)
        try:
            with frozen_group() as group:
                (group / "cgroup.procs").write_text(str(process.pid))
                (group / "freezer.state").write_text("FROZEN")
                assert not seen.is_killed()
                process.kill()
                assert seen.is_killed()
                assert not select.select([pidfd], [], [], 0)[0], "it has not ended"
            assert select.select([pidfd], [], [], LIMIT_S)[0]
        finally:
            os.close(pidfd)
            process.kill()
