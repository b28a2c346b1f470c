"""A line of Python code that was being executed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Frame:
    """``line`` counts from 1; 0 where it is not known. A file that does not compile has no
    ``function``."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}"
        return f"{place} in {self.function}" if self.function else place

    @property
    def short(self) -> str:
        """Without the directories: ``train.py:57 step``."""
        name = self.file.rpartition("/")[2] or self.file
        return f"{name}:{self.line} {self.function}".rstrip()

    def to_json(self) -> dict[str, Any]:
        return {"file": self.file, "line": self.line, "function": self.function}
