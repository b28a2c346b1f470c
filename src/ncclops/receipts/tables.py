"""Tables that a script prints: a line with the names of the columns, then rows of numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass

_STEP = re.compile(r"(?i)(?:(?:global|train|training|optimizer)[ _])?(?:step|iter|iteration)s?")
_LOSS = re.compile(r"(?i)(?!.*(?:val|eval|test|best)).*loss")
_NUMBER = re.compile(r"(?i)[+-]?(?:\d[\d,]*(?:\.\d*)?(?:e[+-]?\d+)?|nan|inf)")


@dataclass(frozen=True)
class Table:
    """The columns of a table that has a step and a loss of training; in ``epoch`` perhaps more."""

    separator: str | None  # None: blanks
    columns: int
    step: int
    loss: int
    epoch: int | None

    def row(self, line: str) -> dict[str, list[str]] | None:
        """The step, and the epoch, in a row of this table; None if ``line`` is none."""
        cells = _cells(line, self.separator)
        if len(cells) != self.columns or not _NUMBER.fullmatch(cells[self.loss]):
            return None
        named = {"step": cells[self.step]}
        if self.epoch is not None:
            named["epoch"] = cells[self.epoch]
        if not all(re.fullmatch(r"\d+", cell) for cell in named.values()):
            return None
        return {name: [cell] for name, cell in named.items()}


def table_under(line: str) -> Table | None:
    """The table whose columns ``line`` names; None without a step and a loss of training."""
    separator = next((each for each in "\t|," if each in line), None)
    names = _cells(line, separator)
    step, loss, epoch = (
        next((n for n, name in enumerate(names) if regex.fullmatch(name)), None)
        for regex in (_STEP, _LOSS, re.compile("(?i)epoch"))
    )
    return None if step is None or loss is None else Table(separator, len(names), step, loss, epoch)


def may_be_row(line: bytes) -> bool:
    """A quick look: whether ``line`` begins with a number, as rows do."""
    return line.lstrip(b" |\t")[:1].isdigit()


def _cells(line: str, separator: str | None) -> list[str]:
    if separator is None:
        return line.split()
    text = line.strip().strip("|") if separator == "|" else line
    return [cell.strip() for cell in text.split(separator)]
