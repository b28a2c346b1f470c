"""What a user names to be written: a file, a device, a pipe; none of them is waited for."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ncclops.record.regular_file import write_named
from tests.conftest import CompletedText

Ncclops = Callable[..., CompletedText]


def test_a_file_is_replaced_and_a_device_takes_it(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("a longer page of before")
    write_named(page, b"page")
    assert page.read_bytes() == b"page"
    write_named(Path("/dev/null"), b"page")


def test_a_pipe_is_written_if_somebody_reads_it(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="it is a pipe that nobody reads"):
        write_named(pipe, b"page")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_named(pipe, b"page")
    assert os.read(reader, 100) == b"page"
    write_named(Path(f"/proc/self/fd/{os.open(pipe, os.O_RDWR)}"), b"more")
    assert os.read(reader, 100) == b"more"


@pytest.mark.timeout(20)
def test_a_command_does_not_wait_for_a_reader(ncclops_in_process: Ncclops, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    result = ncclops_in_process("env", "snapshot", "-o", "pipe")
    assert result.returncode == 2
    assert "a pipe that nobody reads" in result.stderr
