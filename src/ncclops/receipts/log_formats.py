"""The lines of the common trainers as data: one file each in ``trainers/``, plus a profile's own.

A form names the lines of one trainer. Each pattern says what a line stands for (``kind``), literals
of which a line must hold one (a quick test before the regex), and a regex whose named groups are
the values in it:

    step, total, epoch           numbers; with an epoch, steps are counted on across epochs
    seconds, ms                  how long warm-up or the step took (or amount with time_unit)
    tokens_per_s, samples_per_s, steps_per_s  rates, with k or M behind the number if need be
    gib, mib, bytes              peak memory (or memory with memory_unit); several bytes are added

Further regexes in ``values`` are searched in the same line. What ``without`` finds in it, up to the
end of what ``regex`` has matched, makes it no such line. Of a form's patterns of one kind the first
that matches counts. A group that a regex needs twice is called ``…_too`` the second time. Where a
line has an epoch and no total, steps may begin again with each epoch. What regexes of a form share
is named in its table ``parts``; ``%{name}`` stands for it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal, cast

from ncclops.errors import UsageError
from ncclops.receipts.observation import Kind, Observation, RateUnit, Where

_DIRECTORY = Path(__file__).parent / "trainers"
# Three more than observations have. failed: an end marker before it is none; noise: the line that
# follows is no failure; table: it names columns, and rows with steps follow.
LineKind = Literal[Kind, "failed", "noise", "table"]
_KINDS = ("begun", "warmup", "step", "memory", "end", "failed", "noise", "table")
_SECONDS = {"ms": 0.001, "s": 1.0, "sec": 1.0, "secs": 1.0, "seconds": 1.0}
_SECONDS |= dict.fromkeys(("m", "min", "mins", "minute", "minutes"), 60.0)
_GIB = {"GiB": 1.0, "MiB": 2.0**-10, "GB": 1e9 / 2**30, "MB": 1e6 / 2**30, "G": 1.0, "M": 2.0**-10}
_GIB |= {unit.lower(): factor for unit, factor in _GIB.items()}
_THOUSANDS = {"k": 1e3, "K": 1e3, "M": 1e6}
_RATES: dict[str, RateUnit] = {
    "tokens_per_s": "tokens/s",
    "samples_per_s": "samples/s",
    "steps_per_s": "steps/s",
}

_PART = re.compile(r"%\{(\w+)\}")
_OPTIONS = {"name": str, "order": int, "only_with": str}
_OPTIONS |= dict.fromkeys(("zero_based", "says_warmup", "fallback"), bool)

Values = dict[str, list[str]]


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """One kind of line; see the module.

    ``continues``: others print such steps, too. They count where the form has found steps of its
    own before, or where a log begins with them after its warm-up.
    """

    kind: LineKind
    contains: tuple[str, ...]
    regex: re.Pattern[str]
    values: tuple[re.Pattern[str], ...] = ()
    without: re.Pattern[str] | None = None
    continues: bool = False

    @cached_property
    def contained(self) -> tuple[bytes, ...]:
        """``contains`` as bytes."""
        return tuple(literal.encode() for literal in self.contains)

    @cached_property
    def _values_by_groups(self) -> tuple[tuple[re.Pattern[str], frozenset[str]], ...]:
        return tuple((regex, frozenset(regex.groupindex)) for regex in self.values)

    def match(self, text: str, lowered: str) -> Values | None:
        """The values in ``text`` by group name, or None if it is no such line."""
        for literal in self.contains:  # `any` takes twice as long, for each pattern and line
            if literal in lowered:
                break
        else:
            return None
        found = self.regex.search(text)
        if found is None or (
            self.without is not None and self.without.search(text, 0, found.end())
        ):
            return None
        values: Values = {}
        _take(found, values)
        self.complete(values, text)
        counted = ("step", "epoch", "total") if "epoch" in values else ("step",)
        is_counted = all(_is_integer(values[name][0]) for name in counted if name in values)
        return values if is_counted else None

    def complete(self, values: Values, text: str) -> None:
        """Add to ``values`` what else ``text`` tells."""
        for regex, groups in self._values_by_groups:
            if _adds(groups, values) and (more := regex.search(text)):
                _take(more, values)


@dataclass(frozen=True, kw_only=True)
class Form:
    """The lines of one trainer.

    ``says_warmup``: it has a line for the end of warm-up; otherwise the first step's end shows it.
    ``fallback``: asked only where no other form finds steps. ``only_with``: counts only where lines
    of that form were found too.
    """

    name: str
    patterns: tuple[Pattern, ...]
    order: int = 50
    zero_based: bool = True
    says_warmup: bool = False
    fallback: bool = False
    only_with: str | None = None


@cache
def shipped_forms() -> tuple[Form, ...]:
    """The forms of the package, in the order in which they are asked."""
    import tomllib

    documents = (tomllib.loads(path.read_text("utf-8")) for path in _DIRECTORY.glob("*.toml"))
    return tuple(sorted(map(parse_form, documents), key=lambda form: (form.order, form.name)))


def parse_form(document: Mapping[str, Any]) -> Form:
    """The form that a TOML table describes, as in ``trainers/`` or in a profile.

    Raises ``ValueError``, saying what is wrong, where it describes none.
    """
    options = {k: value for k, value in document.items() if k not in ("pattern", "parts")}
    unknown = options.keys() - Form.__dataclass_fields__.keys()
    if unknown or "name" not in options or "patterns" in options:
        raise ValueError(
            f"a trainer's form has a name, patterns and no {', '.join(unknown) or '-'}"
        )
    for key, value in options.items():
        if type(value) is not _OPTIONS[key] and not (key == "only_with" and value is None):
            raise ValueError(f"a trainer's form: {key} cannot be {value!r}")
    tables = document.get("pattern")
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ValueError(f"form {options['name']}: pattern has to be an array of tables")
    parts = document.get("parts", {})
    if not isinstance(parts, dict) or not all(isinstance(part, str) for part in parts.values()):
        raise ValueError(f"form {options['name']}: parts has to be a table of texts")
    patterns = tuple(_parse_pattern(options["name"], table, parts) for table in tables)
    return Form(patterns=patterns, **options)


def parse_forms(tables: Iterable[Mapping[str, Any]], where: str) -> list[Form]:
    """The forms that the profile at ``where`` adds. Raises ``UsageError`` for one that is none."""
    try:
        return [parse_form(table) for table in tables]
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(
            f"{where}: watch.trainers: {error}: write it like the files in"
            " ncclops/receipts/trainers"
        ) from error


def _parse_pattern(form: str, table: Mapping[str, Any], parts: Mapping[str, str]) -> Pattern:
    def compiled(regex: str) -> re.Pattern[str]:
        return re.compile(_PART.sub(lambda part: f"(?:{parts[part[1]]})", regex))

    kind = table.get("kind")
    if kind not in _KINDS:
        raise ValueError(f"form {form}: kind {kind!r} is none of {', '.join(_KINDS)}")
    for key in ("contains", "values"):
        texts = table.get(key, [])
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"form {form}: pattern for {kind}: {key} has to be an array of texts")
    continues = table.get("continues", False)
    if type(continues) is not bool:
        raise ValueError(f"form {form}: pattern for {kind}: continues cannot be {continues!r}")
    try:
        return Pattern(
            kind=cast("LineKind", kind),
            contains=tuple(literal.lower() for literal in table["contains"]),
            regex=compiled(table["regex"]),
            values=tuple(map(compiled, table.get("values", ()))),
            without=compiled(table["without"]) if "without" in table else None,
            continues=continues,
        )
    except KeyError as error:
        raise ValueError(f"form {form}: pattern for {kind}: {error.args[0]} is missing") from error
    except (TypeError, RecursionError, OverflowError, re.error) as error:
        raise ValueError(f"form {form}: pattern for {kind}: {error}") from error


def observe(pattern: Pattern, values: Values, where: Where) -> list[Observation]:
    """What a line that ``pattern`` matched shows: a step line may hold memory too."""
    gib = _memory_gib(values)
    unit = next((unit for group, unit in _RATES.items() if group in values), None)
    rate = next((_number(values[group][0]) for group in _RATES if group in values), None)
    main = Observation(
        kind=cast("Kind", pattern.kind),
        where=where,
        step=_step(values),
        seconds=_seconds(values),
        rate=rate or None,
        unit=unit if rate else None,
        gib=gib,
    )
    if pattern.kind == "step" and gib is not None:
        return [main, Observation(kind="memory", where=where, gib=gib)]
    return [main]


def _step(values: Values) -> int | None:
    if "step" not in values:
        return None
    step = _integer(values["step"][0])
    if "epoch" in values and "total" in values:
        step += _integer(values["epoch"][0]) * _integer(values["total"][0])
    return step


def epoch_of(values: Values) -> int | None:
    """The epoch of a line whose step may count from the beginning of that epoch."""
    if "epoch" not in values or "total" in values or "step" not in values:
        return None
    return _integer(values["epoch"][0])


def _seconds(values: Values) -> float | None:
    if "seconds" in values:
        return _number(values["seconds"][0])
    if "ms" in values:
        return _number(values["ms"][0]) / 1000
    if "amount" in values:
        factor = _SECONDS.get(values.get("time_unit", [""])[0])
        return None if factor is None else _number(values["amount"][0]) * factor
    return None


def _memory_gib(values: Values) -> float | None:
    if "gib" in values:
        return _number(values["gib"][0])
    if "mib" in values:
        return _number(values["mib"][0]) / 2**10
    if "bytes" in values:
        return _sum(values["bytes"]) / 2**30
    if "memory" in values:
        factor = _GIB.get(values.get("memory_unit", [""])[0].lower())
        return None if factor is None else _number(values["memory"][0]) * factor
    return None


def _adds(groups: frozenset[str], values: Values) -> bool:
    """Whether ``groups`` are what is not known; a rate in tokens is the better one."""
    if "samples_per_s" in groups and "tokens_per_s" in values:
        return False
    return "bytes" in groups or groups.isdisjoint(values)


def _take(found: re.Match[str], values: Values) -> None:
    for name, value in found.groupdict().items():
        if value is not None:
            values.setdefault(name.removesuffix("_too"), []).append(value)


def _is_integer(text: str) -> bool:
    try:
        _integer(text)
    except ValueError:  # the regex of a profile's form takes more than digits
        return False
    return True


def _integer(text: str) -> int:
    # Garbage can be longer than any number that Python would read.
    return int(text[:18].replace(",", ""))


def _sum(texts: Iterable[str]) -> float:
    return sum(_number(text) for text in texts)


def _number(text: str) -> float:
    """``text`` as a number: with thousands separators, and k or M behind it; 0 if it is none."""
    factor = _THOUSANDS.get(text[-1:], 1.0)
    digits = (text[:-1] if text[-1:] in _THOUSANDS else text).replace(",", "")
    try:
        number = float(digits) * factor
    except ValueError:
        return 0.0
    return number if math.isfinite(number) else 0.0
