"""What pages show of commands: blocks of them, and the output that follows."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.conftest import LIMIT_S, CompletedText

# What may differ, and what it stands for: anything, the ends of run ids, numbers, spaces.
_VARIES = re.compile(r"(…)|((?<!\w)(?=[0-9a-f]*\d)[0-9a-f]{6,}(?!\w))|(\d[\d,.]*)|(\s+)")
_STANDS_FOR = {1: ".*?", 2: "[0-9a-f]+", 3: r"\d[\d,.]*", 4: r"\s+"}


def run_block(command: str, directory: Path, environ: Mapping[str, str]) -> CompletedText:
    """``command`` in a shell in ``directory``; both of its outputs are in ``stdout``."""
    return subprocess.run(
        ["sh", "-ec", command],
        cwd=directory,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
    )


def pattern(line: str) -> re.Pattern[str]:
    """What ``line`` stands for: any numbers, ids, spaces and, where it says "…", anything."""
    text, made, end = line.strip(), "", 0
    for found in _VARIES.finditer(text):
        made += re.escape(text[end : found.start()]) + _STANDS_FOR[found.lastindex or 0]
        end = found.end()
    return re.compile(made + re.escape(text[end:]))


def first_that_differs(shown: Iterable[str], printed: str) -> str | None:
    """The first line of ``shown`` that does not follow in ``printed``, wherever that is wrapped."""
    text, position = " ".join(printed.split()), 0
    for line in shown:
        found = pattern(line).search(text, position)
        if found is None:
            return line
        position = found.end()
    return None
