"""What an unexplained failure is likeliest to be, and what would decide: ``candidates.toml``.

This decides nothing. It orders classes by the words in the last part of the logs, for people who
have to look further.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from itertools import islice
from pathlib import Path

from ncclops.classify.model import Candidate

_SHOWN = 3
# Words near the end say more than those before; a log in which they are frequent says no more.
_LAST_LINES, _MOST_LINES = 60, 5
_MOST_LOGS = 64


def likeliest(tails: Iterable[str]) -> tuple[Candidate, ...]:
    """The three likeliest classes, the likeliest first, for logs that end in ``tails``."""
    counts: dict[str, int] = {}
    lines = [
        line for tail in islice(tails, _MOST_LOGS) for line in tail.splitlines()[-_LAST_LINES:]
    ]
    for candidate, words in _table():
        counts[candidate.class_] = min(sum(bool(words.search(line)) for line in lines), _MOST_LINES)
    # Sorting is stable: among equals the table's order, likelihood without any word, decides.
    ordered = sorted(_table(), key=lambda entry: -counts[entry[0].class_])
    return tuple(candidate for candidate, _ in ordered[:_SHOWN])


@cache
def _table() -> tuple[tuple[Candidate, re.Pattern[str]], ...]:
    import tomllib  # most failures are explained

    text = Path(__file__).with_name("candidates.toml").read_text("utf-8")
    return tuple(
        (Candidate(entry["class"], entry["decide"]), re.compile(entry["words"]))
        for entry in tomllib.loads(text)["candidate"]
    )
