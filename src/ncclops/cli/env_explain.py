"""``ncclops env explain``: everything about one variable on one screen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ncclops.cli._options import JsonOption
from ncclops.cli._output import echo, print_json, stdout_console

if TYPE_CHECKING:
    from collections.abc import Iterator


def explain(
    name: Annotated[str, typer.Argument(metavar="NAME", help="An environment variable.")],
    as_json: JsonOption = False,
) -> None:
    """Explain a variable: who reads it, what it takes, its value here and where that comes from."""
    import os

    from ncclops.env import installed_nccl, installed_torch
    from ncclops.env.explain import explain as explain_variable

    document = explain_variable(name, os.environ, torch=installed_torch(), nccl=installed_nccl())
    if as_json:
        print_json(document)
    else:
        _print(document)


def _print(document: dict[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    console = stdout_console()
    console.print(Text(document["name"], style="bold"))
    console.print(Text(document["summary"]))
    if not console.is_terminal:
        for label, text in _rows(document):
            echo(f"{label:<10}  {text}")
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for label, text in _rows(document):
        table.add_row(Text(label), Text(text))
    console.print(table)


def _rows(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    here = document["here"]
    yield "here", _value_here(here)
    if here["problem"]:
        yield "problem", here["problem"]
    yield "read by", _reader(document)
    accepts = document["accepts"] or "any text"
    unit = f" ({document['unit']})" if document["unit"] else ""
    yield "takes", f"{document['type']}{unit}: {accepts}"
    yield "default", document["default"] or "unset"
    yield "versions", _versions(document)
    yield "read", document["read_when"]
    optional = {
        "ranks": document["ranks"],
        "in-process": document["restart"],
        "one node": _risk(document),
        "debugging": "NVIDIA lists it for debugging only" if document["debug_only"] else None,
        "source": document["source"],
    }
    yield from ((label, text) for label, text in optional.items() if text)


def _value_here(here: dict[str, Any]) -> str:
    if here["value"] is None:
        return "not set"
    return f"{here['value']}, from {here['from']}"


def _reader(document: dict[str, Any]) -> str:
    parts = [document["read_by"]]
    if document["second_engine"]:
        parts.append(document["second_engine"])
    if document["read_here"] is False:
        parts.append("not by what is installed here")
    return "; ".join(parts)


def _versions(document: dict[str, Any]) -> str:
    parts = [document["status"]]
    for label in ("since", "deprecated", "removed"):
        if document[label]:
            parts.append(f"{label} {document[label]}")
    if document["replaced_by"]:
        parts.append(f"use {document['replaced_by']}")
    if document["documented"] is False:
        parts.append("not in NVIDIA's manual")
    return ", ".join(parts)


def _risk(document: dict[str, Any]) -> str | None:
    only = "only matters between nodes" if document["multi_host_only"] else None
    if not document["single_node_risk"]:
        return only
    risk = f"risk {document['single_node_risk']}"
    return f"{risk}: {document['risk']}" if document["risk"] else risk
