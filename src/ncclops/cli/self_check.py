"""``ncclops self-check``: what works on this machine?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ncclops.cli._options import CheckExitCodeOption, JsonOption
from ncclops.cli._output import echo, print_json
from ncclops.errors import PreflightRefused


def self_check(
    log_dir: Annotated[
        Path,
        typer.Option(metavar="DIR", help="Where runs are to be recorded, as of launch."),
    ] = Path("runs"),
    strict: Annotated[bool, typer.Option("--strict", help="A warning fails as well.")] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Show also what preflight finds well or cannot tell.")
    ] = False,
    exit_code: CheckExitCodeOption = True,
    as_json: JsonOption = False,
) -> None:
    """Say in some ten seconds what works on this machine.

    Python, torch, NCCL, GPUs, the network and the run directory, what `ncclops preflight` checks,
    and a job of two ranks on Gloo in which one rank fails and both restart in place. Needs neither
    a GPU nor a script. Exits with 3 when a check fails.
    """
    from ncclops.preflight.model import Status
    from ncclops.preflight.table import lines
    from ncclops.self_check.node import SCHEMA, always_shown, self_check

    report = self_check(log_dir)
    if as_json:
        print_json({**report.to_json(), "schema": SCHEMA})
    else:
        echo("\n".join(lines(report, everything=everything, always=always_shown())))
    bad = (Status.FAIL, Status.WARN) if strict else (Status.FAIL,)
    if report.status in bad and exit_code:
        raise typer.Exit(PreflightRefused.exit_code)
