"""``ncclops env snapshot`` and ``ncclops env compare``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ncclops.cli._options import ChangedExitCodeOption, ForceOption, JsonOption
from ncclops.cli._output import echo, note, print_json

if TYPE_CHECKING:
    from ncclops.env.snapshot import EnvSnapshot, VariableDifference


def snapshot(
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write there, not on stdout."),
    ] = None,
    keep_secrets: Annotated[
        bool, typer.Option("--keep-secrets", help="Leave values that look like secrets in.")
    ] = False,
    force: ForceOption = False,
) -> None:
    """Write this environment down, secrets taken out, for a later `env compare`."""
    import os
    from pathlib import Path

    from ncclops.env.snapshot import is_another_file, take, write
    from ncclops.errors import UsageError
    from ncclops.redaction.redactor import REDACTED

    if output is None:
        print_json(take(os.environ, keep_secrets=keep_secrets).to_json())
        return
    if not force and is_another_file(Path(output)):
        raise UsageError(
            f"{output} exists and is no snapshot: name another file with -o, or give --force"
        )
    try:
        taken = write(os.environ, Path(output), keep_secrets=keep_secrets)
    except OSError as error:
        raise UsageError(f"{output}: cannot be written: {error.strerror}") from None
    hidden = sum(value == REDACTED for value in taken.variables.values())
    note(f"{output}: {len(taken.variables)} variables, {hidden} of them redacted")


def compare_command(
    a: Annotated[
        str,
        typer.Argument(metavar="A", help="A snapshot, a run or rank directory, pid:N, or here."),
    ],
    b: Annotated[
        str, typer.Argument(metavar="[B]", help="The same; default: this environment.")
    ] = "here",
    exit_code: ChangedExitCodeOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show what differs between two environments: variables, and versions where they are known."""
    compare([a, b], as_json=as_json, exit_code=exit_code)


def compare(names: list[str], *, as_json: bool, exit_code: bool) -> None:
    """Print what differs between two environments; with one name, between it and this one."""
    from ncclops.env.snapshot import compare as find
    from ncclops.env.snapshot import load

    a, b = (load(name) for name in [*names, "here"][:2])
    differences = find(a, b)
    if as_json:
        print_json(_document(a, b, differences))
    else:
        _print(a, b, differences)
    if exit_code and differences:
        raise typer.Exit(1)


def _document(
    a: EnvSnapshot, b: EnvSnapshot, differences: list[VariableDifference]
) -> dict[str, Any]:
    from dataclasses import asdict

    sides = {
        side: {"label": shot.label, "host": shot.host, "versions": dict(shot.versions)}
        for side, shot in (("a", a), ("b", b))
    }
    rows = [asdict(difference) for difference in differences]
    return {"schema": "ncclops.env-compare/1", **sides, "differences": rows}


def _print(a: EnvSnapshot, b: EnvSnapshot, differences: list[VariableDifference]) -> None:
    from ncclops.env.catalogue import RANKS

    for name in sorted({*a.versions, *b.versions}):
        mine, other = a.versions.get(name), b.versions.get(name)
        if a.versions and b.versions and mine != other:
            echo(f"{name}: {mine or '-'} → {other or '-'}")
    echo(f"{a.label} → {b.label}: {len(differences)} variables differ")
    for difference in differences:
        must = difference.ranks in ("equal", "better equal")
        remark = f"  ({RANKS[difference.ranks]})" if must else ""
        echo(f"{difference.name}: {_shown(difference.a)} → {_shown(difference.b)}{remark}")


def _shown(value: str | None) -> str:
    if value is None:
        return "-"
    return value if value.isprintable() else value.encode("unicode_escape").decode("ascii")
