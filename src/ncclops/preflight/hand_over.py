"""What others take over: JSON, one reason line, a file of hosts to leave out, Prometheus text."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ncclops.preflight.edges import shown
from ncclops.preflight.edges.model import Verdict
from ncclops.preflight.model import Finding, NodeReport, Status, worst

# Slurm shows a node's reason in one column of many tools, and cuts what is longer.
_MOST_REASON = 200
_NUMBERS = {Status.OK: 0, Status.CANNOT_TELL: 1, Status.WARN: 2, Status.FAIL: 3}


def document(reports: Sequence[NodeReport], verdict: Verdict | None = None) -> dict[str, Any]:
    """The document ``ncclops.preflight``: of these nodes, and with ``verdict`` of the edges."""
    made: dict[str, Any] = {
        "schema": "ncclops.preflight/1",
        "status": str(worst(report.status for report in reports)),
        "hosts": [report.to_json() for report in reports],
    }
    if verdict is not None:
        made["edges"] = shown.document(verdict)
        if shown.failed(verdict):
            made["status"] = str(Status.FAIL)
    return made


def reason(findings: Sequence[Finding], *, strict: bool = False) -> str:
    """One line that says why a node should not be used; empty where nothing speaks against it.

    ``strict``: a warning does too.
    """
    grave = (Status.FAIL, Status.WARN) if strict else (Status.FAIL,)
    found = [each for status in grave for each in findings if each.status is status]
    if not found:
        return ""
    first = found[0]
    more = f" (+{len(found) - 1} more)" if len(found) > 1 else ""
    text = f"{first.check} {first.subject}: {' '.join(first.read.split())}"
    room = _MOST_REASON - len("ncclops: ")
    others = dict.fromkeys(each.check for each in found if each.check != first.check)
    named = f"{more.removesuffix(')')}: {', '.join(others)})" if others else more
    more = named if len(text) + len(named) <= room else more
    room -= len(more)
    return f"ncclops: {text if len(text) <= room else text[: room - 1] + '…'}{more}"


def update_exclude_file(path: Path, convicted: Mapping[str, bool]) -> None:
    """Have ``path`` list, one a line, the hosts that are convicted, and no others of ``convicted``.

    What it lists besides stays. Several hosts may do this at once. Raises ``OSError``, also where
    it is no regular file.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    with os.fdopen(file, "r+", encoding="utf-8", errors="replace") as listed:
        fcntl.flock(listed, fcntl.LOCK_EX)
        before = dict.fromkeys(line.strip() for line in listed if line.strip())
        for host, is_bad in convicted.items():
            if is_bad:
                before.setdefault(host)
            else:
                before.pop(host, None)
        listed.seek(0)
        listed.truncate()
        listed.write("".join(f"{host}\n" for host in before))


def prometheus(reports: Iterable[NodeReport]) -> bytes:
    """The reports in Prometheus' text format, for a textfile collector."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(tuple(reports)))
    return generate_latest(registry)


class _Collector(Collector):
    def __init__(self, reports: Sequence[NodeReport]) -> None:
        self._reports = reports

    def collect(self) -> Iterator[Metric]:
        check = GaugeMetricFamily(
            "ncclops_preflight_check",
            "What a check came to: 0 OK, 1 cannot tell, 2 WARN, 3 FAIL",
            labels=("host", "check", "subject"),
        )
        node = GaugeMetricFamily(
            "ncclops_preflight_status", "The gravest of a host's checks", labels=("host",)
        )
        when = GaugeMetricFamily(
            "ncclops_preflight_timestamp_seconds", "When the host was checked", labels=("host",)
        )
        for report in self._reports:
            node.add_metric([report.host], _NUMBERS[report.status])
            when.add_metric([report.host], report.time)
            for (name, subject), number in _gravest(report).items():
                check.add_metric([report.host, name, subject], number)
        yield from (node, check, when)


def _gravest(report: NodeReport) -> dict[tuple[str, str], int]:
    """One number for each check and subject: a sample may be there once."""
    found: dict[tuple[str, str], int] = {}
    for each in report.findings:
        key = (each.check, each.subject)
        found[key] = max(found.get(key, 0), _NUMBERS[each.status])
    return found
