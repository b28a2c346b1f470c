"""Assignments in shell scripts, ``.env`` files and NCCL configuration files.

A script is read, never run: a value that needs running is unknown, and so is one inside a
branch when another branch says otherwise (``Settings`` sees to that).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

from ncclops.env.lint.model import Setting
from ncclops.env.sources import parse_conf

Format = Literal["shell", "dotenv", "conf"]

_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_ASSIGNMENT = re.compile(rf"({_NAME})=(.*)", re.DOTALL)
_FALLBACK = re.compile(rf"\$\{{{_NAME}:?[-=]([^${{}}`]*)\}}")
_DYNAMIC = re.compile(r"\$[\w{(@*#?!]|`")
_EXPORTERS = frozenset({"export", "declare", "typeset", "readonly", "local"})
# Options of launchers and container tools that hand NAME=VALUE to a program.
_PASSING = frozenset({"-x", "-e", "--env", "-genv", "--setenv"})


def guess_format(path: Path) -> Format:
    """What kind of file ``path`` is, by its name; a shell script unless it looks otherwise."""
    name = path.name
    if name == ".env" or name.startswith(".env.") or path.suffix == ".env":
        return "dotenv"
    return "conf" if name in ("nccl.conf", ".nccl.conf") or path.suffix == ".conf" else "shell"


def parse(text: str, kind: Format, path: Path = Path("-")) -> list[Setting]:
    """The settings in ``text``, in order."""
    if kind == "conf":
        return [Setting(row.name, row.value, row.line) for row in parse_conf(text, path)]
    if kind == "dotenv":
        return list(_dotenv(text))
    return _shell(text)


def _dotenv(text: str) -> Iterator[Setting]:
    for number, line in enumerate(text.splitlines(), start=1):
        match = re.fullmatch(rf"\s*(?:export\s+)?({_NAME})\s*=\s*(.*?)\s*", line)
        if match is None:
            continue
        value = match[2]
        if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
            value = value[1:-1]
        else:
            value = re.sub(r"\s+#.*", "", value)
        yield Setting(match[1], None if _DYNAMIC.search(value) else value, number)


@dataclass(frozen=True)
class _Word:
    """One word of a command: as written with quotes removed, and whether it is constant."""

    text: str
    constant: bool


def _shell(text: str) -> list[Setting]:
    found: list[Setting] = []
    exported: set[str] = set()
    export_all = False
    for number, line in _logical_lines(text):
        for words in _commands(line):
            texts = [word.text for word in words]
            if texts[0] == "set" and ("-a" in texts or "allexport" in texts):
                export_all = True
            if texts[0] == "unset":
                found = [setting for setting in found if setting.name not in texts]
            exported.update(_exports_by_name(texts))
            found.extend(_assignments(words, number))
        if line.lstrip().startswith("#SBATCH"):
            found.extend(_sbatch(line, number))
    return [
        Setting(
            setting.name,
            setting.value,
            setting.line,
            setting.exported or export_all or setting.name in exported,
        )
        for setting in found
    ]


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
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


def _commands(line: str) -> Iterator[list[_Word]]:
    """The simple commands of a line, as words."""
    words: list[_Word] = []
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


def _tokens(line: str) -> Iterator[_Word | None]:
    """Words of ``line``; None stands where a command ends. A comment ends the line."""
    text, constant, started = "", True, False
    for match in _TOKEN.finditer(line):
        kind, piece = match.lastgroup, match[0]
        if kind in ("space", "end"):
            if started:
                yield _Word(text, constant)
            text, constant, started = "", True, False
            if kind == "end":
                yield None
            continue
        if kind == "plain" and piece.startswith("#") and not started:
            break
        started = True
        value, known = _unquote(kind or "plain", piece)
        text, constant = text + value, constant and known
    if started:
        yield _Word(text, constant)


def _unquote(kind: str, piece: str) -> tuple[str, bool]:
    """What a piece of a word stands for, and whether that can be told without running it."""
    if kind == "single":
        return piece[1:-1], True
    if kind == "escape":
        return piece[1], True
    inner = piece[1:-1] if kind == "double" else piece
    inner = _FALLBACK.sub(lambda match: match[1], inner)
    known = _DYNAMIC.search(re.sub(r"\\.", "", inner)) is None and inner != "$"
    return (re.sub(r"\\(.)", r"\1", inner) if kind == "double" else inner), known


def _exports_by_name(texts: list[str]) -> list[str]:
    """The variables that ``export NAME``, ``declare -x NAME`` or ``-x NAME`` pass on."""
    if texts[0] == "export" or (texts[0] in _EXPORTERS and "-x" in texts):
        return [text for text in texts[1:] if re.fullmatch(_NAME, text)]
    return [
        after
        for option, after in pairwise(texts)
        if option in _PASSING and re.fullmatch(_NAME, after)
    ]


def _assignments(words: list[_Word], number: int) -> Iterator[Setting]:
    """Every NAME=VALUE of a command, and whether it reaches a program."""
    texts = [word.text for word in words]
    while words and texts[0] in (
        "if",
        "then",
        "else",
        "elif",
        "do",
        "while",
        "{",
        "(",
        "time",
        "!",
    ):
        words, texts = words[1:], texts[1:]
    if not words:
        return
    if texts[0] == "setenv" and len(words) >= 3:
        yield Setting(texts[1], texts[2] if words[2].constant else None, number)
        return
    leading = 0
    while leading < len(words) and _ASSIGNMENT.fullmatch(texts[leading]):
        leading += 1
    runs_something = leading < len(words)
    is_export = texts[0] == "export" or (texts[0] in _EXPORTERS and "-x" in texts)
    for position, word in enumerate(words):
        if texts[position].startswith("--export="):
            yield from _slurm_export(word, number)
            continue
        option = re.fullmatch(r"(?:--env=|-e(?==?))?(.*)", word.text, re.DOTALL)
        match = _ASSIGNMENT.fullmatch(option[1] if option else word.text)
        if match is None:
            continue
        passed = position > 0 and texts[position - 1] in _PASSING
        before_command = position < leading and runs_something
        of_env = "env" in texts[:position] or "/usr/bin/env" in texts[:position]
        with_option = word.text.startswith("--env=")
        if position < leading or is_export or passed or of_env or with_option:
            reaches = is_export or passed or before_command or of_env or with_option
            yield Setting(match[1], match[2] if word.constant else None, number, reaches)


def _sbatch(line: str, number: int) -> Iterator[Setting]:
    match = re.search(r"--export[= ](\S+)", line)
    if match:
        yield from _slurm_export(_Word(f"--export={match[1]}", "$" not in match[1]), number)


def _slurm_export(word: _Word, number: int) -> Iterator[Setting]:
    """``--export=ALL,A=1,B=2``: a value ends at the next comma that starts another name."""
    listed = word.text.partition("=")[2]
    for part in re.split(rf",(?={_NAME}(?:=|,|$))", listed):
        match = _ASSIGNMENT.fullmatch(part)
        if match:
            yield Setting(match[1], match[2] if word.constant else None, number)


def features(text: str) -> frozenset[str]:
    """Which features a script uses, by what it writes (see ``Circumstances.uses``)."""
    marks = {
        "fsdp2": r"--use[-_](?:torch|megatron)[-_]fsdp2?\b|fsdp_version[=: ]+2\b|fully_shard\b",
        "tensor-parallel": r"--tensor[-_]model[-_]parallel[-_]size[= ]+(?:[2-9]|1\d)",
        "ucc": r"--(?:distributed|dist)[-_]backend[= ]+ucc\b",
        "torchrun": r"\btorchrun\b|torch\.distributed\.(?:run|launch)\b",
        "ras-polling": r"\bncclras\b|\b28028\b",
    }
    code = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("# "))
    return frozenset(name for name, mark in marks.items() if re.search(mark, code))


def node_count(text: str) -> Literal["one", "many"] | None:
    """Whether a script asks its scheduler or launcher for one node or several."""
    counts = re.findall(
        r"^#SBATCH\s+(?:--nodes[= ]|-N[= ]?)(\d+)|--nnodes[= ](\d+)\b|#PBS .*select=(\d+)",
        text,
        re.MULTILINE,
    )
    numbers = {int(number) for groups in counts for number in groups if number}
    if not numbers:
        return None
    return "many" if max(numbers) > 1 else "one"
