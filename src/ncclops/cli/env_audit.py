"""``ncclops env audit``: what the installed libraries really read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ncclops.cli._options import JsonOption
from ncclops.cli._output import echo, print_json

if TYPE_CHECKING:
    from ncclops.env.audit import Audit, Library


def audit(
    libnccl: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Look into this libnccl, not the installed one."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Find which variables the libnccl and the torch installed here read, by their own strings.

    Against the catalogue: names it lacks or claims wrongly. Against this environment: names
    that are set and that nothing reads.
    """
    import os

    from ncclops.env.audit import audit as run_audit

    result = run_audit(os.environ, nccl=libnccl)
    if as_json:
        print_json(result.to_json())
    else:
        _print(result)


def _print(result: Audit) -> None:
    for library in result.libraries:
        _print_library(library)
    if not any(library.name == "libnccl" for library in result.libraries):
        echo("libnccl: none installed here (--libnccl FILE looks into one)")
    unread = ", ".join(result.set_but_unread) or "nothing"
    echo(f"set here and read by none of these: {unread}")


def _print_library(library: Library) -> None:
    echo(f"{library.name} {library.version or '?'} ({library.path})")
    echo(f"  reads {len(library.read)} variables of the catalogue")
    if library.unknown:
        echo(f"  reads, and the catalogue lacks: {', '.join(sorted(library.unknown))}")
    if library.claimed:
        echo(f"  does not read, as the catalogue claims: {', '.join(sorted(library.claimed))}")
