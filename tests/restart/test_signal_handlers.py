"""Signal handlers of the program that raise while the function does not run."""

from __future__ import annotations

import signal

import pytest

from ncclops.restart._interrupt.signal_handlers import contain_handlers, release_handlers


def fail(number: int, _: object) -> None:
    raise TimeoutError(f"signal {number}")


def test_one_that_raises_while_handlers_are_being_contained_goes_no_further(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is not contained yet, and what it raises would end that half-way."""
    before = signal.signal(signal.SIGALRM, fail)
    coming = [signal.SIGALRM]

    def valid_signals() -> set[signal.Signals]:
        if coming:
            signal.raise_signal(coming.pop())
        return {signal.SIGALRM}

    monkeypatch.setattr(signal, "valid_signals", valid_signals)
    try:
        contain_handlers()
        signal.raise_signal(signal.SIGALRM)
        release_handlers()
        assert signal.getsignal(signal.SIGALRM) is fail
    finally:
        signal.signal(signal.SIGALRM, before)
