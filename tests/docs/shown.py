"""What pages show of commands: blocks of them, and the output that follows."""

from __future__ import annotations

import re
from collections.abc import Iterable

_NUMBER = re.compile(r"\d[\d,.]*")


def pattern(line: str) -> re.Pattern[str]:
    """What ``line`` stands for: any numbers, spaces and, where it says "…", anything."""
    parts = re.split(r"(…|\d[\d,.]*|\s+)", line.strip())
    made = [
        ".*?" if part == "…" else r"\s+" if part.isspace() else re.escape(part)
        for part in (_NUMBER.sub("\0", each) for each in parts)
    ]
    return re.compile("".join(made).replace("\\\0", "\0").replace("\0", _NUMBER.pattern))


def first_that_differs(shown: Iterable[str], printed: str) -> str | None:
    """The first line of ``shown`` that does not follow in ``printed``, wherever that is wrapped."""
    text, position = " ".join(printed.split()), 0
    for line in shown:
        found = pattern(line).search(text, position)
        if found is None:
            return line
        position = found.end()
    return None
