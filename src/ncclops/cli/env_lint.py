"""``ncclops env lint``: what is misspelt, wrong, unread, or wrong in combination."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ncclops.cli._output import note, print_json
from ncclops.errors import UsageError

if TYPE_CHECKING:
    from ncclops.env.lint import Circumstances, Finding

_FEATURES = ("fsdp2", "tensor-parallel", "ucc", "torchrun", "ras-polling")


def lint(
    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FILE|-]...",
            help="Shell or sbatch scripts, .env files, NCCL configuration files, YAML, Dockerfiles;"
            " - is standard input. Without one: this environment, with --profile what the profile"
            " makes of it.",
        ),
    ] = None,
    profile: Annotated[
        list[str] | None,
        typer.Option("--profile", "-p", metavar="NAME|FILE", help="Lint the plan of a profile."),
    ] = None,
    restart: Annotated[
        str | None,
        typer.Option(
            "--restart",
            metavar="MODE",
            help="Judge for in-process, process or none; with --profile in-process by default.",
        ),
    ] = None,
    format_: Annotated[
        str | None,
        typer.Option("--format", metavar="FORMAT", help="shell, dotenv, conf, yaml or dockerfile."),
    ] = None,
    torch: Annotated[
        str | None, typer.Option(metavar="VERSION", help="Judge for this torch, not the one here.")
    ] = None,
    nccl: Annotated[
        str | None, typer.Option(metavar="VERSION", help="Judge for this NCCL, not the one here.")
    ] = None,
    nodes: Annotated[
        str | None, typer.Option(metavar="one|many", help="Whether the job has several nodes.")
    ] = None,
    uses: Annotated[
        list[str] | None,
        typer.Option(
            "--uses", metavar="FEATURE", help=f"What the job uses: {', '.join(_FEATURES)}."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Find variables that are misspelt, wrong, read by nothing, or wrong in combination.

    Ends with 1 when there is at least one error.
    """
    where = _circumstances(restart, torch, nccl, nodes, uses)
    if files and profile:
        raise UsageError("lint either files or the plan of a profile, not both")
    reports = _reports(files, profile, format_, where)
    if as_json:
        print_json(_document(reports))
    else:
        _print(reports)
    if any(finding.level == "error" for _, findings in reports for finding in findings):
        raise typer.Exit(1)


def _circumstances(
    restart: str | None,
    torch: str | None,
    nccl: str | None,
    nodes: str | None,
    uses: list[str] | None,
) -> Circumstances:
    from ncclops.env import installed_nccl, installed_torch
    from ncclops.env.lint import Circumstances
    from ncclops.profiles import RESTART_MODES
    from ncclops.profiles.versions import release

    modes = {str(mode): mode for mode in RESTART_MODES}
    if restart is not None and restart not in modes:
        raise UsageError(f"--restart {restart}: choose {', '.join(modes)}")
    for feature in uses or ():
        if feature not in _FEATURES:
            raise UsageError(f"--uses {feature}: choose {', '.join(_FEATURES)}")
    counts: dict[str, Literal["one", "many"]] = {"one": "one", "many": "many"}
    if nodes is not None and nodes not in counts:
        raise UsageError(f"--nodes {nodes}: write one or many")
    for option, version in (("--torch", torch), ("--nccl", nccl)):
        try:
            release(version or "0")
        except ValueError as error:
            raise UsageError(f"{option}: {error}") from None
    return Circumstances(
        restart=modes.get(restart or ""),
        torch=torch or installed_torch(),
        nccl=nccl or installed_nccl(),
        nodes=counts.get(nodes or ""),
        uses=frozenset(uses or ()),
    )


def _reports(
    files: list[str] | None, refs: list[str] | None, kind: str | None, where: Circumstances
) -> list[tuple[str, list[Finding]]]:
    """What was linted, and what was found in it."""
    import os

    from ncclops.env.lint import inputs, lint

    if files:
        return [(name, lint(*inputs.of_file(name, kind, where))) for name in files]
    environ = dict(os.environ)
    if not refs:
        return [("environment", lint(*inputs.of_environ(environ, where)))]
    from ncclops.env.request import resolve_profile

    profile = resolve_profile(refs, say=note)
    found = lint(*inputs.of_profile(profile, environ, where))
    return [(f"profile {profile.name}", found)]


def _document(reports: list[tuple[str, list[Finding]]]) -> dict[str, Any]:
    findings = [
        {
            "file": name,
            "line": finding.line or None,
            "rule": finding.rule,
            "level": finding.level,
            "names": list(finding.names),
            "message": finding.message,
            "remedy": finding.remedy or None,
            "source": finding.source or None,
        }
        for name, found in reports
        for finding in found
    ]
    levels = [finding["level"] for finding in findings]
    counts = {f"{level}s": levels.count(level) for level in ("error", "warning", "note")}
    return {"schema": "ncclops.env-lint/1", **counts, "findings": findings}


def _print(reports: list[tuple[str, list[Finding]]]) -> None:
    total = 0
    for name, findings in reports:
        for finding in findings:
            total += 1
            place = f"{name}:{finding.line}" if finding.line else name
            text = "; ".join(filter(None, [finding.message.rstrip("."), finding.remedy]))
            typer.echo(f"{place}: {finding.level}: {text} [{finding.rule}]")
    if not total:
        typer.echo("nothing found")
