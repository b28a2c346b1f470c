"""``ncclops preflight``: is this node fit for the job, and are the edges between several?"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ncclops.cli import _preflight_hosts as several
from ncclops.cli._options import CheckExitCodeOption, JsonOption, ParamOption, profile_option
from ncclops.cli._output import echo, note, print_json
from ncclops.errors import PreflightRefused, UsageError
from ncclops.nearest import meant

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    from ncclops.preflight.edges.model import Verdict
    from ncclops.preflight.model import NodeReport
    from ncclops.preflight.site_checks import SiteCheck
    from ncclops.profiles.model import PreflightNeeds

_NODE = "What is checked"
_HANDED_OVER = "For schedulers and monitoring"


def preflight(
    profile: Annotated[
        list[str] | None,
        profile_option(
            "Judge by what this lane needs ([preflight]). Default: by what the node has.", _NODE
        ),
    ] = None,
    param: ParamOption = None,
    path: Annotated[
        list[str] | None,
        typer.Option(
            "--path",
            metavar="DIR",
            rich_help_panel=_NODE,
            help="A directory that needs space, such as that of checkpoints; may be repeated.",
        ),
    ] = None,
    skip: Annotated[
        list[str] | None,
        typer.Option(
            "--skip", metavar="CHECK", rich_help_panel=_NODE, help="Leave this check out."
        ),
    ] = None,
    window: Annotated[
        str,
        typer.Option(
            "--window",
            metavar="TIME",
            rich_help_panel=_NODE,
            help="How long counters of network ports are watched.",
        ),
    ] = "2s",
    limit: Annotated[
        str,
        typer.Option(
            "--limit",
            metavar="TIME",
            rich_help_panel=_NODE,
            help="How long a GPU, a port or a disk may take to answer.",
        ),
    ] = "15s",
    root: Annotated[
        Path,
        typer.Option(
            "--root",
            metavar="DIR",
            rich_help_panel=_NODE,
            help="Read /proc, /sys, /dev, /etc and /var/log below DIR, such as a host's in /host.",
        ),
    ] = Path("/"),
    collectives: Annotated[
        bool,
        typer.Option(
            "--collectives",
            rich_help_panel=_NODE,
            help="Run a short all_reduce as well, between this node's GPUs and between pairs of"
            " hosts: a minute or two, with torch.",
        ),
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html",
            metavar="FILE",
            rich_help_panel=_HANDED_OVER,
            help="Write a page: hosts against checks, a picture of the edges, what to do.",
        ),
    ] = None,
    exclude_file: Annotated[
        Path | None,
        typer.Option(
            "--exclude-file",
            metavar="FILE",
            rich_help_panel=_HANDED_OVER,
            help="Add this host to FILE if it fails, take it out if not (sbatch --exclude=FILE).",
        ),
    ] = None,
    node_name: Annotated[
        str | None,
        typer.Option(
            "--node-name",
            metavar="NAME",
            rich_help_panel=_HANDED_OVER,
            help="What the scheduler calls this host. Default: SLURMD_NODENAME or NODE_NAME, else"
            " the host's name.",
        ),
    ] = None,
    reason: Annotated[
        bool,
        typer.Option(
            "--reason",
            rich_help_panel=_HANDED_OVER,
            help="Print one line that says why the node fails, and nothing if it does not.",
        ),
    ] = False,
    prometheus: Annotated[
        bool,
        typer.Option(
            "--prometheus",
            rich_help_panel=_HANDED_OVER,
            help="Print Prometheus' text format.",
        ),
    ] = False,
    strict: Annotated[
        bool,
        typer.Option("--strict", rich_help_panel=_HANDED_OVER, help="A warning fails as well."),
    ] = False,
    nnodes: several.NnodesOption = None,
    node_rank: several.NodeRankOption = None,
    rdzv_endpoint: several.EndpointOption = None,
    rdzv_id: several.IdOption = None,
    rdzv_conf: several.ConfOption = None,
    master_addr: several.MasterAddrOption = None,
    master_port: several.MasterPortOption = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Show also what is well and what cannot be told.")
    ] = False,
    exit_code: CheckExitCodeOption = True,
    as_json: JsonOption = False,
) -> None:
    """Check this node's GPUs, network ports and settings before a job starts.

    On several hosts (srun ncclops preflight) the edges between them as well. Exits with 3 when
    a check fails. Nothing is changed, and whatever does not answer is given up.
    """
    from ncclops.preflight import hand_over, pairs
    from ncclops.preflight.edges import shown
    from ncclops.preflight.model import Status
    from ncclops.schedulers.node_options import NodeOptions

    if sum((as_json, reason, prometheus)) > 1:
        raise UsageError("--json, --reason and --prometheus each print one thing: give one")
    options = NodeOptions(
        nnodes=nnodes,
        node_rank=node_rank,
        rdzv_endpoint=rdzv_endpoint,
        rdzv_id=rdzv_id,
        rdzv_conf=rdzv_conf,
        master_addr=master_addr,
        master_port=master_port,
    )
    met = several.where(options)
    needs, site = _needs(profile, param, skip)
    if collectives and root != Path("/"):
        raise UsageError("--collectives uses the GPUs of this machine: it takes no --root")
    report = _report(
        needs,
        root,
        path or [],
        _time("--window", window),
        _limit(limit),
        node_name,
        collectives=collectives,
        site=site,
    )
    bad = (Status.FAIL, Status.WARN) if strict else (Status.FAIL,)
    convicted = {report.host: report.status in bad}
    offer = pairs.offer(report, os.environ, needs) if met and collectives else None
    verdict = None
    if met is not None:
        verdict = several.try_edges(*met, report, offer, collectives=collectives)
    failed = report.status in bad
    if verdict is not None:
        convicted |= shown.convicted(verdict, strict=strict)
        failed = failed or shown.failed(verdict, strict=strict)
    if exclude_file is not None:
        try:
            hand_over.update_exclude_file(exclude_file, convicted)
        except OSError as error:
            raise UsageError(
                f"--exclude-file {exclude_file}: {error.strerror}: name a file that can be written"
            ) from None
    if html is not None:
        _write_page(html, report, verdict)
    if as_json:
        print_json(hand_over.document([report], verdict))
    elif prometheus:
        echo(hand_over.prometheus([report]).decode(), newline=False)
    elif reason:
        line = hand_over.reason(report.findings, strict=strict)
        if not line and verdict is not None:
            line = shown.reason(verdict)
        if line:
            echo(line)
    else:
        from ncclops.preflight.table import lines

        edges = [] if verdict is None else shown.lines(verdict)
        echo("\n".join([*lines(report, everything=everything), *edges]))
    if failed and exit_code:
        raise typer.Exit(PreflightRefused.exit_code)


def _write_page(path: Path, report: NodeReport, verdict: Verdict | None) -> None:
    from ncclops.preflight import hand_over
    from ncclops.record.preflight_record import PREFLIGHT
    from ncclops.record.regular_file import write_named
    from ncclops.report.page import render_preflight

    page = render_preflight(PREFLIGHT.parse(hand_over.document([report], verdict), path))
    try:
        write_named(path, page.encode(errors="backslashreplace"))
    except OSError as error:
        raise UsageError(
            f"--html {path}: {error.strerror}: name a file that can be written"
        ) from None
    note(f"{path}: open it in a browser")


def _needs(
    profile: list[str] | None, param: list[str] | None, skip: list[str] | None
) -> tuple[PreflightNeeds, Sequence[SiteCheck]]:
    from dataclasses import replace

    from ncclops.preflight.catalogue import catalogue
    from ncclops.preflight.site_checks import concerning, standing_checks
    from ncclops.profiles.model import PreflightNeeds

    needs, sources, site = PreflightNeeds(), tuple[str, ...](), standing_checks()
    if profile:
        from ncclops.env.request import resolve_profile
        from ncclops.profiles.parameters import parse_parameters

        found = resolve_profile(profile, parameters=parse_parameters(param), say=note)
        needs, sources = found.preflight, found.sources
    elif param:
        raise UsageError("--param sets a parameter of a profile: name it with --profile")
    known = {*catalogue(), *(check.id for check in site)}
    for name in (*needs.ignore, *(skip or ())):
        if name not in known:
            close = meant(name, known)
            hint = f"did you mean {close[0]}?" if close else "docs/preflight.md lists all"
            raise UsageError(f"there is no check {name!r}: {hint}")
    needs = replace(needs, ignore=(*needs.ignore, *(skip or ())))
    return needs, concerning(site, sources)


def _report(
    needs: PreflightNeeds,
    root: Path,
    paths: list[str],
    window: timedelta,
    limit: timedelta,
    name: str | None,
    *,
    collectives: bool,
    site: Sequence[SiteCheck],
) -> NodeReport:
    from ncclops.preflight.node import check_node

    if not root.is_dir():
        raise UsageError(f"--root {root}: there is no such directory")
    for path in paths:
        # The process that asks the file system is asked in JSON.
        if path.encode(errors="replace").decode() != path:
            raise UsageError(f"--path {path}: is no UTF-8: name a directory above it")
    began = time.monotonic()
    report = check_node(
        needs,
        root=root.resolve(),
        spaces=paths,
        window=window,
        limit=limit,
        collectives=collectives,
        site=site,
    )
    by_scheduler = os.environ.get("SLURMD_NODENAME") or os.environ.get("NODE_NAME")
    return report.named(name or by_scheduler or report.host, time.monotonic() - began)


def _time(option: str, text: str) -> timedelta:
    from ncclops.durations import parse_duration

    try:
        return parse_duration(text)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None


def _limit(text: str) -> timedelta:
    """As ``--limit`` has it: with less, what is healthy would be convicted of being late."""
    from datetime import timedelta

    limit = _time("--limit", text)
    if limit < timedelta(seconds=1):
        raise UsageError(f"--limit: at least 1s, not {text}")
    return limit
