"""`launch --preflight`: this node is checked before anything of the run exists, and again before an
attempt that follows its failure. The edges between nodes are checked by `cluster.node_checks`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import msgspec

from ncclops.agent.fitness import Fitness
from ncclops.errors import NodeUnfit
from ncclops.launch.prepared import Prepared
from ncclops.preflight import hand_over, table
from ncclops.preflight.model import NodeReport, Status
from ncclops.preflight.node import check_node
from ncclops.preflight.part import NodeCheck
from ncclops.preflight.site_checks import concerning, standing_checks
from ncclops.profiles.model import PreflightNeeds
from ncclops.record.documents import encode, write_whole
from ncclops.record.events import PreflightEvent
from ncclops.record.run_directory import RunDirectory


def require_fit_node(
    prepared: Prepared, *, say: Callable[[str], None], note: Callable[[str], None]
) -> NodeCheck:
    """Check this node, as was asked for. Takes a few seconds, with a collective up to two minutes
    more, and nothing that hangs holds it.

    Judged by what the lane needs, in the environment that the workers will have, so that
    ``NCCL_IB_HCA`` of a profile counts. ``say`` gets the table where a check fails, ``note`` the
    warnings. Raises ``NodeUnfit``; not where all nodes are checked together later, which
    then learn it from each other. Raises ``UsageError`` for a site's check that is wrong.
    """
    check = how(prepared)
    report = check_node(
        check.needs,
        environ=check.environ,
        spaces=check.spaces,
        collectives=check.collectives,
        site=check.site,
    )
    check = msgspec.structs.replace(check, report=report)
    judge(report, say=say, note=note, refuses=not check.edges)
    return check


def record(run: RunDirectory, check: NodeCheck) -> None:
    """Write down what the node has been found to be. Raises ``OSError``."""
    if (report := check.report) is None:
        return
    failed = report.status is Status.FAIL
    run.add(PreflightEvent(attempt=0, failed=failed, hosts=[report.host] if failed else []))
    write_whole(run.paths.preflight, encode(hand_over.document([report])))


def how(prepared: Prepared) -> NodeCheck:
    """How this node is checked; not done yet. Raises ``UsageError``."""
    request = prepared.request
    environ = prepared.plan.without_run(os.environ)
    place = request.run_dir or request.log_dir or "runs"
    return NodeCheck(
        edges=request.preflight == "full" and prepared.layout.nodes.count > 1,
        collectives=request.collectives,
        needs=needs_of(prepared),
        environ=dict(environ),
        spaces=(str(place),),
        site=concerning(standing_checks(), request.profile.sources),
    )


def again(check: NodeCheck) -> Fitness:
    """The node, which has failed since it was checked. Takes a few seconds; any thread."""
    report = check_node(check.needs, environ=check.environ, spaces=check.spaces, site=check.site)
    head, *rows = table.lines(report)
    why = refusal(report) if report.status is Status.FAIL else None
    return Fitness(lines=[f"preflight: {head}", *rows], refusal=why)


def needs_of(prepared: Prepared) -> PreflightNeeds:
    """What the profile says, and what this job is: of one node, or of several."""
    several = prepared.layout.nodes.count > 1
    return replace(prepared.request.profile.preflight, nodes="many" if several else "one")


def judge(
    report: NodeReport,
    *,
    say: Callable[[str], None],
    note: Callable[[str], None],
    refuses: bool = True,
) -> None:
    """Show a node's table; with ``refuses``, raise ``NodeUnfit`` if a check fails."""
    head, *rows = table.lines(report)
    if report.status is not Status.FAIL:
        for line in (f"preflight: {head}", *rows):
            note(line)
        return
    for line in (head, *rows):
        say(line)
    if refuses:
        raise NodeUnfit(refusal(report))


def refusal(report: NodeReport) -> str:
    """Why the node cannot take part, and what to do, in a line."""
    why = hand_over.reason(report.findings).removeprefix("ncclops: ")
    return (
        f"preflight: this node is not fit for the job: {why}; mend it, or leave the host out;"
        " --preflight off starts all the same"
    )
