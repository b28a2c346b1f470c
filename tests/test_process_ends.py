"""Signals have names where the system has them, and numbers otherwise."""

from __future__ import annotations

import signal

import pytest

from ncclops.process_ends import describe_exit, describe_failure, exit_status, signal_name


@pytest.mark.parametrize(
    ("number", "name"),
    [(9, "SIGKILL"), (int(signal.SIGRTMIN), "SIGRTMIN"), (int(signal.SIGRTMIN) + 3, "signal 37")],
)
def test_the_name_of_a_signal(number: int, name: str) -> None:
    assert signal_name(number) == name


def test_an_end_in_words() -> None:
    assert describe_exit(None, "SIGKILL") == "was killed by SIGKILL"
    assert describe_exit(3, None) == "exited with code 3"
    assert describe_exit(None, None) == "did not end"
    assert describe_failure(0, None) == "exited with code 0 before its script had ended well"
    assert describe_failure(1, None) == "exited with code 1"
    assert (exit_status(3, None), exit_status(None, "SIGBUS")) == ("exit code 3", "SIGBUS")
