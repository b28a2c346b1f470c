"""What is wrong with a profile file, in lines that say where and what to write instead."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from ncclops.nearest import meant, nearest
from ncclops.profiles.model import Scope
from ncclops.profiles.schema import (
    TABLES,
    ChannelPart,
    ConditionPart,
    EntryPart,
    ProfileFile,
    ScopePart,
)

# Keys that are compared with the known ones before any of them is shown.
_MOST_MISSPELT = 50
# What was to be there, by pydantic's kind of error.
_SHAPES = {
    "string_type": "text",
    "list_type": "a list in brackets",
    "model_type": "a table in braces",
    "dict_type": "a table in braces",
} | {
    f"{kind}_{how}": name
    for kind, name in (("int", "a whole number"), ("float", "a number"), ("bool", "true or false"))
    for how in ("type", "parsing", "from_float")
}


def describe(error: ValidationError, raw: Mapping[str, Any]) -> Iterator[str]:
    """The problems of ``error``, each as ``key: what is wrong, what to write``."""
    problems: dict[str, tuple[Any, tuple[int | str, ...]]] = {}
    misspelt: set[tuple[int | str, ...]] = set()
    for problem in error.errors(include_url=False):
        location = tuple(part for part in problem["loc"] if part != "[key]")
        if location[:1] == ("parameters",):
            location = location[:2]  # without the type, of which there are several
        problems.setdefault(".".join(_as_written(location, raw)) or "profile", (problem, location))
        if problem["type"] == "extra_forbidden" and len(misspelt) < _MOST_MISSPELT:
            close = meant(str(location[-1]), _known_keys(location))
            misspelt |= {(*location[:-1], key) for key in close}
    for key, (problem, location) in problems.items():
        if problem["type"] == "missing" and location in misspelt:
            continue  # it is there, under a name that has a line of its own
        yield f"{key}: {_say(problem, location)}"


def _as_written(location: tuple[int | str, ...], raw: object) -> list[str]:
    """``location`` without what the file does not have: list positions, names of types."""
    written = []
    for part in location:
        if isinstance(part, int):
            if not isinstance(raw, list):
                continue
            raw = raw[part] if part < len(raw) else None
            written.append(f"[{part + 1}]")
            continue
        if raw is not None and not isinstance(raw, dict):
            continue  # one of the types that a value may have
        raw = raw.get(part) if isinstance(raw, dict) else None
        written.append(str(part))
    return written


def _say(problem: Any, location: tuple[int | str, ...]) -> str:
    kind, given = problem["type"], problem.get("input")
    if location[:1] == ("parameters",) and kind in _SHAPES:
        return f"must be text, a number, true or false, not {given!r}"
    if location[:2] == ("notify", "to") and kind in _SHAPES:
        return f"must be {_SHAPES[kind]}"  # what is given may be a secret
    if kind == "extra_forbidden":
        return f"unknown key{nearest(str(location[-1]), _known_keys(location))}"
    if kind == "missing":
        return "is missing: every entry says why" if location[-1] == "why" else "is missing"
    if kind == "value_error":
        return str(problem["ctx"]["error"])
    if kind == "string_type" and not isinstance(given, list | dict):
        return f'must be text: write it in quotes, as in "{given}"'
    if kind == "list_type" and isinstance(given, str):
        return f'must be a list: write it in brackets, as in ["{given}"]'
    if kind == "literal_error":
        expected = problem["ctx"]["expected"]
        close = nearest(str(given), re.findall("'([^']+)'", expected), or_else="")
        return f"cannot be {given!r}; write {expected}{close}"
    if kind in ("string_too_short", "too_short"):
        return "must not be empty"
    if kind in _SHAPES:
        return f"must be {_SHAPES[kind]}, not {given!r}"
    return f"{problem['msg'].lower().replace('input should be', 'must be')}, not {given!r}"


def _known_keys(location: tuple[int | str, ...]) -> list[str]:
    """The keys allowed where ``location`` ends."""
    if location[0] == "scopes":
        return list(get_args(Scope) if len(location) == 2 else ScopePart.model_fields)
    if location[:2] == ("notify", "to"):
        return list(ChannelPart.model_fields)
    model: type[BaseModel] = ProfileFile
    if location[0] == "env" and len(location) > 2:
        model = ConditionPart if "when" in location else EntryPart
    elif len(location) > 1 and location[0] in TABLES:
        model = TABLES[str(location[0])]
    return [info.alias or name for name, info in model.model_fields.items()]
