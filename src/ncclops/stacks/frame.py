"""A line of Python code that was being executed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Frame:
    """``line`` counts from 1; 0 where it is not known."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"

    @property
    def short(self) -> str:
        """Without the directories: ``train.py:57 step``."""
        name = self.file.rpartition("/")[2] or self.file
        return f"{name}:{self.line} {self.function}"

    def to_json(self) -> dict[str, Any]:
        return {"file": self.file, "line": self.line, "function": self.function}
