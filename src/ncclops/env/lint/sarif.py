"""Findings as SARIF 2.1.0, the format that code hosts show beside the lines of a change."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import PurePath
from typing import Any

from ncclops._version import __version__
from ncclops.env.lint.model import LintFinding

_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/os/schemas/sarif-schema-2.1.0.json"


def sarif(reports: Iterable[tuple[str, Sequence[LintFinding]]]) -> dict[str, Any]:
    """One run over ``reports``: the name of each file, and its findings."""
    reports = list(reports)
    ids = sorted({finding.rule for _, findings in reports for finding in findings})
    results = [
        _result(name, finding, ids.index(finding.rule))
        for name, findings in reports
        for finding in findings
    ]
    driver = {
        "name": "ncclops env lint",
        "version": __version__,
        "rules": [{"id": rule} for rule in ids],
    }
    return {
        "$schema": _SCHEMA,
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": results}],
    }


def _result(name: str, finding: LintFinding, rule: int) -> dict[str, Any]:
    text = "; ".join(filter(None, [finding.message.rstrip("."), finding.remedy]))
    uri = "stdin" if name == "-" else PurePath(name).as_posix()
    location: dict[str, Any] = {"artifactLocation": {"uri": _escaped(uri)}}
    if finding.line:
        location["region"] = {"startLine": finding.line}
    return {
        "ruleId": finding.rule,
        "ruleIndex": rule,
        "level": finding.level,
        "message": {"text": text},
        "locations": [{"physicalLocation": location}],
    }


def _escaped(path: str) -> str:
    from urllib.parse import quote

    return f"file://{quote(path)}" if path.startswith("/") else quote(path)
