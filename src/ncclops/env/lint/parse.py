"""Assignments in shell scripts, ``.env`` files, NCCL configuration files and manifests.

A script is read, never run: a value that needs running is unknown, and so is one inside a
branch when another branch says otherwise (``Settings`` sees to that).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Literal

from ncclops.env.lint.manifests import dockerfile_settings, yaml_settings
from ncclops.env.lint.model import Setting
from ncclops.env.lint.shell import (
    DYNAMIC,
    NAME,
    Word,
    commands,
    logical_lines,
    without_comment,
    words_of,
)
from ncclops.env.origins import parse_conf

Format = Literal["shell", "dotenv", "conf", "yaml", "dockerfile"]

_ASSIGNMENT = re.compile(rf"({NAME})=(.*)", re.DOTALL)
_EXPORTERS = frozenset({"export", "declare", "typeset", "readonly", "local"})
# What a command may stand behind.
_KEYWORDS = frozenset({"if", "then", "else", "elif", "do", "while", "{", "(", "time", "!"})
_ENV = frozenset({"env", "/usr/bin/env"})
# Options of launchers and container tools that hand NAME=VALUE to a program.
_PASSING = frozenset({"-x", "-e", "--env", "-genv", "--setenv"})


def guess_format(path: Path) -> Format:
    """What kind of file ``path`` is, by its name; a shell script unless it looks otherwise."""
    name = path.name
    if name == ".env" or name.startswith(".env.") or path.suffix == ".env":
        return "dotenv"
    if path.suffix in (".yaml", ".yml"):
        return "yaml"
    if name.startswith(("Dockerfile", "Containerfile")) or path.suffix.lower() == ".dockerfile":
        return "dockerfile"
    return "conf" if path.suffix == ".conf" else "shell"


def parse(text: str, kind: Format, path: Path = Path("-")) -> list[Setting]:
    """The settings in ``text``, in order."""
    if kind == "conf":
        return [Setting(row.name, row.value, row.line) for row in parse_conf(text, path)]
    if kind == "dotenv":
        return list(_dotenv(text))
    if kind == "yaml":  # commands in it are shell
        return sorted([*yaml_settings(text), *_shell(text)], key=lambda setting: setting.line)
    if kind == "dockerfile":
        return list(dockerfile_settings(text))
    return _shell(text)


def _dotenv(text: str) -> Iterator[Setting]:
    for number, line in enumerate(text.splitlines(), start=1):
        match = re.fullmatch(rf"\s*(?:export\s+)?({NAME})\s*=(.*)", line)
        if match is None:
            continue
        value = match[2].strip()
        if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
            value = value[1:-1]
        else:
            value = without_comment(value)
        yield Setting(match[1], None if DYNAMIC.search(value) else value, number)


def _shell(text: str) -> list[Setting]:
    found: list[Setting] = []
    exported: set[str] = set()
    # How many settings had been found when a name was unset: those no longer hold for it.
    unset: dict[str, int] = {}
    export_all = False
    for number, words in _script(text):
        texts = [word.text for word in words]
        if texts[0] == "set" and ("-a" in texts or "allexport" in texts):
            export_all = True
        if texts[0] == "unset":
            unset |= dict.fromkeys(texts, len(found))
        exported.update(_exports_by_name(texts))
        found.extend(_assignments(words, number))
    expanded = set(re.findall(rf"\$\{{?({NAME})", _without_own_fallbacks(text)))
    return [
        replace(
            setting,
            exported=setting.exported or export_all or setting.name in exported,
            expanded=setting.name in expanded,
        )
        for number, setting in enumerate(found)
        if number >= unset.get(setting.name, 0)
    ]


def _without_own_fallbacks(text: str) -> str:
    """``text`` without ``NAME=${NAME:-…}``, which only keeps what was there."""
    return re.sub(rf"\b({NAME})=[\"']?\$\{{\1:?[-=]", "", text)


def _script(text: str) -> Iterator[tuple[int, list[Word]]]:
    """Every simple command with its line, those inside ``sh -c '…'`` and ``#SBATCH`` too."""
    for number, line in logical_lines(text):
        if line.lstrip().startswith("#SBATCH"):
            yield number, [Word("#SBATCH", True), *words_of(line.lstrip()[7:])]
        for words in commands(line):
            yield number, words
            for word in words:
                if word.quoted and _holds_commands(word.text):
                    yield from ((number, inner) for inner in commands(word.text))


def _holds_commands(text: str) -> bool:
    """Whether a quoted word is a command line of its own, handed to a shell somewhere."""
    return re.match(rf"\s*(?:export|env|set)\s|\s*{NAME}=\S*[\s;]+\S", text) is not None or (
        re.search(r"[;&|]\s*(?:export|env)\s", text) is not None
    )


def _exports_by_name(texts: list[str]) -> list[str]:
    """The variables that ``export NAME``, ``declare -x NAME`` or ``-x NAME`` pass on."""
    if texts[0] == "export" or (texts[0] in _EXPORTERS and "-x" in texts):
        return [text for text in texts[1:] if re.fullmatch(NAME, text)]
    return [
        after
        for option, after in pairwise(texts)
        if option in _PASSING and re.fullmatch(NAME, after)
    ]


def _assignments(words: list[Word], number: int) -> Iterator[Setting]:
    """Every NAME=VALUE of a command, and whether it reaches a program."""
    begin = next((n for n, word in enumerate(words) if word.text not in _KEYWORDS), len(words))
    words = words[begin:]
    if not words:
        return
    texts = [word.text for word in words]
    if texts[0] == "setenv" and len(words) >= 3:
        yield Setting(texts[1], _value(texts[2], words[2]), number)
        return
    leading = 0
    while leading < len(words) and _ASSIGNMENT.fullmatch(texts[leading]):
        leading += 1
    runs_something = leading < len(words)
    is_export = texts[0] == "export" or (texts[0] in _EXPORTERS and "-x" in texts)
    of_env = False
    for position, word in enumerate(words):
        of_env = of_env or (position > 0 and texts[position - 1] in _ENV)
        if texts[position].startswith("--export="):
            yield from _slurm_export(word, number)
            continue
        option = re.fullmatch(r"(?:--env=|-e(?==?))?(.*)", word.text, re.DOTALL)
        match = _ASSIGNMENT.fullmatch(option[1] if option else word.text)
        if match is None:
            continue
        passed = position > 0 and texts[position - 1] in _PASSING
        before_command = position < leading and runs_something
        with_option = word.text.startswith("--env=")
        if position < leading or is_export or passed or of_env or with_option:
            reaches = is_export or passed or before_command or of_env or with_option
            yield Setting(match[1], _value(match[2], word), number, reaches)


def _slurm_export(word: Word, number: int) -> Iterator[Setting]:
    """``--export=ALL,A=1,B=2``: a value ends at the next comma that starts another name."""
    listed = word.text.partition("=")[2]
    for part in re.split(rf",(?={NAME}(?:=|,|$))", listed):
        match = _ASSIGNMENT.fullmatch(part)
        if match:
            yield Setting(match[1], _value(match[2], word), number)


def _value(text: str, word: Word) -> str | None:
    """The value, unless it is known only when run; a ``$`` kept by quotes is for a later shell."""
    return None if not word.constant or "$" in text or "`" in text else text


def features(text: str) -> frozenset[str]:
    """Which features a script uses, by what it writes (see ``Circumstances.uses``)."""
    marks = {
        "fsdp2": r"--use[-_](?:torch|megatron)[-_]fsdp2?\b|fsdp_version[=: ]+2\b|fully_shard\b",
        "tensor-parallel": r"--tensor[-_]model[-_]parallel[-_]size[= ]+(?:[2-9]|1\d)",
        "ucc": r"--(?:distributed|dist)[-_]backend[= ]+ucc\b",
        "torchrun": r"\btorchrun\b|torch\.distributed\.(?:run|launch)\b",
        "ras-polling": r"\bncclras\b|\b28028\b",
        "rocm": r"\brocm\b|\brccl\b|\bRCCL_|\bHIP_VISIBLE_DEVICES\b|\bHSA_",
    }
    code = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("# "))
    return frozenset(name for name, mark in marks.items() if re.search(mark, code))


def node_count(text: str) -> Literal["one", "many"] | None:
    """Whether a script asks its scheduler or launcher for one node or several."""
    counts = re.findall(
        r"^#SBATCH\s+(?:--nodes[= ]|-N[= ]?)(\d{1,9})|--nnodes[= ](\d{1,9})\b"
        r"|^[ \t]*#PBS .*select=(\d{1,9})",
        text,
        re.MULTILINE,
    )
    numbers = {int(number) for groups in counts for number in groups if number}
    if not numbers:
        return None
    return "many" if max(numbers) > 1 else "one"
