"""Receipts from a training script: ``from ncclops import receipt``.

    with receipt.compile_warmup():
        model(example).sum().backward()
    for n, batch in enumerate(batches):
        ...
        receipt.step(n, tokens=batch.numel(), loss=loss)
    receipt.peak_memory()
    receipt.end()

Under ``ncclops launch`` each call adds to the record by which a run is judged; a step is also a
heartbeat and the point at which a requested stop takes effect. Anywhere else the calls do nothing.
None of them does I/O in the calling thread, and none imports torch. They are for the thread that
trains; one thread at a time.

Outside of training, ``receipt.check(path)`` judges a log or a run, as `ncclops receipt check` does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ContextDecorator
from datetime import timedelta
from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, Self, SupportsFloat, TypeVar

from ncclops.durations import parse_duration
from ncclops.receipts.recorder import current

if TYPE_CHECKING:
    from ncclops.receipts.judge import Receipt

__all__ = ["check", "compile_warmup", "end", "on_stop", "peak_memory", "phase", "step", "stop"]

Callback = TypeVar("Callback", bound=Callable[[], object])


class compile_warmup(ContextDecorator):  # noqa: N801 - reads as the function it is used as
    """Compile warm-up: as ``with compile_warmup():`` (or a decorator) around what compiles.

    Where that cannot be wrapped, ``compile_warmup(seconds=31.4)`` afterwards says how long it took
    (a number of seconds or a ``timedelta``). A script that calls neither counts as warm when its
    second step has ended.
    Raises ``TypeError`` for anything else, ``ValueError`` for less than nothing or no number.
    """

    def __init__(self, seconds: float | timedelta | None = None) -> None:
        if seconds is not None:
            current().end_warmup(_warmup(seconds))

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        current().begin_warmup()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        taken = timedelta(seconds=time.monotonic() - self._began)
        current().end_warmup(taken, completed=kind is None)


class phase(ContextDecorator):  # noqa: N801 - reads as the function it is used as
    """Declare what takes longer than steps do: ``with phase("checkpoint", limit="12m"):``.

    Within ``limit`` (a ``timedelta`` or text such as ``"90s"``) the rank is not taken for hung, and
    the step around it is left out of rates and of the comparison of ranks. The default is a
    little more than the 10 minutes that NCCL groups wait by default. Phases nest; the inner one
    holds.
    Raises ``ValueError`` if ``limit`` is no duration or nothing, ``TypeError`` for a number without
    a unit and for a ``name`` that is no text.
    """

    def __init__(self, name: str, limit: timedelta | str = "12m") -> None:
        if not isinstance(name, str):
            raise TypeError(
                f"receipt.phase(name): give it a name, as in receipt.phase('eval'), not {name!r}"
            )
        if not isinstance(limit, str | timedelta):
            raise TypeError(
                f"receipt.phase({name!r}, limit): give text with a unit, as '90s', or a"
                f" datetime.timedelta, not {limit!r}"
            )
        self._name = name
        self._limit = parse_duration(limit) if isinstance(limit, str) else limit
        if self._limit <= timedelta(0):
            raise ValueError(f"receipt.phase({name!r}, limit): must be positive, not {limit}")

    def __enter__(self) -> Self:
        current().begin_phase(self._name, self._limit)
        return self

    def __exit__(self, *_: object) -> None:
        current().end_phase()


def step(
    n: int,
    tokens: float | None = None,
    loss: SupportsFloat | None = None,
    *,
    busy: timedelta | None = None,
    ends: bool = True,
) -> bool:
    """Step ``n`` has ended; call on every rank, after its last collective.

    ``n`` is counted as the script counts, from 0 or 1, the same on all ranks, on across restarts.
    ``tokens`` is how many the step worked through, in whatever unit the script compares runs by;
    rates are made of it. A ``loss`` that is a tensor is read here, which waits for the GPU: pass it
    where the script reads it anyway. ``busy`` is the time without waiting for other ranks, where
    the script knows it: collectives make all ranks as slow as the slowest, and only this shows
    which one that is.

    When a stop was agreed upon for this step, runs what :func:`on_stop` was given and raises
    ``SystemExit(0)``. With ``ends=False`` it returns True then, for a training loop that saves by
    itself and calls :func:`stop` afterwards; False in any other case.
    Raises ``ValueError`` under ``launch`` if ``n`` is no number of a step (an integer of 63 bits),
    ``TypeError`` if ``tokens`` or ``loss`` is no number or ``busy`` no ``timedelta``.
    """
    return current().step(n, tokens, loss, busy, ends=ends)


def stop() -> None:
    """End this rank as agreed: after ``step(..., ends=False)`` has returned True, on every rank.

    Runs what :func:`on_stop` was given and raises ``SystemExit(0)``; does nothing outside of runs.
    """
    current().stop()


def peak_memory() -> float:
    """The most memory used so far, in GiB: of the GPU if the script uses one, else resident."""
    return current().peak_memory().gib


def end() -> None:
    """Training is complete: the end marker, without which no run is called healthy."""
    current().end()


def on_stop(callback: Callback) -> Callback:
    """Call ``callback()`` when a requested stop takes effect, on every rank, after the same step.

    For a last checkpoint; collectives work in it. Also a decorator. Raises ``TypeError`` for what
    cannot be called.
    """
    if not callable(callback):  # at the stop it would be too late to find out
        raise TypeError(f"receipt.on_stop(callback): give a function, not {callback!r}")
    current().on_stop(callback)
    return callback


def check(path: str | PathLike[str]) -> Receipt:
    """The judgement of a log, a ``receipt.jsonl`` or a run directory by the five rules of liveness.

    ``verdict`` of the result is ``"healthy"`` or what is missing; ``rules`` has the evidence for
    each. Any thread. Raises ``UsageError`` if ``path`` cannot be read or is no log and no run.
    """
    from ncclops.given_path import given_path
    from ncclops.receipts.judge import judge
    from ncclops.receipts.sources import load

    return judge(load(given_path(path, "a log, a receipt.jsonl or a run directory")))


def _warmup(seconds: float | timedelta) -> timedelta:
    if isinstance(seconds, timedelta):
        taken = seconds
    elif isinstance(seconds, int | float):
        try:
            taken = timedelta(seconds=seconds)
        except (ValueError, OverflowError):  # nan, inf
            taken = timedelta(-1)
    else:
        raise TypeError(_no_seconds(seconds))
    if taken < timedelta(0):
        raise ValueError(f"receipt.compile_warmup(seconds): no time is {seconds} long")
    return taken


def _no_seconds(given: object) -> str:
    bare = "; as a decorator it has parentheses: @receipt.compile_warmup()"
    return (
        "receipt.compile_warmup(seconds): give a number of seconds or a datetime.timedelta,"
        f" not {given!r}{bare if callable(given) else ''}"
    )
