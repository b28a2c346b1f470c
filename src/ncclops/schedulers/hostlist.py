"""Slurm's compact lists of hosts, written out: ``gpu[08-10,12]`` is gpu08, gpu09, gpu10, gpu12."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

_PART = re.compile(r"(?:[^,\[]|\[[^\]]*\])+")  # up to a comma that is not in brackets
_PIECE = re.compile(r"\[([^\]]*)\]|([^\[]+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
# More than any machine has hosts, and no more than a moment's work.
_MOST_NAMES = 100_000
_MOST_DIGITS = 18


def expand(text: str) -> list[str]:
    """The names in ``text``, in its order.

    Raises ``ValueError`` on what is no such list, or one of more than 100,000 names.
    """
    every = (name for part in _PART.findall(text) for name in _names(part.strip()))
    names = list(itertools.islice(every, _MOST_NAMES + 1))
    if len(names) > _MOST_NAMES:
        raise _too_long(text)
    if text.count("[") != text.count("]") or any(set("[]") & set(name) for name in names):
        raise ValueError(f"{text!r} is not a list of hosts: brackets do not match")
    return names


def _names(part: str) -> Iterator[str]:
    pieces = [
        list(itertools.islice(_numbers(numbers), _MOST_NAMES + 1)) if not literal else [literal]
        for numbers, literal in _PIECE.findall(part)
    ]
    return ("".join(name) for name in itertools.product(*pieces))


def _numbers(text: str) -> Iterator[str]:
    for item in text.split(","):
        match = _RANGE.fullmatch(item.strip())
        if match is None:
            raise ValueError(f"[{text}] in a list of hosts: expected numbers, as in [1-3,7]")
        first, last = match[1], match[2] or match[1]
        if max(len(first), len(last)) > _MOST_DIGITS or int(last) - int(first) > _MOST_NAMES:
            raise _too_long(text)
        for number in range(int(first), int(last) + 1):
            yield str(number).zfill(len(first))


def _too_long(text: str) -> ValueError:
    return ValueError(f"{text[:100]!r} stands for more than {_MOST_NAMES:,} hosts")
