"""Signal handlers of the program that raise while the function does not run."""

from __future__ import annotations

import functools
import signal

import pytest

from ncclops.restart._interrupt.signal_handlers import contain_handlers, release_handlers
from ncclops.restart.exception import RankShouldRestart


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


def test_what_a_program_has_put_in_the_place_of_signal_signal_is_not_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may wrap each handler, such as `ncclops launch` does."""
    before = signal.signal(signal.SIGALRM, fail)
    plain = signal.signal
    monkeypatch.setattr(signal, "signal", lambda n, h: plain(n, functools.partial(h)))
    try:
        contain_handlers()
        release_handlers()
        assert signal.getsignal(signal.SIGALRM) is fail
    finally:
        plain(signal.SIGALRM, before)


def test_nor_is_what_it_has_put_in_the_place_of_signal_getsignal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may raise each time, and to look again is for handlers that raise."""
    before, handler_of = signal.signal(signal.SIGALRM, fail), signal.getsignal
    asked = list[int]()

    def refuse(number: int) -> object:
        asked.append(number)
        if len(asked) > 3:
            return None
        raise RuntimeError("not here")

    monkeypatch.setattr(signal, "getsignal", refuse)
    try:
        contain_handlers()
        release_handlers()
        assert (asked, handler_of(signal.SIGALRM)) == ([], fail)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_one_that_asks_for_a_section_without_restarts_while_one_is_under_way_is_ignored() -> None:
    """Between two iterations: what it raises would end the rank."""

    def ask(*_: object) -> None:
        raise RankShouldRestart("a restart has begun")

    before = signal.signal(signal.SIGALRM, ask)
    try:
        contain_handlers()
        signal.raise_signal(signal.SIGALRM)
    finally:
        release_handlers()
        signal.signal(signal.SIGALRM, before)
