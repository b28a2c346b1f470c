"""A log that cannot be written costs its records, and nothing else."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from ncclops.record.log_file import LogFile


def log_to(path: Path) -> None:
    """One record, which a file handler of logging would raise for, or show a traceback."""
    handler = LogFile(path, delay=True)
    logger = logging.Logger("of a test")
    logger.addHandler(handler)
    logger.warning("said")
    handler.close()


def test_a_record_is_written(tmp_path: Path) -> None:
    log_to(tmp_path / "log")
    assert (tmp_path / "log").read_text() == "said\n"


def test_where_nothing_can_be_written_nothing_is_raised_and_nothing_shown(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log_to(tmp_path / "gone" / "log")
    log_to(Path("/dev/full"))
    assert capfd.readouterr() == ("", "")
