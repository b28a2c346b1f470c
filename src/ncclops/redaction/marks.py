"""Values of secrets, recognised again in text without being kept.

A mark is a value's length and 16 bits of its hash: enough to take it out of a log, and no help to
whoever looks for the value.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Mapping

Mark = tuple[int, int]

# Shorter ones are words.
_SHORTEST = 8
# Where a value may begin and end: between what programs write around one.
_TOKEN = re.compile(r"[^\s\"']+")
_SEPARATOR = re.compile(r"[=:,;@/()\[\]{}<>|&?]")


def mark_of(value: str) -> Mark:
    """The mark of one value, which may hold halves of characters: bytes that are no UTF-8."""
    digest = hashlib.sha256(value.encode(errors="surrogatepass")).digest()
    return len(value), int.from_bytes(digest[:2], "big")


def marks_of(variables: Mapping[str, str], redacted: Mapping[str, str]) -> list[Mark]:
    """The marks of those ``variables`` that ``redacted`` does not show as they are."""
    hidden = {value for name, value in variables.items() if redacted[name] != value}
    return sorted({mark_of(value) for value in hidden if len(value) >= _SHORTEST})


def without_marked(text: str, marks: Collection[Mark], replace: Callable[[], str]) -> str:
    """``text`` with ``replace()`` for each value without blanks that one of ``marks`` is of."""
    lengths = sorted({length for length, _ in marks}, reverse=True)

    def clean(token: str) -> str:
        edges = list(_SEPARATOR.finditer(token))
        ends = {len(token), *(edge.start() for edge in edges)}
        parts, done = [], 0
        for start in (0, *(edge.end() for edge in edges)):
            for end in (start + length for length in lengths if start >= done):
                if end in ends and mark_of(token[start:end]) in marks:
                    parts += [token[done:start], replace()]
                    done = end
                    break
        return "".join((*parts, token[done:]))

    return _TOKEN.sub(lambda found: clean(found.group()), text)
