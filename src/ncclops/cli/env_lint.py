"""``ncclops env lint``: what is misspelt, wrong, unread, or wrong in combination."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ncclops.cli._options import (
    RESTART_MODES,
    ExitCodeOption,
    JsonOption,
    ParamOption,
    RestartMode,
    one_of,
    profile_option,
    shown,
)
from ncclops.cli._output import echo, note, print_json, warn
from ncclops.errors import UsageError

if TYPE_CHECKING:
    from ncclops.env.lint import Circumstances, LintFinding

NodeCount = Literal["one", "many"]
_NODES = ("one", "many")
_FORMATS = (
    *("shell", "dotenv", "conf", "yaml", "dockerfile", "python", "notebook", "apptainer"),
    *("csh", "fish", "powershell", "batch", "make", "config"),
)
_FEATURES = ("fsdp2", "tensor-parallel", "ucc", "torchrun", "ras-polling")


def lint(
    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FILE|-]...",
            help="Shell and job scripts, .env files, NCCL configuration files, YAML, JSON,"
            " Dockerfiles, Python, notebooks, Apptainer definitions; - is standard input. Without"
            " one: this environment, with --profile what the profile makes of it.",
        ),
    ] = None,
    profile: Annotated[
        list[str] | None,
        profile_option("Lint the plan of a profile."),
    ] = None,
    param: ParamOption = None,
    restart: Annotated[
        RestartMode | None,
        typer.Option(
            "--restart",
            parser=one_of("--restart", RESTART_MODES),
            metavar=shown(RESTART_MODES),
            help="Judge for this mode; with --profile in-process by default.",
        ),
    ] = None,
    format_: Annotated[
        str | None,
        typer.Option(
            "--format",
            parser=one_of("--format", _FORMATS),
            metavar=shown(_FORMATS),
            help="What the files are. Default: by their names and contents.",
        ),
    ] = None,
    torch: Annotated[
        str | None, typer.Option(metavar="VERSION", help="Judge for this torch, not the one here.")
    ] = None,
    nccl: Annotated[
        str | None, typer.Option(metavar="VERSION", help="Judge for this NCCL, not the one here.")
    ] = None,
    nodes: Annotated[
        NodeCount | None,
        typer.Option(
            parser=one_of("--nodes", _NODES),
            metavar=shown(_NODES),
            help="Whether the job has several nodes.",
        ),
    ] = None,
    uses: Annotated[
        list[str] | None,
        typer.Option(
            "--uses",
            parser=one_of("--uses", _FEATURES),
            metavar=shown(_FEATURES),
            help="What the job uses; may be repeated.",
        ),
    ] = None,
    fix: Annotated[
        bool,
        typer.Option(
            "--fix", help="Make the safe repairs in the files, and show them; what is left is told."
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With --fix: show the repairs and write nothing.")
    ] = False,
    as_sarif: Annotated[
        bool, typer.Option("--sarif", help="Print the findings as SARIF 2.1.0, for code hosts.")
    ] = False,
    exit_code: ExitCodeOption = True,
    as_json: JsonOption = False,
) -> None:
    """Find variables that are misspelt, wrong, read by nothing, or wrong in combination.

    Exits with 1 when there is at least one error; with --fix, one that is left. With 2, once the
    findings in the others are told, when a file cannot be read.
    """
    where = _circumstances(restart, torch, nccl, nodes, uses, files)
    if files and profile:
        raise UsageError("lint either files or the plan of a profile, not both")
    if param and not profile:
        raise UsageError("--param sets a parameter of a profile: name it with --profile")
    if as_json and as_sarif:
        raise UsageError("--json and --sarif both want standard output: choose one")
    if dry_run and not fix:
        raise UsageError("--dry-run shows what --fix would do: say --fix too")
    if fix:
        _fix(files, format_, where, write=not dry_run, quiet=as_json or as_sarif)
    if files:
        reports, unread = _reports_on_files(files, format_, where)
    else:
        reports, unread = _reports(profile, param, where), {}
    if not reports:
        _raise_for(unread)
    if as_sarif:
        from ncclops.env.lint.sarif import sarif

        print_json(sarif(reports))
    elif as_json:
        print_json(_document(reports, list(unread)))
    else:
        _print(reports, complete=not unread)
    _raise_for(unread)
    if exit_code and any(
        finding.level == "error" for _, findings in reports for finding in findings
    ):
        raise typer.Exit(1)


def _circumstances(
    restart: RestartMode | None,
    torch: str | None,
    nccl: str | None,
    nodes: NodeCount | None,
    uses: list[str] | None,
    files: list[str] | None,
) -> Circumstances:
    from ncclops.env import installed_nccl, installed_torch
    from ncclops.env.lint import Circumstances
    from ncclops.versions import release

    for option, version in (("--torch", torch), ("--nccl", nccl)):
        try:
            release(version or "0")
        except ValueError as error:
            raise UsageError(f"{option}: {error}") from None
    return Circumstances(
        restart=restart,
        torch=torch or installed_torch(),
        nccl=nccl or installed_nccl(),
        nodes=nodes,
        uses=frozenset(uses or ()),
        assumed=frozenset(
            name for name, given in (("torch", torch), ("nccl", nccl)) if files and given is None
        ),
    )


def _reports_on_files(
    files: list[str], kind: str | None, where: Circumstances
) -> tuple[list[tuple[str, list[LintFinding]]], dict[str, UsageError]]:
    """What was found in each file that can be read, and why the others cannot."""
    from ncclops.env.lint import inputs, lint

    reports: list[tuple[str, list[LintFinding]]] = []
    unread: dict[str, UsageError] = {}
    for name in files:
        try:
            reports.append((name, lint(*inputs.of_file(name, kind, where))))
        except UsageError as error:
            unread[name] = error
    return reports, unread


def _raise_for(unread: dict[str, UsageError]) -> None:
    """One line for each file that could not be read; the last one ends the command."""
    *others, last = unread.values() or (None,)
    for error in others:
        warn(f"error: {error}")
    if last is not None:
        raise last


def _reports(
    refs: list[str] | None, param: list[str] | None, where: Circumstances
) -> list[tuple[str, list[LintFinding]]]:
    """What was linted, and what was found in it."""
    import os

    from ncclops.env.lint import inputs, lint

    environ = dict(os.environ)
    if not refs:
        return [("environment", lint(*inputs.of_environ(environ, where)))]
    from ncclops.env.request import resolve_profile
    from ncclops.profiles.parameters import parse_parameters

    profile = resolve_profile(refs, parameters=parse_parameters(param), say=note)
    found = lint(*inputs.of_profile(profile, environ, where))
    return [(f"profile {profile.name}", found)]


def _fix(
    files: list[str] | None, kind: str | None, where: Circumstances, *, write: bool, quiet: bool
) -> None:
    """Repair the files, and show how."""
    import os.path

    from ncclops.env.lint import inputs, lint
    from ncclops.env.lint.repairs import difference, repaired
    from ncclops.env.lint.rewriting import rewrite

    if not files or "-" in files:
        raise UsageError("--fix repairs files: name them")
    once = {os.path.realpath(name): name for name in reversed(files)}
    opened = [inputs.open_file(name, kind) for name in reversed(once.values())]
    for file in opened:
        if file.encoded(file.text) != file.raw:
            raise UsageError(
                f"{file.name}: is not repaired: it is not UTF-8 text; convert it (iconv -t UTF-8)"
            )
    for file in opened:

        def judge(text: str, file: inputs.LintedFile = file) -> list[LintFinding]:
            return lint(*file.settings(text, where))

        after = repaired(file.text, judge)
        if after == file.text:
            continue
        if not quiet:
            echo(difference(file.text, after, file.name).rstrip("\n"))
        if write:
            rewrite(file.name, file.raw, file.encoded(after))


def _document(reports: list[tuple[str, list[LintFinding]]], unread: list[str]) -> dict[str, Any]:
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
    document = {"schema": "ncclops.env-lint/1", **counts, "findings": findings}
    return document | ({"unread": unread} if unread else {})


def _print(reports: list[tuple[str, list[LintFinding]]], *, complete: bool) -> None:
    total = 0
    for name, findings in reports:
        for finding in findings:
            total += 1
            place = f"{name}:{finding.line}" if finding.line else name
            text = "; ".join(filter(None, [finding.message.rstrip("."), finding.remedy]))
            echo(f"{place}: {finding.level}: {text} [{finding.rule}]")
    if complete and not total:
        echo("nothing found")
