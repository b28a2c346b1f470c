"""What programs that use the Python API find around them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.flight.dumps import dump, entry, write_pickles

# Reports as many steps as asked for, slowly enough to be stopped on the way.
TRAIN = """
import sys, time
from ncclops import receipt

with receipt.compile_warmup():
    pass
for n in range(int(sys.argv[2])):
    time.sleep(0.02)
    receipt.step(n, tokens=10, loss=2.0)
receipt.peak_memory()
receipt.end()
"""
FAIL = """
import os
if os.environ["RANK"] == "1":
    raise ValueError("a mistake")
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A directory with training scripts, and with flight-recorder dumps of a hang."""
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "fail.py").write_text(FAIL)
    waits = dump([entry(1), entry(2, state="started")])
    write_pickles(tmp_path / "dumps", {0: waits, 1: dump([entry(1)])}, "rank_")
    return tmp_path
