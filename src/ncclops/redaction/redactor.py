"""Removes secrets from variables, lines and documents by ``rules.toml``, and counts them."""

from __future__ import annotations

import functools
import itertools
import os
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, TypeVar

import msgspec

from ncclops.redaction.marks import Mark, marks_of, without_marked

AnyStruct = TypeVar("AnyStruct", bound=msgspec.Struct)

REDACTED = "<redacted>"

# The body of a key in PEM form; the first line that does not look so is no part of it.
_PEM_BODY = re.compile(r"^[\sA-Za-z0-9+/=:,-]*$")
_PEM_END = re.compile(r"-----END [A-Z ]*PRIVATE KEY(?: BLOCK)?-----")
_PEM_BEGIN = re.compile(r"PRIVATE KEY(?: BLOCK)?-----")
# How a line ends whose value stands on the next one: as in a shell, and in YAML and JSON.
_GOES_ON = re.compile(r"(?: \s*\\ | (?<=[:=])\s*[|>][+-]?\d? | (?<=[:=]) )\Z", re.VERBOSE)
# Most lines end otherwise, which is seen sooner.
_GOES_ON_ENDS, _GOES_ON_MARKS = (":", "=", "\\"), frozenset("|>")
_NAME_ALONE = re.compile(r"""\bname["']?\s*[:=]\s*["']?\w{1,100}["']?,?\Z""")
# Such a value has its line for itself, with a field's name at most: a log's line has words.
_VALUE_ALONE = re.compile(r"""\s*(?:["']?value["']?\s*[:=]\s*)?[^\s:=]\S*(?:\s+\\)?\s*\Z""")
_MOST_OF_A_NAME = 200
# So many lines are asked at once which rules may concern them; most rules concern none.
_LINES_AT_ONCE = 500
_NAMED, _VARIABLE, _PRIVATE_KEY = "named", "variable", "private-key"
# What a value is taken out by for the name in front of it: a field's, or an option's.
_BY_NAME = (_NAMED, "basic", "short-option")
# A field that can only be a variable, and fields that hold an environment.
_VARIABLE_FIELD = re.compile(r"[A-Z][A-Z0-9_]*")
_ENVIRONMENTS = frozenset({"variables", "environ", "environment", "env"})
# What rows of a plan or of a comparison say about the variable that they name.
_VALUE_FIELDS = frozenset({"before", "after", "value", "a", "b"})


@dataclass(frozen=True)
class RedactionRule:
    """One kind of secret. ``multiline``: it may go on in the lines that follow.

    ``names``: what the names of variables look like that hold one; of the rule ``variable`` only.
    ``needs`` is in all that ``pattern`` matches, in small letters, and found in less time.
    """

    name: str
    what: str
    pattern: re.Pattern[str]
    hints: tuple[str, ...]
    multiline: bool = False
    names: re.Pattern[str] | None = None
    needs: re.Pattern[str] | None = None

    def may_match(self, lower: str, small: str) -> bool:
        """Whether the pattern may match a text: ``str.lower`` of it, and ``_in_small_letters``."""
        for hint in self.hints:  # of every line: any() takes twice as long
            if hint in lower:
                return self.needs is None or self.needs.search(small) is not None
        return False


@functools.cache
def rules() -> tuple[RedactionRule, ...]:
    """The rules, in the order in which they are applied."""
    data = tomllib.loads(resources.files(__package__).joinpath("rules.toml").read_text("utf-8"))

    def whole(pattern: str) -> str:
        for name, part in data["part"].items():
            pattern = pattern.replace(f"{{{name}}}", part)
        return pattern

    return tuple(
        RedactionRule(
            name=entry["name"],
            what=entry["what"],
            pattern=re.compile(whole(entry["pattern"]), re.DOTALL | re.VERBOSE),
            hints=tuple(entry["hint"]),
            multiline=entry.get("multiline", False),
            names=re.compile(whole(names), re.VERBOSE | re.IGNORECASE) if names else None,
            needs=re.compile(whole(needs), re.VERBOSE) if needs else None,
        )
        for entry in data["rule"]
        for names, needs in ((entry.get("names"), entry.get("needs")),)
    )


@functools.cache
def _rule(name: str) -> RedactionRule:
    return next(rule for rule in rules() if rule.name == name)


def is_secret(name: str, value: str) -> bool:
    """Whether a variable looks as if it held a secret, by its name or by its value."""
    return Redactor().variable(name, value) != value


def redact_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """``variables`` with the values of secrets replaced."""
    redactor = Redactor()
    return {name: redactor.variable(name, value) for name, value in variables.items()}


def marks_here(environ: Mapping[str, str] = os.environ) -> list[Mark]:
    """The marks of the secrets in this process's environment."""
    return marks_of(environ, redact_variables(environ))


class Redactor:
    """Takes secrets out; ``taken`` counts them by rule. For one thread at a time.

    ``marks`` are of values that are taken out wherever they stand.
    """

    def __init__(self, marks: Iterable[Mark] = ()) -> None:
        self.taken: Counter[str] = Counter()
        self._marks = frozenset(marks)

    def variable(self, name: str, value: str) -> str:
        """The value of an environment variable: as it is, or nothing of it if it holds a secret."""
        names = _rule(_VARIABLE).names
        if value and names is not None and names.fullmatch(name):
            if value != REDACTED:
                self.taken[_VARIABLE] += 1
            return REDACTED
        return value if self.text(value) == value else REDACTED

    def text(self, text: str) -> str:
        """``text`` without secrets; one line, or one string of a document."""
        return self._by_rules(text, rules())

    def _by_rules(self, text: str, some: Iterable[RedactionRule]) -> str:
        lower, small = text.lower(), _in_small_letters(text)
        for rule in some:
            if not rule.may_match(lower, small):
                continue
            clean = rule.pattern.sub(functools.partial(self._replace, rule), text)
            if clean != text:
                text, small = clean, _in_small_letters(clean)
        return without_marked(text, self._marks, self._take_value) if self._marks else text

    def _take_value(self) -> str:
        self.taken[_VARIABLE] += 1
        return REDACTED

    def lines(self, lines: Iterable[str]) -> Iterator[str]:
        """``lines`` without secrets, those that span lines included."""
        inside, name = False, ""
        for line, likely in _with_likely_rules(lines):
            if inside and _PEM_END.search(line):
                inside = False
                yield _PEM_END.sub(REDACTED, line)
            elif inside and _PEM_BODY.match(line):
                continue
            else:
                redacted = self._behind_line(name, line) or self._by_rules(line, likely)
                inside = redacted != line and _opens_block(line)
                name = _name_at_end(name, redacted)
                yield (
                    redacted
                    if redacted.endswith("\n") or not line.endswith("\n")
                    else (redacted + "\n")
                )

    def _behind_line(self, name: str, line: str) -> str:
        """``line`` where it is the value of ``name``, the end of the line before; else empty."""
        if not name or not _VALUE_ALONE.match(line):
            return ""
        value = line.lstrip()
        clean = self.text(name + value)
        of_value = clean.startswith(name)
        return line[: len(line) - len(value)] + clean[len(name) :] if of_value else ""

    def document(self, value: Any) -> Any:
        """``value`` (what JSON holds, or a record as builtins) without secrets.

        What a field with a secret's name holds goes, what follows an option with such a name in a
        command line, and variables as by ``variable``: in fields written in capitals, in an
        environment (``variables``), and in rows that name one (of a plan).
        """
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            named = value.get("name")
            row = named if isinstance(named, str) else ""
            return {key: self._field(str(key), item, row) for key, item in value.items()}
        if isinstance(value, list | tuple):  # records have both
            return type(value)(self._items(value))
        return value

    def record(self, record: AnyStruct) -> AnyStruct:
        """``record`` likewise, by the names of its fields."""
        return msgspec.convert(self.document(msgspec.to_builtins(record)), type(record))

    def _field(self, name: str, value: Any, row: str) -> Any:
        if isinstance(value, str):
            if _VARIABLE_FIELD.fullmatch(name):
                return self.variable(name, value)
            if name in _VALUE_FIELDS and _VARIABLE_FIELD.fullmatch(row):
                return self.variable(row, value)
            return self._behind_name(name, value)
        if isinstance(value, dict) and name in _ENVIRONMENTS:
            return {key: self._variable(str(key), item) for key, item in value.items()}
        return self.document(value)

    def _variable(self, name: str, value: Any) -> Any:
        return self.variable(name, value) if isinstance(value, str) else self.document(value)

    def _items(self, values: Sequence[Any]) -> Iterator[Any]:
        option = ""
        for value in self._without_keys(values):
            if isinstance(value, str):
                yield self._behind_name(option, value)
                option = value if value.startswith("-") and "=" not in value else ""
            else:
                yield self.document(value)
                option = ""

    def _without_keys(self, values: Sequence[Any]) -> Iterator[Any]:
        """``values``, which may be the last lines of a log, without the lines of private keys, also
        of one that begins before them."""
        begins = _end_of_cut_key(values)
        inside = False
        for number, value in enumerate(values):
            if inside and _holds(_PEM_END, value):
                inside = False
                yield _PEM_END.sub(REDACTED, value)
            elif (inside or number < begins) and _holds(_PEM_BODY, value):
                self.taken[_PRIVATE_KEY] += 1
            else:
                inside = isinstance(value, str) and _opens_block(value)
                yield value

    def _behind_name(self, name: str, value: str) -> str:
        """``value`` as it may be shown where it belongs to ``name``."""
        probe = f"{name}={value.split()[0] if value.split() else ''}"
        for rule in _BY_NAME:
            found = _rule(rule).pattern.search(probe)
            if name and found and found.start("secret") == len(name) + 1:
                self.taken[rule] += 1
                return REDACTED
        return self.text(value)

    def _replace(self, rule: RedactionRule, match: re.Match[str]) -> str:
        self.taken[rule.name] += 1
        start, end = (edge - match.start() for edge in match.span("secret"))
        whole = match.group()
        return whole[:start] + REDACTED + whole[end:]


def _in_small_letters(text: str) -> str:
    """As a pattern sees ``text`` for which a letter's case does not count."""
    return (text if text.isascii() else text.translate(_TAKEN_FOR)).lower()


# Letters that such a pattern takes for one of ASCII, and ``str.lower`` does not.
_TAKEN_FOR = str.maketrans("\u0130\u0131\u017f", "iis")


def _with_likely_rules(lines: Iterable[str]) -> Iterator[tuple[str, list[RedactionRule]]]:
    """Each line with the rules that may concern those around it."""
    rest = iter(lines)
    while block := list(itertools.islice(rest, _LINES_AT_ONCE)):
        text = "".join(block)
        lower, small = text.lower(), _in_small_letters(text)
        likely = [rule for rule in rules() if rule.may_match(lower, small)]
        yield from ((line, likely) for line in block)


def _name_at_end(before: str, line: str) -> str:
    """What of the end of ``line``, behind ``before``, may be the name of the next line's value."""
    end = (before + line.lstrip() if before else line)[-_MOST_OF_A_NAME:].rstrip()
    goes_on = end[-1:] in _GOES_ON_ENDS or not _GOES_ON_MARKS.isdisjoint(end[-3:])
    name = _GOES_ON.sub("", end) if goes_on else end
    if name != end or name.endswith((":", "=")):
        return name if name.endswith("=") else f"{name} "
    return f"{name} " if "name" in name and _NAME_ALONE.search(name) else ""


def _end_of_cut_key(values: Sequence[Any]) -> int:
    """How many of ``values`` at most are lines of a key whose first line is not among them."""
    end = next((n for n, each in enumerate(values) if _holds(_PEM_END, each)), 0)
    return end if all(_holds(_PEM_BODY, each) for each in values[:end]) else 0


def _holds(pattern: re.Pattern[str], value: Any) -> bool:
    return isinstance(value, str) and pattern.search(value) is not None


def _opens_block(line: str) -> bool:
    return _PEM_BEGIN.search(line) is not None and not _PEM_END.search(line)
