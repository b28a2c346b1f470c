"""What a notebook sets: its Python cells are one program, a line with ``!`` a shell of its own."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from ncclops.env.lint import slips
from ncclops.env.lint.environments import Found, is_setting_of_interest
from ncclops.env.lint.model import Setting
from ncclops.env.lint.passing import ASSIGNMENT, value_of
from ncclops.env.lint.python_source import read_python
from ncclops.env.lint.shell import read_shell
from ncclops.env.lint.syntax import Command, parse_script
from ncclops.env.lint.words import NAME, Word

# Lines with their numbers in the file.
_Lines = list[tuple[int, str]]

_SETS = re.compile(rf"(\s*)%(?:set_)?env\s+({NAME})(?:\s*=\s*|\s+)(.+)")
_SHELL = r"(\s*)(?:([\w, ]+)=\s*)?(?:!!?|%(?:system|sx)\s|%time\s+!)"
_BEGINS_COMMAND, _COMMAND = re.compile(_SHELL), re.compile(f"{_SHELL}(.+)", re.DOTALL)
_MAGIC = re.compile(r"\s*[%?]|\s*[\w.]+\?+\s*$")
_IS_MAGIC = re.compile(r"^[ \t]*(?:!|%%?[a-z])", re.MULTILINE)
_SHELL_CELL = re.compile(r"%%(?:bash|sh|!|script\s+(?:\S*/)?(?:ba|z)?sh)\b")
_FILE_CELL = re.compile(r"%%(?:writefile|file)\s+(?:-a\s+|--append\s+)?(\S+)")
# A file that is written in another way is not searched for each of its lines.
_MOST_MISSED = 20
_PYTHON_CELL = re.compile(r"%%(?:capture|time|timeit|prun|python3?|px)\b")


def holds_magics(text: str) -> bool:
    """Whether ``text`` is a notebook's code and no Python: it has lines of IPython's own."""
    if not _IS_MAGIC.search(text):
        return False
    return not _is_python(text)


def code_of(text: str) -> str:
    """The code of a notebook, each line where it stands in the file."""
    return _at_their_lines(row for cell in _cells(text, 1)[0] for row in cell)


def read_notebook(text: str, found: Found, line: int = 1) -> None:
    """Tell ``found`` what a notebook sets, or a script that was saved from one."""
    cells, language = _cells(text, line)
    if language == "bash":
        read_shell(_at_their_lines(row for cell in cells for row in cell), found)
    if language != "python":
        return
    program: _Lines = []
    for cell in cells:
        program.extend(_python_of(cell, found))
    read_python(_at_their_lines(program), found)


def _cells(text: str, line: int) -> tuple[list[_Lines], str]:
    """The code of each cell, and the language of all."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return [list(enumerate(text.split("\n"), start=line))], "python"
    if not isinstance(document, dict):
        return [], ""
    kernel = _part(document, "metadata")
    language = _part(kernel, "kernelspec").get("language") or _part(kernel, "language_info").get(
        "name", "python"
    )
    places = _Places(text)
    given = document.get("cells")
    cells = [
        list(places.of(cell.get("source", "")))
        for cell in (given if isinstance(given, list) else ())
        if isinstance(cell, dict) and cell.get("cell_type") == "code"
    ]
    return cells, str(language).lower()


def _part(mapping: dict[str, Any], key: str) -> dict[str, Any]:
    inner = mapping.get(key)
    return inner if isinstance(inner, dict) else {}


class _Places:
    """Where the lines of the cells stand in the file, which is read from its begin to its end."""

    def __init__(self, text: str) -> None:
        self.text, self.at, self.line = text, 0, 1
        # Whether the file has other letters as \uXXXX, and how many lines were not found at all.
        self.escaped, self.missed = False, 0

    def of(self, source: object) -> Iterator[tuple[int, str]]:
        pieces = source if isinstance(source, list) else [source]
        for piece in pieces:
            if not isinstance(piece, str):
                continue
            self._find(piece)
            for number, row in enumerate(piece.removesuffix("\n").split("\n")):
                yield self.line + number, row

    def _find(self, piece: str) -> None:
        for escaped in (self.escaped, not self.escaped) if self.missed < _MOST_MISSED else ():
            found = self.text.find(json.dumps(piece, ensure_ascii=escaped), self.at)
            if found >= 0:
                self.line += self.text.count("\n", self.at, found)
                self.at, self.escaped = found, escaped
                return
        self.missed += 1


def _at_their_lines(rows: Iterator[tuple[int, str]] | _Lines) -> str:
    """One text in which each row has its number, as far as no two have the same."""
    lines: list[str] = []
    for number, row in rows:
        lines.extend([""] * (number - 1 - len(lines)))
        lines.append(row)
    return "\n".join(lines)


def _python_of(cell: _Lines, found: Found) -> _Lines:
    """A cell as Python, line for line; what it gives to a shell or a file is told to ``found``."""
    first = next((number for number, (_, row) in enumerate(cell) if row.strip()), 0)
    head = cell[first][1].strip() if cell else ""
    if head.startswith("%%"):
        rest = cell[first + 1 :]
        begin = rest[0][0] if rest else 1
        body = "\n".join(row for _, row in rest)
        if _SHELL_CELL.match(head):
            _shell(body, found, begin)
        elif file := _FILE_CELL.match(head):
            found.embedded(body, file[1], begin)
        if not _PYTHON_CELL.match(head):
            return []
        cell = rest
    rows = list(_without_magics(cell, found))
    if _is_python("\n".join(row for _, row in rows)):
        return rows
    return [(number, row.strip()) for number, row in rows if _is_setting(row.strip())]


def _without_magics(cell: _Lines, found: Found) -> Iterator[tuple[int, str]]:
    at = 0
    while at < len(cell):
        number, row = cell[at]
        at += 1
        if setting := _SETS.fullmatch(row):
            value = setting[3].strip()
            known = not re.search(r"[${]", value)
            shown = repr(value) if known else "str(value)"
            yield number, f"{setting[1]}os.environ[{setting[2]!r}] = {shown}"
        elif _BEGINS_COMMAND.match(row):
            rows = [row]
            while rows[-1].endswith("\\") and at < len(cell):
                rows.append(cell[at][1])
                at += 1
            command = _COMMAND.fullmatch("\n".join(rows))
            if command:
                _shell(command[3], found, number)
                yield number, command[1] + (f"{command[2]}= None" if command[2] else "pass")
        elif _MAGIC.match(row):
            yield number, re.sub(r"\S.*", "pass", row)
        else:
            yield number, row


def _is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _is_setting(row: str) -> bool:
    return row.startswith("os.environ") and _is_python(row)


def _shell(text: str, found: Found, line: int) -> None:
    """A shell of its own, which ends with the line or cell: what it only sets reaches nothing."""
    lost = list(_only_set(text, line))
    if not lost:
        read_shell(text, found, line=line)
    for setting in lost:
        found.note(setting)
        if is_setting_of_interest(setting.name):
            found.slips.append(slips.of_own_shell(setting.name, setting.line))


def _only_set(text: str, line: int) -> Iterator[Setting]:
    """What ``text`` sets, if it does nothing else."""
    given: list[tuple[str, str, Word]] = []
    for item in parse_script(text, line).items:
        if not isinstance(item, Command) or item.arrays or item.documents:
            return
        words: Sequence[Word] = item.words
        if words and words[0].text == "export":
            words = words[1:]
        for word in words:
            match = ASSIGNMENT.fullmatch(word.text)
            if match is None:
                return
            given.append((match[1], match[3], word))
    for name, value, word in given:
        yield Setting(name, value_of(value, word), word.line)
