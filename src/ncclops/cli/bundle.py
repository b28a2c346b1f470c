"""``ncclops bundle``: a run packed for a ticket."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ncclops.cli._options import ForceOption, JsonOption, RunArgument
from ncclops.cli._output import echo, print_json, stdout_console
from ncclops.errors import UsageError

if TYPE_CHECKING:
    from ncclops.bundle.pack import Bundle, LeftOut

_MIB = 1 << 20
# A directory that is a rank's, a node's or an incident's.
_NUMBER = re.compile(r"(?<=/)[0-9]+(?=/)")


def _print_rules(wanted: bool) -> None:
    if not wanted:
        return
    from ncclops.redaction.redactor import rules

    width = max(len(rule.name) for rule in rules())
    for rule in rules():
        echo(f"{rule.name:<{width}}  {rule.what}")
    raise typer.Exit


def bundle(
    run: RunArgument = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="FILE", help="The archive to write; default RUN's name here."
        ),
    ] = None,
    max_file: Annotated[
        int,
        typer.Option(
            "--max-file", metavar="MIB", min=1, help="Cut longer logs in the middle, in MiB."
        ),
    ] = 32,
    rules: Annotated[
        bool,
        typer.Option(
            "--rules",
            callback=_print_rules,
            is_eager=True,
            help="Print what is taken out as a secret.",
        ),
    ] = False,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> int:
    """Pack a run's records for a ticket, with secrets taken out.

    Host names, paths, addresses and command lines stay: they are what a ticket is about.
    """
    from ncclops.bundle.pack import pack
    from ncclops.record.runs import find

    if output == Path("-"):
        raise UsageError("-o -: an archive appears whole or not at all: name a file")
    path = find(run).path
    archive = output or Path(f"{path.name}.tar.gz")
    packed = pack(path, archive, file_limit=max_file * _MIB, replace=force)
    if as_json:
        print_json(packed.manifest() | {"archive": str(packed.archive)})
    else:
        _print(packed)
    return 0


def _print(packed: Bundle) -> None:
    console = stdout_console()
    count = packed.archive.stat().st_size
    size = f"{count / _MIB:.1f} MiB" if count >= _MIB else f"{count / 1024:.0f} KiB"
    console.print(f"{packed.archive}: {len(packed.files)} files, {size}", markup=False)
    for file in packed.files:
        if file.cut:
            console.print(f"  cut in the middle: {file.path}", markup=False)
    for paths, why in _alike(packed.left_out):
        console.print(f"  left out: {paths} ({why})", markup=False)
    taken = ", ".join(f"{name} {count}" for name, count in packed.redactions.most_common())
    console.print(f"  secrets taken out: {taken or 'none found'} (rules: ncclops bundle --rules)")


def _alike(left_out: Iterable[LeftOut]) -> Iterator[tuple[str, str]]:
    """What was left out, and why; what differs in numbers alone, as a rule in the rank's, once."""
    like: dict[tuple[str, str], list[str]] = {}
    for left in left_out:
        like.setdefault((_NUMBER.sub("*", left.path), left.why), []).append(left.path)
    for (pattern, why), paths in like.items():
        yield (pattern, f"{len(paths)} files: {why}") if len(paths) > 1 else (paths[0], why)
