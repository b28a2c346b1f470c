"""Chains of exceptions: ``__cause__`` and ``__context__``, followed as a traceback prints them."""

from __future__ import annotations

from collections.abc import Iterator

from ncclops.restart.exception import RankShouldRestart, RestartError


class RemoteFaultError(RestartError):
    """What happened on the rank that caused the restart, as text.

    Chained to what a rank leaves with that itself was well.
    """


def chain_of(error: BaseException | None) -> Iterator[BaseException]:
    """``error`` and what it was raised from or during, outermost first; ends on a cycle."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def comes_from_restart(error: BaseException | None) -> bool:
    """Whether ``error`` is ``RankShouldRestart``, or was raised while that was being handled."""
    return any(isinstance(link, RankShouldRestart) for link in chain_of(error))


def append_to_chain(error: BaseException, earlier: BaseException) -> None:
    """Make ``earlier`` the end of ``error``'s chain, unless it is in it."""
    links = list(chain_of(error))
    if earlier not in links and links[-1].__cause__ is None and links[-1].__context__ is None:
        links[-1].__cause__ = earlier
