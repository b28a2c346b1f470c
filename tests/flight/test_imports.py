"""What the package may cost those who only import it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import clean_environ

pytestmark = pytest.mark.slow


def test_reading_never_imports_torch() -> None:
    """Neither the package, nor the command, nor the process that reads dumps."""
    code = (
        "import sys, ncclops.flight, ncclops.flight.torch_opinion, ncclops.cli.flight,"
        "ncclops.flight.reader_process; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], env=clean_environ()).returncode == 0
