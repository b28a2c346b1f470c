#!/usr/bin/env python3
"""Writes docs/profile-keys.md from the JSON schema of profile files (``ncclops profile schema``).

A test holds the page equal to what is written here; run this after changing a key.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ncclops.profiles.schema import DURATION_SCHEMA, json_schema

PAGE = Path(__file__).parent.parent / "docs" / "profile-keys.md"
HEAD = """\
# Keys of profiles

<!-- Written by scripts/profile_keys_page.py from src/ncclops/profiles: edit the texts there. -->

All that a profile file may contain; [profiles.md](profiles.md) says how files combine, and which
values may be placeholders. A duration is a number with a unit (`ms`, `s`, `m`, `h`, `d`), in
quotes, or a parameter in braces. Patterns are shell-style. What has no default follows from other
settings, or is not done.

`ncclops profile schema` prints the same as a JSON schema, with which editors complete and check a
file that begins like this:

```toml
#:schema ./profile.schema.json
description = "Our rack."
```
"""


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *_sections(json_schema())])


def _sections(schema: dict[str, Any]) -> Iterator[str]:
    definitions = schema["$defs"]
    tables: list[tuple[str, dict[str, Any]]] = []
    yield "## At the top of the file\n\n" + _rows(schema, definitions, tables, ())
    while tables:
        name, table = tables.pop(0)
        inner: list[tuple[str, dict[str, Any]]] = []
        rows = _rows(table, definitions, inner, tuple(name.split(".")))
        tables[:0] = inner
        yield f"## `[{name}]`\n\n{' '.join(table['description'].split())}\n\n{rows}"


def _rows(
    table: dict[str, Any],
    definitions: dict[str, Any],
    tables: list[tuple[str, dict[str, Any]]],
    path: tuple[str, ...],
) -> str:
    """The keys of ``table``; tables below it are added to ``tables``, with a row if it says so."""
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for name, key in table["properties"].items():
        below = _table_below(key, definitions)
        if below is not None:
            word, definition = below
            tables.append((".".join((*path, name, *word)), definition))
            if word == () and "description" not in key:
                continue
        given = key.get("default")
        default = f"`{json.dumps(given)}`" if given not in (None, []) else ""
        kind = "table" if below else _type(key)
        must = " Required." if name in table.get("required", ()) else ""
        lines.append(f"| `{name}` | {kind} | {default} | {key['description']}{must} |")
    return "\n".join(lines) + "\n" if len(lines) > 2 else ""


def _table_below(
    key: dict[str, Any], definitions: dict[str, Any]
) -> tuple[tuple[str, ...], dict[str, Any]] | None:
    """The table that ``key`` is, and the word for its names where there is one for each name."""
    if (found := _definition(key, definitions)) is not None:
        return (), found
    names = key.get("additionalProperties")
    if not isinstance(names, dict):
        return None
    found = _definition(names, definitions)
    return None if found is None else (("NAME",), found)


def _definition(of: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any] | None:
    for each in (of, *of.get("anyOf", ()), *of.get("allOf", ())):
        if "$ref" in each:
            found: dict[str, Any] = definitions[each["$ref"].rpartition("/")[2]]
            return found
    return None


def _type(of: dict[str, Any]) -> str:
    """A type in the words of TOML."""
    if "anyOf" in of:
        alone, *more = of["anyOf"]
        if [each.get("items") for each in more] == [alone]:
            return f"{_type(alone)}, or several in a list"
        return " or ".join(map(_type, of["anyOf"]))
    if "enum" in of:
        return " or ".join(f"`{each}`" for each in of["enum"])
    if "const" in of:
        return f"`{json.dumps(of['const'])}`"
    if of.get("pattern") == DURATION_SCHEMA["pattern"]:
        return "duration"
    if of["type"] == "array":
        inner = _type(of["items"])
        return f"list of {inner}" if "`" not in inner else f"list of: {inner.replace(' or ', ', ')}"
    if of["type"] == "object":
        values = of.get("additionalProperties")
        return f"table: {_type(values)} by name" if isinstance(values, dict) else "table"
    words = {
        "string": "text",
        "integer": "whole number",
        "number": "number",
        "boolean": "true or false",
    }
    return words[of["type"]]


if __name__ == "__main__":
    PAGE.write_text(page())
