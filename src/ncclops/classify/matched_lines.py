"""Lines around literals, and what the signatures that match one line leave of each other."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ncclops.classify.model import Signature, Stamp

# Around a literal in a line of a megabyte, this much is read on either side.
_REACH = 4096
EVIDENCE_CHARS = 600
_RANK_DIGITS = 10


@dataclass(frozen=True, slots=True)
class Line:
    """A line that something matched, and what is known about it."""

    text: str
    number: int
    rank: int | None
    stamp: Stamp | None
    steps_before: int


@dataclass(frozen=True, slots=True)
class Match:
    """A signature found in a line, where, and the rank that it accuses."""

    signature: Signature
    start: int
    culprit: int | None


def accused(found: re.Match[str]) -> int | None:
    """The rank in the first filled group whose name begins with ``rank``."""
    named = (value for name, value in found.groupdict().items() if name.startswith("rank"))
    return next((int(value) for value in named if value and len(value) < _RANK_DIGITS), None)


def by_line(block: bytes, found: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int, set[int]]]:
    """(start, stop, literals) of each line, or progress-bar segment, that holds a literal."""
    start = stop = -1
    literals: set[int] = set()
    for end, literal in found:
        if end > stop:
            if literals:
                yield start, stop, literals
            start, stop = _line_around(block, end)
            literals = set()
        literals.add(literal)
    if literals:
        yield start, stop, literals


def _line_around(block: bytes, end: int) -> tuple[int, int]:
    low, high = max(0, end - _REACH), min(len(block), end + _REACH)
    start = max(block.rfind(b"\n", low, end), block.rfind(b"\r", low, end)) + 1 or low
    stop = block.find(b"\n", end, high)
    stop = high if stop < 0 else stop
    bar = block.find(b"\r", end, stop)
    return start, stop if bar < 0 else bar


def strongest_on_line(matched: list[Match]) -> list[Match]:
    """Without what another match explains away: outranked ones, and weak ones beside firm ones."""
    # What holds on a condition is settled when the whole log is known, not here.
    found = [m.signature for m in matched if not (m.signature.requires or m.signature.absent)]
    failures = [s for s in found if s.role != "benign"]
    firm = any(
        s.certainty != "weak" and not any(other.outranks_signature(s) for other in failures)
        for s in failures
    )

    def survives(signature: Signature) -> bool:
        if any(other.outranks_signature(signature) for other in found):
            return False
        return not (firm and signature.certainty == "weak")

    return [match for match in matched if survives(match.signature)]


def excerpt(text: str, start: int) -> str:
    """The part of a line that evidence shows: all of it, or a window that holds the match."""
    if len(text) <= EVIDENCE_CHARS:
        return text
    begin = 0 if start < EVIDENCE_CHARS // 2 else start - EVIDENCE_CHARS // 4
    return text[begin : begin + EVIDENCE_CHARS]
