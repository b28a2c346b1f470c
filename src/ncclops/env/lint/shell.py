"""Splitting shell text into simple commands and words, as a shell would, without running it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_FALLBACK = re.compile(rf"\$\{{{NAME}:?[-=]([^${{}}`]*)\}}")
DYNAMIC = re.compile(r"\$[\w{(@*#?!]|`")


@dataclass(frozen=True)
class Word:
    """One word of a command, quotes removed: whether it is constant, and quoted from its start."""

    text: str
    constant: bool
    quoted: bool = False


def logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines with continuations joined, each with the number of its first line."""
    pending, start = "", 0
    for number, line in enumerate(text.splitlines(), start=1):
        start = start or number
        if line.endswith("\\") and not line.endswith("\\\\"):
            pending += line[:-1] + " "
            continue
        yield start, pending + line
        pending, start = "", 0
    if pending:
        yield start, pending


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
      | (?P<sub>\$\((?:[^()]|\([^()]*\))*\)|\$\{[^}]*\}|`[^`]*`)
      | (?P<plain>[^\s;&|'"\\$`]+|.)""",
    re.VERBOSE | re.DOTALL,
)


def _tokens(line: str) -> Iterator[Word | None]:
    """Words of ``line``; None stands where a command ends. A comment ends the line."""
    text, constant, started, quoted = "", True, False, False
    for match in _TOKEN.finditer(line):
        kind, piece = match.lastgroup, match[0]
        if kind in ("space", "end"):
            if started:
                yield Word(text, constant, quoted)
            text, constant, started, quoted = "", True, False, False
            if kind == "end":
                yield None
            continue
        if kind == "plain" and piece.startswith("#") and not started:
            break
        quoted = quoted or (not started and kind in ("single", "double"))
        started = True
        value, known = _unquote(kind or "plain", piece)
        text, constant = text + value, constant and known
    if started:
        yield Word(text, constant, quoted)


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


def words_of(line: str) -> list[Word]:
    return [word for word in _tokens(line) if word is not None]
