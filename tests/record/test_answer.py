"""File systems that hang are asked in a thread."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from ncclops.record.answer import Answer, Descriptors, within


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


def test_descriptors_that_were_put_by_are_free_afterwards() -> None:
    kept = Descriptors(2)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    kept.give()
    assert len(os.listdir("/proc/self/fd")) == before - 2  # noqa: PTH208
