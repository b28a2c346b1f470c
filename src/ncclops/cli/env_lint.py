"""``ncclops env lint``: what is misspelt, wrong, unread, or wrong in combination."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ncclops.cli._output import print_json
from ncclops.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from ncclops.env.lint import Circumstances, Finding, Settings
    from ncclops.profiles import Profile

_FEATURES = ("fsdp2", "tensor-parallel", "ucc", "torchrun", "ras-polling")


def lint(
    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FILE|-]...",
            help="Shell or sbatch scripts, .env files, NCCL configuration files; - is standard"
            " input. Without one: this environment, with --profile what the profile makes of it.",
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
        str | None, typer.Option("--format", metavar="FORMAT", help="shell, dotenv or conf.")
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
    from ncclops.env.lint import lint as find

    where = _circumstances(restart, torch, nccl, nodes, uses)
    if files and profile:
        raise UsageError("lint either files or the plan of a profile, not both")
    reports: list[tuple[str, list[Finding]]] = []
    for name in files or []:
        settings, known = _read(name, format_, where)
        reports.append((name, find(settings, known)))
    if not files:
        settings, known, name = _environment(profile, where)
        reports.append((name, find(settings, known)))
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


def _read(name: str, format_: str | None, where: Circumstances) -> tuple[Settings, Circumstances]:
    """The settings of a file, and what the file itself tells about the job."""
    from dataclasses import replace
    from pathlib import Path

    from ncclops.env.lint import Settings
    from ncclops.env.lint.parse import Format, features, guess_format, node_count, parse

    formats: dict[str, Format] = {"shell": "shell", "dotenv": "dotenv", "conf": "conf"}
    if format_ is not None and format_ not in formats:
        raise UsageError(f"--format {format_}: choose {', '.join(formats)}")
    path = Path(name)
    text = _text(name, path)
    kind = formats[format_] if format_ else guess_format(path)
    if kind == "shell":
        where = replace(
            where,
            nodes=where.nodes or node_count(text),
            uses=where.uses | features(text),
        )
    return Settings(parse(text, kind, path)), where


def _text(name: str, path: Path) -> str:
    import sys

    if name == "-":
        return sys.stdin.read()
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(f"{name}: cannot be read: {error.strerror}") from None


def _environment(
    refs: list[str] | None, where: Circumstances
) -> tuple[Settings, Circumstances, str]:
    """This environment, or what a profile makes of it, with NCCL's configuration files."""
    import os
    from dataclasses import replace

    from ncclops.env import gpu_count
    from ncclops.env.host import describe_host
    from ncclops.env.lint import of_environment
    from ncclops.env.sources import from_files

    environ, name = dict(os.environ), "environment"
    if refs:
        from ncclops.cli.env import resolve_profile

        profile = resolve_profile(refs)
        name = f"profile {profile.name}"
        where = under_profile(profile, where)
        environ = _planned(profile, environ, where)
    for setting in from_files(environ).values():
        environ[setting.name] = setting.value
    where = replace(where, host=describe_host(environ), gpus=gpu_count() > 0)
    return of_environment(environ), where, name


def under_profile(profile: Profile, where: Circumstances) -> Circumstances:
    """``where`` with what a profile says: nodes, timeouts, suppressions."""
    from dataclasses import replace

    lanes: dict[str, Literal["one", "many"]] = {"one": "one", "many": "many"}
    return replace(
        where,
        restart=where.restart or "in-process",
        nodes=where.nodes or lanes.get(profile.nodes),
        group_timeout=profile.timeouts.process_group,
        ignore=profile.suppress,
    )


def _planned(profile: Profile, environ: dict[str, str], where: Circumstances) -> dict[str, str]:
    from ncclops.env import Overrides, PlanContext, compute_plan

    context = PlanContext(restart=where.restart or "in-process", torch=where.torch)
    plan = compute_plan(profile, environ, Overrides(), context)
    return plan.apply(environ, {"run_dir": "/run-dir", "rank_dir": "/run-dir/ranks/0"})


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
