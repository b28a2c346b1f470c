"""Which run is meant, where it is not ours to look into."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ncclops.diagnose.diagnosis import diagnose
from ncclops.errors import UsageError
from ncclops.record import runs
from ncclops.record.paths import RunPaths
from ncclops.report import records


@pytest.fixture
def private() -> Iterator[Path]:
    """A run that this process may not look into, as one under umask 077 of another user."""
    user = os.geteuid()
    with tempfile.TemporaryDirectory() as parent:  # pytest's own are for one user alone
        Path(parent).chmod(0o755)
        run = Path(parent, "run")
        run.mkdir()
        RunPaths(run).events.touch()
        run.chmod(0)
        if user == 0:
            os.seteuid(65534)
        yield run
        if user == 0:
            os.seteuid(0)
        run.chmod(0o700)


def test_a_run_that_may_not_be_read_is_not_said_to_be_none(private: Path) -> None:
    for read in (lambda: runs.find(str(private)), lambda: records.read(private)):
        with pytest.raises(UsageError, match=r"cannot read .*run \(Permission denied\): ask as"):
            read()
    with pytest.raises(UsageError, match="Permission denied"):
        diagnose(private)
