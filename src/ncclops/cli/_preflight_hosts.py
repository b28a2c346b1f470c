"""``ncclops preflight`` over several hosts: the options that say where they meet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ncclops.cli._output import note

if TYPE_CHECKING:
    from ncclops.preflight.edges.model import Offer, Verdict
    from ncclops.preflight.edges.run import Where
    from ncclops.preflight.model import NodeReport
    from ncclops.schedulers.node_options import NodeOptions

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


def try_edges(
    met: Where, join_s: float, report: NodeReport, offer: Offer | None, *, collectives: bool
) -> Verdict:
    """The verdict on all hosts and the edges between them, the same on each.

    ``offer`` is what this one has for a collective with another; with ``collectives`` each has run
    one of its own before, so they wait longer for each other.

    Raises ``PreflightRefused`` where this host could not take part.
    """
    import os

    from ncclops.preflight import pairs
    from ncclops.preflight.edges.run import Limits, run
    from ncclops.preflight.machine import collective
    from ncclops.preflight.model import Status

    found = tuple(report.of(Status.FAIL, Status.WARN))
    limits = Limits(join=join_s + (collective.LIMIT.total_seconds() if collectives else 0.0))
    return run(
        met,
        limits=limits,
        name=report.host,
        findings=found,
        offer=offer,
        traits=report.traits,
        then=pairs.Pairs(pairs.measure(os.environ), note),
        note=note,
    )
