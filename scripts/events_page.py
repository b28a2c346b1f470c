#!/usr/bin/env python3
"""Writes docs/events.md from the types in src/ncclops/record/events.py, their texts and sections.

A test holds the page equal to what is written here; run this after changing an event.
"""

from __future__ import annotations

import ast
import inspect
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from ncclops.record import events

PAGE = Path(__file__).parent.parent / "docs" / "events.md"
_SECTION = re.compile(r"^# --- (.*?) -+$")
_SCALARS = {
    int: "integer",
    float: "number",
    str: "string",
    bool: "true or false",
    type(None): "null",
    events.Rank: "integer",
    Any: "anything",
}
HEAD = """\
# Events of a run

<!-- Written by scripts/events_page.py from src/ncclops/record/events.py: edit the texts there. -->

`events.jsonl` in the run directory holds one JSON object a line. Each has these fields, and all of
those of its event below; what is not known is null.

{common}

Workers report to their agent in the same form, in `ranks/<rank>/worker.jsonl`; the agent copies
into `events.jsonl` what concerns the run. Of a job on several nodes each node has a run directory
of its own, with the events that its agent recorded.

Fields and events are added and never change their meaning. A reader should pass over what it does
not know, and over a last line that is not whole: `ncclops` does so with records of all versions.

| event | when |
|---|---|
{index}
"""


def page() -> str:
    """The whole page."""
    texts = dict(field_texts())
    common = table(events.Event, texts, ("event", "string", "its name, as below"))
    index = "\n".join(map(index_row, events.TYPES))
    parts = [HEAD.format(common=common, index=index)]
    sections = section_starts()
    for kind in events.TYPES:
        line = inspect.getsourcelines(kind)[1]
        while sections and sections[0][0] < line:
            parts.append(f"## {sections.pop(0)[1].capitalize()}\n")
        parts.append(f"### `{name(kind)}`\n\n{text_of(kind)}\n")
        if own_fields(kind):
            parts.append(table(kind, texts) + "\n")
    return "\n".join(parts)


def name(kind: type[events.Event]) -> str:
    return events.name_of(kind)


def text_of(kind: type[Any]) -> str:
    """The docstring in one paragraph."""
    return " ".join((kind.__doc__ or "").split())


def index_row(kind: type[events.Event]) -> str:
    """The event, and the beginning of what is said about it."""
    beginning = re.split("[.;] ", text_of(kind))[0].rstrip(".")
    return f"| [`{name(kind)}`](#{name(kind)}) | {beginning} |"


def own_fields(kind: type[Any]) -> list[str]:
    """Names of the fields that an event does not share with all others."""
    shared = () if kind is events.Event else events.Event.__struct_fields__
    return [field for field in kind.__struct_fields__ if field not in shared]


def table(kind: type[Any], texts: dict[tuple[str, str], str], *more: tuple[str, str, str]) -> str:
    """The fields of ``kind``: name, type and meaning."""
    hints = typing.get_type_hints(kind, include_extras=True)
    encoded = dict(zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True))
    rows = [
        (encoded[field], type_name(hints[field]), texts[kind.__name__, field])
        for field in own_fields(kind)
    ]
    rows[1:1] = more
    lines = (f"| `{field}` | {of} | {says} |" for field, of, says in rows)
    return "\n".join(("| field | type | meaning |", "|---|---|---|", *lines))


def type_name(of: Any) -> str:
    """A type in JSON's words."""
    if of in _SCALARS:
        return _SCALARS[of]
    origin, arguments = typing.get_origin(of), typing.get_args(of)
    if origin is typing.Literal:
        return " or ".join(f"`{each}`" for each in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(type_name, arguments))
    if origin is list:
        return f"array of {type_name(arguments[0])}"
    if origin is tuple:
        return f"array: {', '.join(map(type_name, arguments))}"
    if origin is dict:
        return f"object: {type_name(arguments[1])} by name"
    return f"`{{{', '.join(each.encode_name for each in msgspec.structs.fields(of))}}}`"


def field_texts() -> Iterator[tuple[tuple[str, str], str]]:
    """The text below each field in the source, by class and field."""
    for node in ast.parse(inspect.getsource(events)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for field, after in zip(node.body, node.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
            ):
                yield (node.name, field.target.id), " ".join(str(after.value.value).split())


def section_starts() -> list[tuple[int, str]]:
    """The lines on which the source begins a section, and their titles."""
    lines = inspect.getsource(events).splitlines()
    found = ((number, _SECTION.match(line)) for number, line in enumerate(lines, start=1))
    return [(number, match[1]) for number, match in found if match]


if __name__ == "__main__":
    PAGE.write_text(page())
