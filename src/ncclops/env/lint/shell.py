"""Splitting shell text into simple commands and words, as a shell would, without running it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_FALLBACK = re.compile(rf"\$\{{{NAME}:?[-=]([^${{}}`]*)\}}")
# Only where white space begins: it is not read again from each of its characters.
_COMMENT = re.compile(r"(?<!\s)\s+#.*")
DYNAMIC = re.compile(r"\$[\w{(@*#?!]|`")


@dataclass(frozen=True)
class Word:
    """One word of a command, quotes removed: whether it is constant, and quoted from its start."""

    text: str
    constant: bool
    quoted: bool = False


def logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines with continuations joined, each with the number of its first line."""
    pending: list[str] = []
    start = 0
    for number, line in enumerate(text.splitlines(), start=1):
        start = start or number
        if line.endswith("\\") and not line.endswith("\\\\"):
            pending.append(line[:-1] + " ")
            continue
        yield start, "".join(pending) + line
        pending, start = [], 0
    if pending:
        yield start, "".join(pending)


def commands(line: str) -> Iterator[list[Word]]:
    """The simple commands of a line, as words."""
    words: list[Word] = []
    for token in _tokens(line):
        if token is None:
            if words:
                yield words
            words = []
        else:
            words.append(token)
    if words:
        yield words


_TOKEN = re.compile(
    r"""(?P<space>[ \t]+)
      | (?P<end>[;&|]+|\n)
      | (?P<single>'[^']*')
      | (?P<double>"(?:\\.|[^"\\])*")
      | (?P<escape>\\.)
      | (?P<plain>[^\s;&|'"\\$`]+|.)""",
    re.VERBOSE | re.DOTALL,
)
_BRACKET = re.compile(r"[()]")


def _pieces(line: str) -> Iterator[tuple[str, str]]:
    """Kind and text of what ``line`` consists of, in order; no character is looked at again."""
    position, substitutions = 0, _Substitutions(line)
    while position < len(line):
        if end := substitutions.end_of(position):
            yield "sub", line[position:end]
            position = end
        elif match := _TOKEN.match(line, position):
            yield match.lastgroup or "plain", match[0]
            position = match.end()


class _Substitutions:
    """Where ``$(…)``, ``${…}`` and backquotes end. What is open to the end of the line is none."""

    def __init__(self, line: str) -> None:
        self._line = line
        self._closed = _closed_brackets(line) if "$(" in line else {}
        self._last_brace, self._last_quote = line.rfind("}"), line.rfind("`")

    def end_of(self, position: int) -> int:
        """The end of the one that begins at ``position``; 0 where none does."""
        line = self._line
        if line[position] == "`" and position < self._last_quote:
            return line.index("`", position + 1) + 1
        if line[position] != "$":
            return 0
        if line.startswith("{", position + 1) and position < self._last_brace:
            return line.index("}", position) + 1
        return self._closed.get(position + 1, -1) + 1


def _closed_brackets(line: str) -> dict[int, int]:
    """For each bracket that is closed, where."""
    closed: dict[int, int] = {}
    opened: list[int] = []
    for found in _BRACKET.finditer(line):
        if found[0] == "(":
            opened.append(found.start())
        elif opened:
            closed[opened.pop()] = found.start()
    return closed


def _tokens(line: str) -> Iterator[Word | None]:
    """Words of ``line``; None stands where a command ends. A comment ends the line."""
    texts: list[str] = []
    constant, quoted = True, False
    for kind, piece in _pieces(line):
        if kind in ("space", "end"):
            if texts:
                yield Word("".join(texts), constant, quoted)
            texts, constant, quoted = [], True, False
            if kind == "end":
                yield None
            continue
        if kind == "plain" and piece.startswith("#") and not texts:
            break
        quoted = quoted or (not texts and kind in ("single", "double"))
        value, known = _unquote(kind, piece)
        texts.append(value)
        constant = constant and known
    if texts:
        yield Word("".join(texts), constant, quoted)


def _unquote(kind: str, piece: str) -> tuple[str, bool]:
    """What a piece of a word stands for, and whether that is known without running it."""
    if kind == "single":
        return piece[1:-1], True
    if kind == "escape":
        return piece[1], True
    if piece in ("'", '"'):
        return "", False  # it opens or closes on another line
    inner = piece[1:-1] if kind == "double" else piece
    inner = _FALLBACK.sub(lambda match: match[1].strip("'\""), inner)
    known = DYNAMIC.search(re.sub(r"\\.", "", inner)) is None and inner != "$"
    return (re.sub(r"\\(.)", r"\1", inner) if kind == "double" else inner), known


def without_comment(text: str) -> str:
    """``text`` up to the first ``#`` that stands behind white space."""
    return _COMMENT.sub("", text)


def words_of(line: str) -> list[Word]:
    return [word for word in _tokens(line) if word is not None]
