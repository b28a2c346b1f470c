"""The terminal of one rank, where its log takes nothing."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from ncclops.agent import attached
from ncclops.agent.attached import Attached
from tests.conftest import LIMIT_S


@pytest.mark.parametrize("log", ["/dev/full", "removed/stdout.log"])
def test_a_rank_that_has_the_terminal_goes_on_where_its_log_takes_nothing(
    log: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    master, slave = os.openpty()
    monkeypatch.setattr(attached, "_STDIN", slave)
    monkeypatch.setattr(attached, "_STDOUT", slave)
    terminal = Attached(tmp_path / log)
    stdout = terminal.open().stdout
    assert stdout is not None

    def print_much() -> None:
        for _ in range(1000):
            os.write(stdout, b"x" * 99 + b"\n")

    rank = threading.Thread(target=print_much, daemon=True)
    rank.start()
    rank.join(LIMIT_S)
    assert not rank.is_alive()
    terminal.drain()
    terminal.close()
    for fd in (master, slave):
        os.close(fd)


def test_what_it_prints_is_in_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    master, slave = os.openpty()
    monkeypatch.setattr(attached, "_STDIN", slave)
    monkeypatch.setattr(attached, "_STDOUT", slave)
    log = tmp_path / "stdout.log"
    log.write_text("an earlier attempt\n")
    terminal = Attached(log)
    stdout = terminal.open().stdout
    assert stdout is not None
    os.write(stdout, b"a line\n")
    terminal.close()
    assert log.read_text() == "an earlier attempt\na line\n"
    for fd in (master, slave):
        os.close(fd)
