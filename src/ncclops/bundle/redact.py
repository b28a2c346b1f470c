"""Secrets out of lines and documents, by the rules of ``rules.toml``, and how many there were."""

from __future__ import annotations

import functools
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import resources
from typing import Any

REDACTED = "<redacted>"

# The body of a key in PEM form; the first line that does not look so is no part of it.
_PEM_BODY = re.compile(r"^[\sA-Za-z0-9+/=:,-]*$")
_PEM_END = re.compile(r"-----END [A-Z ]*PRIVATE KEY-----")
_NAMED = "named"


@dataclass(frozen=True)
class Rule:
    """One kind of secret. ``multiline``: it may go on in the lines that follow."""

    name: str
    what: str
    pattern: re.Pattern[str]
    hints: tuple[str, ...]
    multiline: bool = False


@functools.cache
def rules() -> tuple[Rule, ...]:
    """The rules, in the order in which they are applied."""
    text = resources.files(__package__).joinpath("rules.toml").read_text("utf-8")
    return tuple(
        Rule(
            name=entry["name"],
            what=entry["what"],
            pattern=re.compile(entry["pattern"], re.DOTALL | re.VERBOSE),
            hints=tuple(entry["hint"]),
            multiline=entry.get("multiline", False),
        )
        for entry in tomllib.loads(text)["rule"]
    )


@functools.cache
def _any_hint() -> re.Pattern[str]:
    """One search that sends almost every line on its way."""
    words = {word for rule in rules() for word in rule.hints}
    return re.compile("|".join(map(re.escape, sorted(words))), re.IGNORECASE)


class Redactor:
    """Takes secrets out; ``taken`` counts them by rule."""

    def __init__(self) -> None:
        self.taken: Counter[str] = Counter()

    def text(self, text: str) -> str:
        """``text`` without secrets; one line, or one string of a document."""
        if not _any_hint().search(text):
            return text
        lower = text.lower()
        for rule in rules():
            if any(hint in lower for hint in rule.hints):
                text = rule.pattern.sub(functools.partial(self._replace, rule), text)
        return text

    def lines(self, lines: Iterable[str]) -> Iterator[str]:
        """``lines`` without secrets, those that span lines included."""
        inside = False
        for line in lines:
            if inside and _PEM_END.search(line):
                inside = False
                yield _PEM_END.sub(REDACTED, line)
            elif inside and _PEM_BODY.match(line):
                continue
            else:
                inside = False
                redacted = self.text(line)
                inside = redacted != line and _opens_block(line)
                yield (
                    redacted
                    if redacted.endswith("\n") or not line.endswith("\n")
                    else (redacted + "\n")
                )

    def document(self, value: Any) -> Any:
        """``value`` (what JSON holds) without secrets.

        What a field with a secret's name holds goes, and so does what follows an option with such
        a name in a command line.
        """
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {key: self._field(str(key), item) for key, item in value.items()}
        if isinstance(value, list):
            return list(self._items(value))
        return value

    def _field(self, name: str, value: Any) -> Any:
        if isinstance(value, str):
            return self._behind_name(name, value)
        return self.document(value)

    def _items(self, values: list[Any]) -> Iterator[Any]:
        option = ""
        for value in values:
            if isinstance(value, str):
                yield self._behind_name(option, value)
                option = value if value.startswith("-") and "=" not in value else ""
            else:
                yield self.document(value)
                option = ""

    def _behind_name(self, name: str, value: str) -> str:
        """``value`` as it may be told where it belongs to ``name``."""
        named = next(rule for rule in rules() if rule.name == _NAMED)
        probe = f"{name}={value.split()[0] if value.split() else ''}"
        found = named.pattern.search(probe)
        if name and found and found.start("secret") == len(name) + 1:
            self.taken[_NAMED] += 1
            return REDACTED
        return self.text(value)

    def _replace(self, rule: Rule, match: re.Match[str]) -> str:
        self.taken[rule.name] += 1
        start, end = (edge - match.start() for edge in match.span("secret"))
        whole = match.group()
        return whole[:start] + REDACTED + whole[end:]


def _opens_block(line: str) -> bool:
    return "PRIVATE KEY-----" in line and not _PEM_END.search(line)
