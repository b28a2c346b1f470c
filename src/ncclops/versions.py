"""Version conditions such as ``">=2.8,<2.14"``, on releases only.

A development build counts as the release it leads to (``2.14.0.dev20260901`` is 2.14): what a
release changed is in its nightlies for months before. ``packaging`` puts it before that release,
and refuses the version of a site's own build (``2.8.0-ours``); here the release numbers are all
that counts, whatever follows them.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

from ncclops.whole_numbers import whole_number

_OPERATORS: dict[str, Callable[[tuple[int, ...], tuple[int, ...]], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
_CLAUSE = re.compile(r"\s*(>=|<=|==|!=|>|<)\s*(\d+(?:\.\d+)*)\s*")
_RELEASE = re.compile(r"\d+(?:\.\d+)*", re.ASCII)


def release(version: str) -> tuple[int, ...]:
    """The release numbers of ``version``, to be compared: ``"2.13.1+cu130"`` is ``(2, 13, 1)``.

    Zeros at the end count for nothing: ``2.8.0`` is ``(2, 8)``, as ``2.8`` is. Raises
    ``ValueError`` when it does not start with a number.
    """
    match = _RELEASE.match(version)
    if match is None:
        raise ValueError(f"{version!r} is not a version")
    numbers = list[int]()
    for part in match[0].split("."):
        number = whole_number(part)
        if number is None:
            raise ValueError(f"{version[:80]!r} is not a version")
        numbers.append(number)
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def parse_spec(spec: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The clauses of ``spec``, all of which must hold. Raises ``ValueError`` on anything else."""
    clauses = []
    for clause in spec.split(","):
        match = _CLAUSE.fullmatch(clause)
        if match is None:
            raise ValueError(f"{spec!r} is not a version condition: write it as >=2.8,<2.14")
        clauses.append((match[1], release(match[2])))
    return tuple(clauses)


def satisfies(version: str, spec: str) -> bool:
    """Whether ``version`` meets every clause of ``spec``; ``2.8`` and ``2.8.0`` are the same."""
    have = release(version)
    return all(_OPERATORS[symbol](have, want) for symbol, want in parse_spec(spec))
