"""``ncclops advise``: known-bad versions and combinations that concern this machine or a run."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ncclops.cli._options import RESTART_MODES, JsonOption, RestartMode, one_of, shown
from ncclops.cli._output import echo, print_json
from ncclops.nearest import meant

if TYPE_CHECKING:
    from ncclops.advisories import Advisory, Case, Finding

_UNKNOWN = "?"


def advise(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]",
            help="Run directory, run id or its beginning. Default: this machine and shell.",
        ),
    ] = None,
    nnodes: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="How many nodes the job is to have.")
    ] = None,
    restart: Annotated[
        RestartMode | None,
        typer.Option(
            parser=one_of("--restart", RESTART_MODES),
            metavar=shown(RESTART_MODES),
            help="How it is to restart.",
        ),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Show the whole table, whom it concerns or not.")
    ] = False,
    explain: Annotated[
        str | None, typer.Option(metavar="ID", help="Show one entry in full.")
    ] = None,
    exit_code: Annotated[
        bool,
        typer.Option(
            "--exit-code/--no-exit-code",
            show_default=False,
            help="Exit with 1 when an entry concerns it; the default is 0.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show known issues of the installed versions: NCCL, torch, driver, plugin, architecture.

    What decides and is not known, such as how many nodes a job has, is said with each entry.
    """
    from ncclops.advisories import advisories, concerning

    table = [_entry(explain)] if explain is not None else advisories()
    case, about = _case(run, nnodes, restart)
    found = concerning(table, case)
    wanted = found if every or explain else [each for each in found if each.state != "no"]
    if as_json:
        print_json(
            {
                "schema": "ncclops.advise/1",
                "about": about,
                "software": _software(case),
                "nodes": case.nodes,
                "ranks": case.ranks,
                "restart": case.restart,
                "entries": len(table),
                "advisories": [each.to_json() for each in wanted],
            }
        )
    else:
        _print(case, about, wanted, len(table), in_full=explain is not None)
    if exit_code and any(each.state == "concerns" for each in found):
        raise typer.Exit(1)


def _entry(wanted: str) -> Advisory:
    from ncclops.advisories import advisories
    from ncclops.errors import UsageError

    known = {advisory.id: advisory for advisory in advisories()}
    if wanted in known:
        return known[wanted]
    close = meant(wanted, known)
    hint = f"did you mean {close[0]}?" if close else "`ncclops advise --all` lists them"
    raise UsageError(f"--explain {wanted}: there is no advisory of this id: {hint}")


def _case(run: str | None, nnodes: int | None, restart: str | None) -> tuple[Case, str]:
    from ncclops.advisories.cases import of_machine, of_run
    from ncclops.env.origins import effective
    from ncclops.errors import UsageError

    if run is None:
        environ = effective(os.environ)
        return of_machine(environ, nodes=nnodes, restart=restart), "this machine"
    if nnodes is not None or restart is not None:
        raise UsageError("--nnodes and --restart are for this machine: a run has its own")
    from ncclops.record.runs import find

    path = find(run).path
    return of_run(path), f"run {path.name}"


def _software(case: Case) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(case.software)


def _print(case: Case, about: str, found: list[Finding], entries: int, *, in_full: bool) -> None:
    echo(f"{about}: {_stack(case)}")
    if not case.software.gpus:
        echo("no GPU is visible here, and all known issues concern jobs on GPUs")
    groups = {
        "concerns": f"concern {about}:",
        "cannot-tell": "may concern it, if what follows holds:",
        "no": "do not concern it:",
    }
    for state, heading in groups.items():
        of_state = [each for each in found if each.state == state]
        if of_state:
            echo(f"\n{heading}")
        for each in of_state:
            _print_entry(each, in_full=in_full or state == "concerns")
    if not found and case.software.gpus:
        echo(f"none of the {entries} known issues concerns it")


def _stack(case: Case) -> str:
    software = case.software
    gpus = ", ".join(dict.fromkeys(software.gpus))
    parts = {
        "torch": software.torch,
        "NCCL": software.nccl,
        "driver": software.driver,
        "CPU": software.cpu,
        "GPU": f"{len(software.gpus)} × {gpus}" if software.gpus else None,
        "nodes": None if case.nodes is None else str(case.nodes),
    }
    return " | ".join(f"{name} {value or _UNKNOWN}" for name, value in parts.items())


def _print_entry(finding: Finding, *, in_full: bool) -> None:
    entry = finding.advisory
    echo(f"  {entry.severity:<7} {entry.title}  ({entry.id})")
    for clause in finding.unknown:
        echo(f"          if {clause}")
    if not in_full:
        return
    fixed = ", ".join(f"{name} {version}" for name, version in entry.fixed_in.items())
    echo(f"          {' '.join(entry.symptom.split())}")
    echo(f"          way round: {entry.remedy}")
    echo(f"          fixed in: {fixed or 'nothing that is known'}")
    if entry.rules_out:
        echo(f"          after a restart in place no group is {', '.join(entry.rules_out)}")
    for source in entry.sources:
        echo(f"          {source}")
