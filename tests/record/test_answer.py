"""File systems that hang are asked in a thread."""

from __future__ import annotations

import io
import os
import sys
import threading
from pathlib import Path

import pytest

from ncclops.record import answer
from ncclops.record.answer import Answer, Descriptors, tell, within
from tests.conftest import full_pipe


def test_what_does_not_answer_is_given_up() -> None:
    answers = threading.Event()
    with pytest.raises(TimeoutError, match="does not answer"):
        within(0.01, answers.wait)
    answers.set()


def test_the_result_and_the_error_are_handed_on() -> None:
    known = threading.Event()
    answer = Answer(lambda: 3, then=known.set)
    assert known.wait(60)
    assert answer.get(0) == 3
    with pytest.raises(FileNotFoundError):
        within(60, Path("/no/such/file").read_bytes)


def test_a_line_for_nobody_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer, "_TOLD_WITHIN_S", 0.01)
    with full_pipe() as writer, open(writer, "w", closefd=False) as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        tell("ncclops: the agent was killed\n")


def test_a_line_is_told_however_little_of_stderr_there_is(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    tell("one\n")
    assert capfd.readouterr().err == "one\n"
    of_a_notebook = io.StringIO()
    monkeypatch.setattr(sys, "stderr", of_a_notebook)
    tell("two\n")
    assert of_a_notebook.getvalue() == "two\n"
    monkeypatch.setattr(sys, "stderr", None)
    tell("three\n")


def test_descriptors_that_were_put_by_are_free_afterwards() -> None:
    kept = Descriptors(2)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    kept.give()
    assert len(os.listdir("/proc/self/fd")) == before - 2  # noqa: PTH208
