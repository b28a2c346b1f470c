"""What a Dockerfile sets, for each of its stages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from ncclops.env.lint import slips
from ncclops.env.lint.environments import Found, Scope
from ncclops.env.lint.model import Setting
from ncclops.env.lint.passing import ASSIGNMENT, passed, value_of
from ncclops.env.lint.shell import read_shell
from ncclops.env.lint.words import Word, is_open, words_of

_ARGUMENT = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?-[^}$]*)?\})")
_OF_COPY = re.compile(r"(?:--\S+\s+)*<<-?[\"']?\w+[\"']?[ \t]+(\S+)[ \t]*\n")
_HEREDOC = re.compile(r"<<-?[\"']?(\w+)[\"']?")

# A list of paths to which its own old value was to be added.
_OWN_ESCAPED = re.compile(
    r"((?:[A-Za-z_]\w*_)?PATH)=\"?(?:[^\\]*:)?\\\$(?:\1(?!\w)|\{\1\}).*", re.DOTALL
)


def read_dockerfile(text: str, found: Found) -> None:
    """Tell ``found`` what ``ENV`` sets in each stage, and what commands set."""
    stages: dict[str, dict[str, Setting]] = {}
    environment: dict[str, Setting] = {}
    commands: list[tuple[str, int]] = []
    arguments: dict[str, str] = {}
    for line, instruction, rest in _instructions(text):
        if instruction == "FROM":
            _finish(environment, commands, found)
            words = [word.text for word in words_of(rest, line)]
            images = [word for word in words if not word.startswith("--")]
            environment = dict(stages.get(images[0].lower(), {})) if images else {}
            commands = []
            if len(images) >= 3 and images[1].lower() == "as":
                stages[images[2].lower()] = environment
        elif instruction == "ARG":
            arguments.update((s.name, s.value) for s in _env(rest, line) if s.value is not None)
        elif instruction == "COPY" and (document := _OF_COPY.match(rest)):
            found.embedded(rest[document.end() :].rpartition("\n")[0], document[1], line + 1)
        elif instruction == "ENV":
            for setting in _env(_with_arguments(rest, arguments), line):
                found.note(setting)
                environment[setting.name] = setting
            for word in words_of(rest, line):
                found.slips.extend(slips.of_path(word))
                if own := _OWN_ESCAPED.fullmatch(word.raw):
                    found.slips.append(slips.escaped_path(own[1], word.line))
        elif instruction in ("RUN", "CMD", "ENTRYPOINT"):
            if instruction == "RUN":
                _command(rest, line, list(environment.values()), found)
            else:
                commands.append((rest, line))
    _finish(environment, commands, found)


def _with_arguments(text: str, arguments: dict[str, str]) -> str:
    """``text`` with what ``ARG`` gives its references, unless the build gives something else."""
    return _ARGUMENT.sub(lambda match: arguments.get(match[1] or match[2], match[0]), text)


def _finish(environment: dict[str, Setting], commands: list[tuple[str, int]], found: Found) -> None:
    begin = list(environment.values())
    found.add_environment(begin, branched=False)
    for text, line in commands:
        _command(text, line, begin, found)


def _command(text: str, line: int, begin: list[Setting], found: Found) -> None:
    # what a step of the build sets ends with it; combinations are those of the image's programs
    if "=" not in text:
        return
    if text.lstrip().startswith("["):
        try:
            words = json.loads(text.replace("\\\n", ""))
        except (ValueError, RecursionError):
            return
        words = [word for word in words if isinstance(word, str)] if isinstance(words, list) else []
        plain = [Word(word, not is_open(word), True, line, word) for word in words]
        if given := list(passed(plain, words[0] if words else "")):
            Scope(found, begin).run(given)
        for word in words:
            if " " in word:
                read_shell(word, found, begin, line)
        return
    text = re.sub(r"^(\s*--\w+=\S+)", lambda match: " " * len(match[1]), text)
    read_shell(text, found, begin, line)


def _env(text: str, line: int) -> Iterator[Setting]:
    """``A=x B=y`` and the old ``A x``."""
    words = words_of(text, line)
    if words and "=" not in words[0].text and len(words) > 1:
        value = " ".join(word.text for word in words[1:])
        whole = Word(value, all(word.constant for word in words[1:]), line=words[0].line)
        yield Setting(words[0].text, value_of(value, whole), whole.line)
        return
    for word in words:
        match = ASSIGNMENT.fullmatch(word.text)
        if match:
            yield Setting(match[1], value_of(match[3], word), word.line)


def _instructions(text: str) -> Iterator[tuple[int, str, str]]:
    """Line, name and rest of each instruction; continued lines stay, comments in them go."""
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        start = at
        parts: list[str] = []
        while at < len(lines):
            row = lines[at]
            at += 1
            if parts and row.lstrip().startswith("#"):
                parts.append("\\")
                continue
            parts.append(row)
            if not row.rstrip().endswith("\\"):
                break
        match = re.match(r"\s*([A-Za-z]+)\s+", parts[0])
        if match is None or parts[0].lstrip().startswith("#"):
            continue
        name = match[1].upper()
        whole = "\n".join(part.rstrip() if part.rstrip().endswith("\\") else part for part in parts)
        if name in ("RUN", "COPY") and (document := _HEREDOC.search(whole)):
            end = document[1]
            body = []
            while at < len(lines):
                body.append(lines[at])
                at += 1
                if body[-1].strip() == end:
                    break
            if re.fullmatch(r"\s*<<-?[\"']?\w+[\"']?\s*", whole[match.end() :]):
                # a script of its own: its lines are the command
                yield start + 2, name, "\n".join(body[:-1])
                continue
            whole = "\n".join([whole, *body])
        rest = whole[match.end() :]
        if name == "ONBUILD":
            name, _, rest = rest.partition(" ")
        yield start + 1, name.upper(), rest
