"""``ncclops preflight`` over several hosts: the options that say where they meet, and the table."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ncclops.cli._output import note

if TYPE_CHECKING:
    from ncclops.preflight.edges.model import Facts, Verdict
    from ncclops.preflight.edges.run import Where
    from ncclops.preflight.model import NodeReport
    from ncclops.schedulers.node_options import NodeOptions

# As for a node's: what is longer is cut by many of Slurm's tools.
_MOST_REASON = 200
PANEL = "Several hosts (as for launch)"
NnodesOption = Annotated[
    str | None,
    typer.Option(
        metavar="N[:M]",
        rich_help_panel=PANEL,
        help="Number of hosts: each runs this command. Default: 1, or the Slurm step's.",
    ),
]
NodeRankOption = Annotated[
    int | None,
    typer.Option(min=0, metavar="I", rich_help_panel=PANEL, help="This host's place, from 0."),
]
EndpointOption = Annotated[
    str | None,
    typer.Option(
        metavar="HOST[:PORT]",
        rich_help_panel=PANEL,
        help="Where they meet: a host, which then serves the store, or a store elsewhere.",
    ),
]
IdOption = Annotated[
    str | None,
    typer.Option(metavar="ID", rich_help_panel=PANEL, help="The meeting's name in that store."),
]
ConfOption = Annotated[
    str | None,
    typer.Option(
        metavar="K=V,…",
        rich_help_panel=PANEL,
        help="join_timeout: how long to wait for all hosts, in seconds; here 60. is_host.",
    ),
]
MasterAddrOption = Annotated[
    str | None,
    typer.Option(metavar="ADDR", rich_help_panel=PANEL, help="The first host's address (static)."),
]
MasterPortOption = Annotated[
    int | None,
    typer.Option(min=1, max=65535, metavar="PORT", rich_help_panel=PANEL, help="Its port."),
]


def where(options: NodeOptions) -> tuple[Where, float] | None:
    """Where the hosts meet, and how long they wait for each other; None for a single host.

    What the options leave open a scheduler's variables say. Raises ``UsageError``.
    """
    from ncclops.launch.launch_config import place
    from ncclops.preflight.edges.run import Limits, Where

    placed = place(options)
    for remark in placed.remarks:
        note(remark)
    config = placed.rendezvous
    if config is None:
        return None
    serves = config.pace.hosts_store
    if serves is None and config.rank is not None and not config.external:
        serves = config.rank == 0
    met = Where(
        host=config.host,
        port=config.port,
        count=config.most,
        least=config.active,
        job_id=config.job_id,
        rank=config.rank,
        external=config.external,
        serves=serves,
        expected=config.expected,
    )
    asked = options.rdzv_conf is not None and "timeout" in options.rdzv_conf
    return met, config.pace.join.total_seconds() if asked else Limits().join


def try_edges(met: Where, join_s: float, report: NodeReport) -> Verdict:
    """The verdict on all hosts and the edges between them, the same on each.

    Raises ``PreflightRefused`` where this host could not take part.
    """
    from ncclops.preflight.edges.run import Limits, run
    from ncclops.preflight.model import Status

    found = tuple(report.of(Status.FAIL, Status.WARN))
    return run(met, limits=Limits(join=join_s), name=report.host, findings=found, note=note)


def lines(verdict: Verdict) -> list[str]:
    """The hosts with what is wrong on them, the edges as a picture, and the causes."""
    from ncclops.preflight.edges.sentences import LEGEND, summary, tell

    shown = [f"edges: {summary(verdict)} ({verdict.seconds:.0f} s)"]
    width = max((len(each.name) for each in verdict.hosts), default=4)
    wrong = any(set(row) - set("-.") for row in verdict.matrix)
    shown += [
        f"  {host.name.ljust(width)}  {row}"
        for host, row in zip(verdict.hosts, verdict.matrix, strict=False)
        if wrong
    ]
    shown += [f"  {LEGEND}"] if wrong else []
    for told in tell(verdict):
        evidence = f" ({told.evidence})" if told.evidence else ""
        shown += [f"{told.severity}  {told.kind}  {told.what}{evidence}"]
        shown += [f"{' ' * len(told.severity)}  -> {told.remedy}"]
    for host in verdict.hosts:
        grave = [each for each in host.findings if each.status == "FAIL"]
        shown += [f"FAIL  {host.name}  {each.check} {each.subject}: {each.read}" for each in grave]
    return shown


def document(verdict: Verdict) -> dict[str, Any]:
    """``edges`` in the document of ``ncclops preflight --json``."""
    import msgspec

    from ncclops.preflight.edges.sentences import tell

    built: dict[str, Any] = msgspec.to_builtins(verdict, str_keys=True)
    built["failed"] = failed(verdict)
    built["excluded"] = verdict.excluded
    for cause, told in zip(built["causes"], tell(verdict), strict=True):
        cause["a"] = [verdict.hosts[each].name for each in cause["a"]]
        cause["b"] = [verdict.hosts[each].name for each in cause["b"]]
        cause["hosts"] = [verdict.hosts[each].name for each in cause["hosts"]]
        cause |= {"what": told.what, "evidence": told.evidence, "remedy": told.remedy}
    built["at"] = time.time()
    return built


def reason(verdict: Verdict) -> str:
    """One line that says why; empty where nothing fails."""
    from ncclops.preflight.edges.sentences import reason as first

    text = first(verdict)
    room = _MOST_REASON - len("ncclops: ")
    return f"ncclops: {text if len(text) <= room else text[: room - 1] + '…'}" if text else ""


def failed(verdict: Verdict, *, strict: bool = False) -> bool:
    """Whether an edge or any host is unfit. ``strict``: a warning counts as well."""
    warned = strict and any(each.severity == "WARN" for each in verdict.causes)
    return verdict.failed or warned or any(_unfit(host, strict=strict) for host in verdict.hosts)


def _unfit(host: Facts, *, strict: bool) -> bool:
    return any(each.status == "FAIL" or strict for each in host.findings)


def convicted(verdict: Verdict, *, strict: bool = False) -> dict[str, bool]:
    """Every host by name, and whether a scheduler should leave it out."""
    bad = set(verdict.excluded)
    bad |= {host.name for host in verdict.hosts if _unfit(host, strict=strict)}
    named = [each for each in verdict.missing if not each.startswith("rank ")]
    return {host.name: host.name in bad for host in verdict.hosts} | dict.fromkeys(named, True)
