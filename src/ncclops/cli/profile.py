"""``ncclops profile``: which profiles there are and what they hold."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ncclops.cli._options import JsonOption, ParamOption, profile_names
from ncclops.cli._output import echo, note, print_json, stdout_console

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ncclops.profiles import Entry, Profile
    from ncclops.profiles.model import Scope

_SCOPES: dict[Scope, str] = {
    "between_nodes": "every other variable of networks between nodes",
    "within_node": "every other variable with a value that only one node wants",
}

app = typer.Typer(no_args_is_help=True, help="List, show and check launch profiles.")


@app.command(name="list")
def list_(as_json: JsonOption = False) -> None:
    """List the profiles that a name can reach: project, user, site, shipped."""
    from ncclops.profiles import list_profiles

    summaries = list_profiles()
    if as_json:
        rows = [
            {
                "name": item.name,
                "kind": item.kind,
                "nodes": item.nodes,
                "description": item.description,
                "origin": item.origin,
                "path": str(item.path),
                "problem": item.problem,
            }
            for item in summaries
        ]
        print_json({"schema": "ncclops.profile-list/1", "profiles": rows})
        return
    _print_list([(i.name, i.kind, i.origin, i.problem or i.description) for i in summaries])


@app.command()
def show(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME...",
            help="A profile, or a lane and overlays.",
            autocompletion=profile_names,
        ),
    ],
    param: ParamOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a profile, or several combined, does with each variable."""
    from ncclops.env.request import load
    from ncclops.profiles.parameters import parse_parameters

    profile = load(names, parse_parameters(param), say=note)
    if as_json:
        print_json(_document(profile))
    else:
        _print_profile(profile)


@app.command()
def validate(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A profile file, or a name.")],
) -> None:
    """Check a profile file and everything it extends."""
    from ncclops.errors import ProfileError
    from ncclops.profiles import load_profiles
    from ncclops.toml_files import refuse

    profile = load_profiles([file])
    refuse(_problems(file, profile), ProfileError)
    entries = sum(len(entries) for entries in profile.env.values())
    echo(f"{profile.sources[-1]}: valid: {len(profile.env)} variables, {entries} entries")


def _problems(file: str, profile: Profile) -> Iterator[str]:
    """What of ``profile`` those refuse who use it."""
    from ncclops.classify.retry_rules import default_rules
    from ncclops.env.lint import known_ids
    from ncclops.errors import UsageError
    from ncclops.nearest import nearest
    from ncclops.receipts.log_formats import parse_forms

    try:
        parse_forms(profile.watch.trainers, str(profile.sources[-1]))
    except UsageError as error:
        yield from error.lines
    try:
        default_rules().overridden({k: v for k, v in profile.retry.items() if k != "lane"})
    except UsageError as error:
        yield from (f"{profile.sources[-1]}: {line}" for line in error.lines)
    for suppressed in profile.suppress:
        rule = suppressed.partition(":")[0]
        if rule not in known_ids():
            hint = nearest(rule, known_ids(), or_else=" (findings show theirs in brackets)")
            yield f"{file}: lint.ignore: there is no rule {rule!r}{hint}"


@app.command()
def schema() -> None:
    """Print the JSON schema of profile files, with which editors complete and check them."""
    from ncclops.profiles.schema import json_schema

    print_json(json_schema())


def _print_list(rows: list[tuple[str, str, str, str]]) -> None:
    from rich.table import Table
    from rich.text import Text

    console = stdout_console()
    if not console.is_terminal:
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
            echo("  ".join(cells).rstrip())
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for header in ("name", "kind", "from", "what for"):
        table.add_column(header, no_wrap=header != "what for")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)


def _document(profile: Profile) -> dict[str, Any]:
    from dataclasses import asdict

    from ncclops.durations import format_duration
    from ncclops.profiles.model import STOP_GRACE
    from ncclops.profiles.schema import timeout_names

    texts = {name: format_duration(value) for name, value in profile.timeouts.items()}
    texts.setdefault("stop_grace", format_duration(STOP_GRACE))
    return {
        "schema": "ncclops.profile/1",
        "name": profile.name,
        "description": profile.description,
        "kind": profile.kind,
        "nodes": profile.nodes,
        "parameters": dict(profile.parameters),
        "uses": {name: list(uses) for name, uses in profile.uses.items()},
        "timeouts": {
            **{name: texts.get(name) for name in timeout_names()},
            "groups": {
                name.removeprefix("groups."): text
                for name, text in texts.items()
                if name.startswith("groups.")
            },
        },
        "growth": asdict(profile.growth),
        "restarts": asdict(profile.restarts),
        "preflight": asdict(profile.preflight),
        "exit_codes": asdict(profile.exit_codes),
        "notify": profile.notify.to_json(),
        "env": {
            name: [_entry_document(entry) for entry in entries]
            for name, entries in profile.env.items()
        },
        "scopes": {
            scope: {"action": entry.action, "why": entry.why, "source": entry.source}
            for scope, entry in profile.scopes.items()
        },
        "suppress": dict(profile.suppress),
        "retry": dict(profile.retry),
        "sources": list(profile.sources),
    }


def _entry_document(entry: Entry) -> dict[str, Any]:
    when = entry.when
    return {
        "action": entry.action,
        "value": entry.value,
        "patterns": list(entry.patterns),
        "holding": list(entry.holding),
        "unless_holding": list(entry.unless_holding),
        "follows": entry.follows,
        "when": {
            "restart": None if when.restart is None else sorted(when.restart),
            "torch": when.torch,
            "absent": list(when.absent),
            "host": None if when.host is None else list(when.host),
            "value": None if when.value is None else list(when.value),
        },
        "why": entry.why,
        "reference": entry.reference,
        "source": entry.source,
    }


def _print_profile(profile: Profile) -> None:
    from rich.padding import Padding
    from rich.text import Text

    console = stdout_console()
    for indent, style, text in _lines(profile):
        if console.is_terminal:
            console.print(Padding(Text(text, style=style), (0, 0, 0, indent)))
        else:  # a line each, whatever its length
            echo(f"{' ' * indent}{text}")


def _lines(profile: Profile) -> Iterator[tuple[int, str, str]]:
    """Indentation, style and text."""
    document = _document(profile)
    yield 0, "bold", f"{profile.name}  ({profile.kind}, nodes: {profile.nodes})"
    yield 0, "", profile.description
    for name, value in profile.parameters.items():
        uses = ", ".join(profile.uses[name]) or "nothing here"
        yield 0, "", f"parameter {name} = {value}, for {uses}"
    groups = document["timeouts"].pop("groups")
    named = {name: value for name, value in document["timeouts"].items() if value}
    for name, value in named.items():
        yield 0, "", f"timeout {name} = {value}"
    derived = [name for name in document["timeouts"] if name not in named]
    yield 0, "", f"timeouts as torch has them, or in proportion: {', '.join(derived)}"
    for pattern, value in groups.items():
        yield 0, "", f"timeout of groups {pattern} = {value}, after warm-up"
    for name, value in document["growth"].items():
        yield 0, "", f"growth over restarts {name} = {value}"
    for name, value in document["restarts"].items():
        yield 0, "", f"restarts {name} = {value}"
    for name, value in document["preflight"].items():
        if value is not None and value != ():
            yield 0, "", f"preflight {name} = {value}"
    for kind, code in document["exit_codes"].items():
        yield 0, "", f"exit code {kind} = {code}"
    for name, channel in document["notify"]["to"].items():
        where = channel["command"] or channel["url"] or channel["key"]
        yield 0, "", f"notify {name}: {channel['kind']} ({where}), {', '.join(channel['rules'])}"
    for section, value in profile.retry.items():
        yield 0, "", f"retry {section} = {value}"
    for name, entries in profile.env.items():
        yield 0, "", ""
        yield 0, "bold", name
        for entry in entries:
            yield from _entry_lines(entry)
    for scope, entry in profile.scopes.items():
        yield 0, "", ""
        yield 0, "bold", _SCOPES[scope]
        yield from _entry_lines(entry)
    yield 0, "", ""
    for source in profile.sources:
        yield 0, "dim", f"from {Path(source)}"


def _entry_lines(entry: Entry) -> Iterator[tuple[int, str, str]]:
    yield 2, "", _entry_line(entry)
    yield 4, "dim", entry.why
    if entry.reference:
        yield 4, "dim", f"see {entry.reference}"


def _entry_line(entry: Entry) -> str:
    what: str = entry.action
    if entry.value is not None:
        what = f"{entry.action} {entry.value}"
    elif entry.patterns:
        what = f"{entry.action} {' '.join(entry.patterns)}"
    if entry.holding:
        what += f", and directories that hold {' or '.join(entry.holding)}"
    if entry.unless_holding:
        what += f" but not {' or '.join(entry.unless_holding)}"
    conditions = []
    if entry.when.restart is not None:
        conditions.append(f"restart {' or '.join(sorted(entry.when.restart))}")
    if entry.when.torch is not None:
        conditions.append(f"torch {entry.when.torch}")
    if entry.when.host is not None:
        conditions.append(f"host {' or '.join(entry.when.host)}")
    if entry.when.value is not None:
        conditions.append(f"it is {' or '.join(entry.when.value)}")
    if entry.when.absent:
        conditions.append(f"{' and '.join(entry.when.absent)} not set")
    if entry.follows is not None:
        what += f" (or what {entry.follows} has)"
    return f"{what}, when {' and '.join(conditions)}" if conditions else what
