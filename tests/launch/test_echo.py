"""The terminal shows whole lines with the rank in front, in colour only where it helps."""

from __future__ import annotations

import os
import pty
from pathlib import Path
from typing import BinaryIO

import pytest

from ncclops.launch.echo import Echo, Source


@pytest.fixture(autouse=True)
def no_colour_wishes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)


def show(path: Path, content: bytes, stream: BinaryIO, notes: tuple[str, ...] = ()) -> None:
    path.write_bytes(content)
    echo = Echo([Source(3, path, to_stderr=False)], stdout=stream, stderr=stream)
    echo.start()
    for note in notes:
        echo.say(note)
    echo.finish()


def on_terminal(path: Path, content: bytes) -> bytes:
    """What a terminal receives."""
    master, slave = pty.openpty()
    with os.fdopen(slave, "wb", buffering=0) as terminal:
        show(path, content, terminal)
        shown = os.read(master, 1 << 16)
    os.close(master)
    return shown


def test_a_file_gets_no_colour(tmp_path: Path) -> None:
    with (tmp_path / "shown").open("w+b") as stream:
        show(tmp_path / "log", b"one\ntwo", stream)
        stream.seek(0)
        assert stream.read() == b"[rank3]: one\n[rank3]: two\n"


def test_a_terminal_gets_colour_unless_it_is_unwanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert b"\x1b[" in on_terminal(tmp_path / "log", b"one\n")
    monkeypatch.setenv("NO_COLOR", "1")
    assert on_terminal(tmp_path / "log", b"one\n") == b"[rank3]: one\r\n"


def test_torchs_own_rank_prefix_is_not_repeated(tmp_path: Path) -> None:
    with (tmp_path / "shown").open("w+b") as stream:
        show(tmp_path / "log", b"[rank3]: Traceback\n[rank4]: odd\n", stream)
        stream.seek(0)
        assert stream.read() == b"[rank3]: Traceback\n[rank3]: [rank4]: odd\n"


def test_our_own_lines_stand_between_workers_lines(tmp_path: Path) -> None:
    with (tmp_path / "shown").open("w+b") as stream:
        show(tmp_path / "log", b"x" * 100_000 + b"\n", stream, notes=("first", "second"))
        stream.seek(0)
        lines = stream.read().splitlines()
    assert [line for line in lines if line.startswith(b"ncclops")] == [
        b"ncclops: first",
        b"ncclops: second",
    ]
    assert len(lines) == 3
