"""One pass over raw bytes for all literals at once.

Hyperscan does it at several gigabytes a second, which is why it is a dependency (the numbers
are in docs/classify.md). Where its wheel does not exist an alternation of the standard
library does the same job some fifty times slower; the answers are equal.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from ncclops.classify.cache import NO_CACHE, Cache

# What is searched before hyperscan's database is compiled: that takes as long as these bytes do.
_PLAIN_BYTES = 16 << 10
_KIND = "literals"
# (end of the match, index of the literal), ordered by end.
LiteralHits = list[tuple[int, int]]
Matcher = Callable[[bytes], LiteralHits]


def build_matcher(literals: Sequence[bytes], cache: Cache = NO_CACHE) -> Matcher:
    """A function that finds every literal in a block, by the fastest means installed. Any thread.

    What is compiled is kept in ``cache``.
    """
    if not literals:
        return lambda _block: []
    plain, fast, left = plain_matcher(literals), None, _PLAIN_BYTES

    def find(block: bytes) -> LiteralHits:
        nonlocal fast, left
        left -= len(block)
        if left >= 0:
            return plain(block)
        fast = fast or _fast_matcher(literals, cache)
        return fast(block)

    return find


def _fast_matcher(literals: Sequence[bytes], cache: Cache) -> Matcher:
    try:
        return _hyperscan_matcher(literals, cache)
    except ImportError:
        return stdlib_matcher(literals)


def plain_matcher(literals: Sequence[bytes]) -> Matcher:
    """The same answers by looking for one literal after the other: nothing is compiled before."""

    def find(block: bytes) -> LiteralHits:
        hits: LiteralHits = []
        for index, literal in enumerate(literals):
            start = block.find(literal)
            while start >= 0:
                hits.append((start + len(literal), index))
                start = block.find(literal, start + 1)
        hits.sort()
        return hits

    return find


def _hyperscan_matcher(literals: Sequence[bytes], cache: Cache) -> Matcher:
    import hyperscan

    database = _database(literals, cache)
    of_thread = threading.local()

    def remember(index: int, _start: int, end: int, _flags: int, hits: LiteralHits) -> None:
        hits.append((end, index))

    def find(block: bytes) -> LiteralHits:
        if not hasattr(of_thread, "scratch"):  # one serves a single scan at a time
            of_thread.scratch = hyperscan.Scratch(database)
        hits: LiteralHits = []
        database.scan(block, match_event_handler=remember, context=hits, scratch=of_thread.scratch)
        hits.sort()
        return hits

    return find


def _database(literals: Sequence[bytes], cache: Cache) -> Any:
    """Hyperscan's database of the literals: as kept, or compiled and kept."""
    import hyperscan

    version = getattr(hyperscan, "__version__", "")
    # Lengths keep apart lists that read the same when they are joined.
    lengths = " ".join(str(len(literal)) for literal in literals)
    source = f"hyperscan {version}\n{lengths}\n".encode() + b"".join(literals)
    if (kept := cache.read(_KIND, source)) is not None:
        # It checks itself for another version, for other processors, and for damage.
        with suppress(hyperscan.error):
            return hyperscan.loadb(kept, hyperscan.HS_MODE_BLOCK)
    database = hyperscan.Database(mode=hyperscan.HS_MODE_BLOCK)
    count = len(literals)
    database.compile(
        expressions=list(literals), ids=list(range(count)), flags=[0] * count, literal=True
    )
    cache.write(_KIND, source, lambda: hyperscan.dumpb(database))
    return database


def stdlib_matcher(literals: Sequence[bytes]) -> Matcher:
    """The same answers from ``re``, for places without a hyperscan wheel."""
    longest_first = sorted(literals, key=len, reverse=True)
    pattern = re.compile(b"|".join(map(re.escape, longest_first)))
    # The alternation reports one literal at each position: those that begin it ride along.
    starting = {
        literal: [(len(other), index) for index, other in enumerate(literals)
                  if literal.startswith(other)]
        for literal in literals
    }  # fmt: skip

    def find(block: bytes) -> LiteralHits:
        hits: LiteralHits = []
        position = 0
        while (found := pattern.search(block, position)) is not None:
            start = found.start()
            hits.extend((start + length, index) for length, index in starting[found.group()])
            position = start + 1
        hits.sort()
        return hits

    return find
