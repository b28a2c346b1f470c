"""`launch --preflight host`: this node is checked before anything of the run exists."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

from ncclops.errors import PreflightRefused
from ncclops.launch.prepared import Prepared
from ncclops.preflight import hand_over, table
from ncclops.preflight.model import NodeReport, Status
from ncclops.preflight.node import check_node
from ncclops.profiles.model import RUN_PLACEHOLDERS, PreflightNeeds


def require_fit_node(
    prepared: Prepared, *, say: Callable[[str], None], note: Callable[[str], None]
) -> None:
    """Check this node, if that was asked for. Takes a few seconds, and nothing that hangs holds it.

    Judged by what the lane needs, in the environment that the workers will have, so that
    ``NCCL_IB_HCA`` of a profile counts. ``say`` gets the table where a check fails, ``note`` the
    warnings. Raises ``PreflightRefused``.
    """
    request = prepared.request
    if request.preflight == "off":
        return
    environ = prepared.plan.apply(os.environ, dict.fromkeys(RUN_PLACEHOLDERS, ""))
    place = request.run_dir or request.log_dir or "runs"
    report = check_node(needs_of(prepared), environ=environ, spaces=[str(place)])
    judge(report, say=say, note=note)


def needs_of(prepared: Prepared) -> PreflightNeeds:
    """What the profile says, and what this job is: of one node, or of several."""
    several = prepared.layout.nodes.count > 1
    return replace(prepared.request.profile.preflight, nodes="many" if several else "one")


def judge(report: NodeReport, *, say: Callable[[str], None], note: Callable[[str], None]) -> None:
    """Refuse a node with a check that fails. Raises ``PreflightRefused``."""
    head, *rows = table.lines(report)
    if report.status is not Status.FAIL:
        for line in (f"preflight: {head}", *rows):
            note(line)
        return
    for line in (head, *rows):
        say(line)
    why = hand_over.reason(report.findings).removeprefix("ncclops: ")
    raise PreflightRefused(
        f"preflight: this node is not fit for the job: {why}; mend it, or leave the host out;"
        " --preflight off starts all the same"
    )
