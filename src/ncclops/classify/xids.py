"""What an Xid number means and what NVIDIA asks for after it: ``xids.toml``, as values."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

# `NVRM: Xid (PCI:0000:91:00): 79, …` of the kernel, and `Xid 79` or `XID error: 79` of tools.
_NUMBER = re.compile(
    r"Xid \([^)]*\):? (\d{1,4})\b|(?i:\bxid)(?i: error| code)?[ :=#]{1,3}(\d{1,4})\b"
)


class Xid(NamedTuple):
    """One entry of the catalogue: ``action`` is NVIDIA's name for the remedy."""

    number: int
    name: str
    action: str
    remedy: str

    def __str__(self) -> str:
        return f"Xid {self.number} ({self.name}): {self.remedy} ({self.action})"


@cache
def catalogue() -> dict[int, Xid]:
    """All entries, by number."""
    import tomllib  # most logs name no Xid

    text = Path(__file__).with_name("xids.toml").read_text("utf-8")
    document = tomllib.loads(text)
    remedies = document["actions"]
    return {
        int(number): Xid(int(number), name, action, remedies[action])
        for number, (name, action) in document["names"].items()
    }


def xid_of_line(text: str) -> Xid | None:
    """The entry of the first Xid that a line names; None where it names none that is known."""
    found = _NUMBER.search(text)
    return catalogue().get(int(found[1] or found[2])) if found else None
