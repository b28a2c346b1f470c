"""The known words that are close to one that is not known: ``did you mean …?``."""

from __future__ import annotations

from collections.abc import Iterable


def meant(word: str, known: Iterable[str], count: int = 1) -> list[str]:
    """Those of ``known`` that are most like ``word``, in upper or lower case; none if none is."""
    from difflib import get_close_matches  # where all is well, nobody waits for its import

    spelled = {each.lower(): each for each in known}
    # What is compared grows with the square of the length.
    return [spelled[each] for each in get_close_matches(word[:100].lower(), spelled, n=count)]


def nearest(word: str, known: Iterable[str], *, count: int = 1, or_else: str | None = None) -> str:
    """``"; did you mean …?"`` with the ``count`` closest of ``known``.

    If none is close: ``or_else``, or without it the whole list.
    """
    names = list(known)
    if close := meant(word, names, count):
        return f"; did you mean {' or '.join(close)}?"
    if or_else is not None:
        return or_else
    return f"; known: {', '.join(names)}" if names else ""
