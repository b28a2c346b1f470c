"""The short form of ``scripts/soak_recovery.py``."""

from __future__ import annotations

from pathlib import Path

import pytest

from .recovery import planned, run, steps_of, wrong

pytestmark = pytest.mark.slow


@pytest.mark.extended
def test_random_faults_of_all_kinds_change_no_bit(starts_processes: None, tmp_path: Path) -> None:
    """Three ranks under `ncclops launch`, at their number again after each loss."""
    steps, plan = steps_of(10), planned(0, "ddp", 3, 10)
    undisturbed = run(tmp_path / "undisturbed", "ddp", 3, steps, [])
    assert not wrong(undisturbed, undisturbed.results, [])
    assert not wrong(run(tmp_path / "job", "ddp", 3, steps, plan), undisturbed.results, plan)
