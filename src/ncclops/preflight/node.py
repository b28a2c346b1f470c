"""One node, judged: every check of the catalogue on what was read of it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import msgspec

from ncclops.preflight.catalogue import catalogue
from ncclops.preflight.checks import (
    collective,
    gpu,
    gpu_use,
    host,
    nic,
    rails,
    room,
    software,
    xid,
)
from ncclops.preflight.checks.look import Rule
from ncclops.preflight.machine import commands, reading
from ncclops.preflight.machine.collective import measure
from ncclops.preflight.model import Finding, NodeReport
from ncclops.preflight.readings import Node
from ncclops.preflight.site_checks import ELSEWHERE, SiteCheck
from ncclops.preflight.traits import traits
from ncclops.profiles.model import PreflightNeeds
from ncclops.whole_numbers import whole_number

_MOST_GID_INDEX = 65_535

RULES: Mapping[str, Rule] = {
    **host.RULES,
    **room.RULES,
    **gpu.RULES,
    **gpu_use.RULES,
    **xid.RULES,
    **nic.RULES,
    **rails.RULES,
    **software.RULES,
    **collective.RULES,
}


def judge(node: Node) -> tuple[Finding, ...]:
    """What the checks find, in the order of the catalogue; pure."""
    return tuple(
        finding
        for check in catalogue().values()
        if check.id in RULES and check.id not in node.needs.ignore
        for finding in RULES[check.id](check, node)
    )


def check_node(
    needs: PreflightNeeds,
    *,
    root: Path = Path("/"),
    environ: Mapping[str, str] = os.environ,
    spaces: Sequence[str] = (),
    window: timedelta = reading.WINDOW,
    limit: timedelta = reading.LIMIT,
    collectives: bool = False,
    site: Sequence[SiteCheck] = (),
) -> NodeReport:
    """Read the machine below ``root`` and judge it. Takes ``window`` and some seconds.

    ``environ`` is the job's environment, for the variables of NCCL that say which devices it uses.
    Starts processes; any thread may call. Never waits longer than a few times ``limit``; for the
    checks ``site``, as long as the slowest may take more; with ``collectives``, an all_reduce
    between the GPUs of this machine, two minutes more.
    """
    node = read(needs, root=root, environ=environ, spaces=spaces, window=window, limit=limit)
    # After the readings, which would take a command that uses a GPU for a foreign process.
    of_site = _of_site([check for check in site if check.id not in needs.ignore], node)
    if collectives and node.real and node.gpus:
        measured = measure(node.gpus, node.environ)
        node = msgspec.structs.replace(node, collective=measured)
    return report(node, (*judge(node), *of_site))


def _of_site(checks: Sequence[SiteCheck], node: Node) -> tuple[Finding, ...]:
    # Below another root, which another machine's may be, a command would be about this one.
    ended = commands.run(checks, node.environ) if node.real else [ELSEWHERE] * len(checks)
    return tuple(check.judge(how) for check, how in zip(checks, ended, strict=True))


def read(
    needs: PreflightNeeds,
    *,
    root: Path,
    environ: Mapping[str, str],
    spaces: Sequence[str] = (),
    window: timedelta = reading.WINDOW,
    limit: timedelta = reading.LIMIT,
) -> Node:
    """All readings of the machine below ``root``, and what this installation is."""
    index = environ.get("NCCL_IB_GID_INDEX", "")
    node = reading.read_node(
        root,
        environ,
        spaces=spaces,
        window=window,
        limit=limit,
        gid_index=whole_number(index, _MOST_GID_INDEX),
    )
    return msgspec.structs.replace(node, needs=needs, environ=dict(environ))


def report(node: Node, findings: Sequence[Finding]) -> NodeReport:
    """``findings`` with whose they are."""
    return NodeReport(
        host=node.name.host or "unknown",
        time=node.time,
        findings=tuple(findings),
        boot_id=node.files.text("proc/sys/kernel/random/boot_id"),
        traits=traits(node),
    )
