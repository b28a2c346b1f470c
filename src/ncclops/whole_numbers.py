"""Whole numbers in text from outside: options, variables, files.

``int`` takes digits of every script, raises on more than 4,300 of them, and gives numbers for which
a loop or a list has no end. Here a number has a largest value, and is judged by its length first.
"""

from __future__ import annotations

MOST = 2**63 - 1
# Of one node: the largest have some hundred GPUs or a thousand cores.
MOST_WORKERS_OF_A_NODE = 4096
# The largest machines have some ten thousand.
MOST_NODES = 1_000_000
MOST_PORT = 65_535


def whole_number(text: str, most: int = MOST) -> int | None:
    """``text``, decimal digits and nothing else, as a number from 0 to ``most``; else None."""
    if not (text.isascii() and text.isdecimal()):
        return None
    digits = text.lstrip("0") or "0"
    if len(digits) > len(str(most)):
        return None
    number = int(digits)
    return number if number <= most else None
