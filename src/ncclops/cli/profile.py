"""``ncclops profile``: which profiles there are and what they hold."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ncclops.cli._output import print_json, stdout_console

if TYPE_CHECKING:
    from ncclops.profiles import Entry, Profile

app = typer.Typer(no_args_is_help=True, help="List, show and check launch profiles.")

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


@app.command(name="list")
def list_(as_json: JsonOption = False) -> None:
    """List the profiles that a name can reach: project, user, shipped."""
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
        list[str], typer.Argument(metavar="NAME...", help="A profile, or a lane and overlays.")
    ],
    as_json: JsonOption = False,
) -> None:
    """Show what a profile, or several combined, does with each variable."""
    from ncclops.profiles import load_profiles

    profile = load_profiles(names)
    if as_json:
        print_json(_document(profile))
    else:
        _print_profile(profile)


@app.command()
def validate(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A profile file, or a name.")],
) -> None:
    """Check a profile file and everything it extends."""
    from difflib import get_close_matches

    from ncclops.env.lint import known_ids
    from ncclops.errors import ProfileError
    from ncclops.profiles import load_profiles

    profile = load_profiles([file])
    for suppressed in profile.suppress:
        rule = suppressed.partition(":")[0]
        if rule not in known_ids():
            close = get_close_matches(rule, known_ids(), n=1)
            hint = f"; did you mean {close[0]}?" if close else " (findings show theirs in brackets)"
            raise ProfileError(f"{file}: lint.ignore: there is no rule {rule!r}{hint}")
    entries = sum(len(entries) for entries in profile.env.values())
    typer.echo(f"{profile.sources[-1]}: valid: {len(profile.env)} variables, {entries} entries")


def _print_list(rows: list[tuple[str, str, str, str]]) -> None:
    from rich.table import Table
    from rich.text import Text

    console = stdout_console()
    if not console.is_terminal:
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
            typer.echo("  ".join(cells).rstrip())
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
        "env": {
            name: [_entry_document(entry) for entry in entries]
            for name, entries in profile.env.items()
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
        "follows": entry.follows,
        "when": {
            "restart": None if when.restart is None else sorted(when.restart),
            "torch": when.torch,
            "absent": list(when.absent),
            "host": None if when.host is None else list(when.host),
        },
        "why": entry.why,
        "reference": entry.reference,
        "source": entry.source,
    }


def _print_profile(profile: Profile) -> None:
    from rich.padding import Padding
    from rich.text import Text

    document = _document(profile)
    console = stdout_console()
    console.print(Text(f"{profile.name}  ({profile.kind}, nodes: {profile.nodes})", style="bold"))
    console.print(Text(profile.description))
    for name, value in profile.parameters.items():
        console.print(Text(f"parameter {name} = {value}"))
    groups = document["timeouts"].pop("groups")
    for name, value in document["timeouts"].items():
        console.print(Text(f"timeout {name} = {value or 'as torch has it, or in proportion'}"))
    for pattern, value in groups.items():
        console.print(Text(f"timeout of groups {pattern} = {value}, after warm-up"))
    for name, value in document["growth"].items():
        console.print(Text(f"growth over restarts {name} = {value}"))
    for name, value in document["restarts"].items():
        console.print(Text(f"restarts {name} = {value}"))
    for section, value in profile.retry.items():
        console.print(Text(f"retry {section} = {value}"))
    for name, entries in profile.env.items():
        console.print()
        console.print(Text(name, style="bold"))
        for entry in entries:
            console.print(Padding(Text(_entry_line(entry)), (0, 0, 0, 2)))
            console.print(Padding(Text(entry.why, style="dim"), (0, 0, 0, 4)))
            if entry.reference:
                console.print(Padding(Text(f"see {entry.reference}", style="dim"), (0, 0, 0, 4)))
    console.print()
    for source in profile.sources:
        console.print(Text(f"from {Path(source)}", style="dim"))


def _entry_line(entry: Entry) -> str:
    what: str = entry.action
    if entry.value is not None:
        what = f"{entry.action} {entry.value}"
    elif entry.patterns:
        what = f"{entry.action} {' '.join(entry.patterns)}"
    conditions = []
    if entry.when.restart is not None:
        conditions.append(f"restart {' or '.join(sorted(entry.when.restart))}")
    if entry.when.torch is not None:
        conditions.append(f"torch {entry.when.torch}")
    if entry.when.host is not None:
        conditions.append(f"host {' or '.join(entry.when.host)}")
    if entry.when.absent:
        conditions.append(f"{' and '.join(entry.when.absent)} not set")
    if entry.follows is not None:
        what += f" (or what {entry.follows} has)"
    return f"{what}, when {' and '.join(conditions)}" if conditions else what
