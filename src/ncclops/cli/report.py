"""``ncclops report``: a run on one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ncclops.cli._options import ForceOption, RunArgument
from ncclops.cli._output import echo, note


def report(
    run: RunArgument = None,
    output: Annotated[
        Path,
        typer.Option(
            "-o", "--output", metavar="FILE", help="The page to write; - for standard output."
        ),
    ] = Path("report.html"),
    force: ForceOption = False,
) -> int:
    """Write one self-contained HTML page: timeline, restarts, step times of all ranks, receipt."""
    from ncclops.errors import UsageError
    from ncclops.record.regular_file import write_named
    from ncclops.record.runs import find
    from ncclops.report.page import render
    from ncclops.report.records import read

    found = find(run)
    if output.is_file() and not force:
        raise UsageError(f"{output} exists: name another file with -o, or give --force")
    page = render(read(found.path))
    if str(output) == "-":
        echo(page)
        return 0
    try:
        write_named(output, page.encode(errors="backslashreplace"))
    except OSError as error:
        raise UsageError(
            f"cannot write {output} ({error.strerror}): name another file with -o"
        ) from error
    note(f"{output}: {len(page) / 1024:.0f} KiB, open it in a browser")
    return 0
