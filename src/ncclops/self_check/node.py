"""All findings of the self-check on this machine."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from functools import cache
from pathlib import Path

import msgspec

from ncclops.host.gpus import find_gpus
from ncclops.host.software import installed_torch
from ncclops.preflight.catalogue import Check, checks_of
from ncclops.preflight.model import Finding, NodeReport, Status
from ncclops.preflight.node import check_node
from ncclops.preflight.site_checks import concerning, standing_checks
from ncclops.profiles.model import PreflightNeeds
from ncclops.self_check import checks, job

SCHEMA = "ncclops.self-check/1"
# Counters of ports are watched for so long: errors that go on show, and nobody waits for it.
_WINDOW = timedelta(seconds=1)
# Of preflight's checks, what a job on any machine needs.
_ALWAYS_SHOWN = frozenset({"host.shm"})


@cache
def own_checks() -> Mapping[str, Check]:
    """The checks that preflight does not have, by id."""
    return checks_of("ncclops.self_check")


def always_shown() -> frozenset[str]:
    """The checks whose findings are shown also where all is well."""
    return _ALWAYS_SHOWN | own_checks().keys()


def self_check(log_dir: Path, *, environ: Mapping[str, str] = os.environ) -> NodeReport:
    """Try what works here; some ten seconds. ``log_dir`` is where runs are to be recorded.

    Starts processes, writes into ``log_dir`` and the directory for temporary files, and leaves
    nothing unless the job fails. Any thread. Raises ``UsageError`` for a check of a site
    that is wrong.
    """
    began = time.monotonic()
    site = concerning(standing_checks(), ())
    of_node = check_node(PreflightNeeds(), environ=environ, window=_WINDOW, site=site)
    findings = (*_own(log_dir, environ), *of_node.findings)
    report = msgspec.structs.replace(of_node, findings=findings)
    return report.named(report.host, time.monotonic() - began)


def _own(log_dir: Path, environ: Mapping[str, str]) -> Iterator[Finding]:
    known, gpus = own_checks(), find_gpus()
    yield from checks.python(known["self.python"])
    yield from checks.torch(known["self.torch"])
    yield from checks.nccl(known["self.nccl"], gpus, environ)
    yield from checks.gpus(known["self.gpus"], gpus)
    yield from checks.run_dir(known["self.run-dir"], log_dir)
    network = (
        *checks.interfaces(known["self.interfaces"]),
        *checks.ports(known["self.ports"]),
    )
    yield from network
    if installed_torch() is None:
        yield known["self.restart"].unknown("2 ranks", "not tried: torch is not there")
    elif any(finding.status is Status.FAIL for finding in network):
        yield known["self.restart"].unknown("2 ranks", "not tried: the network does not work")
    else:
        yield from job.restarts(known["self.restart"], environ)
