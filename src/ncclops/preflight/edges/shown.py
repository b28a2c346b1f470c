"""The verdict on hosts and edges as it is shown and handed over: a table, JSON, a reason, hosts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from ncclops.preflight.edges.model import Facts, Verdict
from ncclops.preflight.edges.sentences import LEGEND, summary, tell
from ncclops.preflight.edges.sentences import reason as first_reason

# As for a node's: what is longer is cut by many of Slurm's tools.
_MOST_REASON = 200
# Of the table of hosts against checks: rows, and columns of the terminal.
_ROWS, _WIDTH = 24, 110
_WORDS = {"F": "FAIL", "W": "WARN", "": "."}


def lines(verdict: Verdict) -> list[str]:
    """The hosts with what is wrong on them, the edges as a picture, and the causes."""
    shown = [f"edges: {summary(verdict)} ({verdict.seconds:.0f} s)"]
    width = max((len(each.name) for each in verdict.hosts), default=4)
    wrong = any(set(row) - set("-.") for row in verdict.matrix)
    shown += [
        f"  {host.name.ljust(width)}  {row}"
        for host, row in zip(verdict.hosts, verdict.matrix, strict=False)
        if wrong
    ]
    shown += [f"  {LEGEND}"] if wrong else []
    shown += _pairs(verdict)
    for told in tell(verdict):
        evidence = f" ({told.evidence})" if told.evidence else ""
        shown += [f"{told.severity}  {told.kind}  {told.what}{evidence}"]
        shown += [f"{' ' * len(told.severity)}  -> {told.remedy}"]
    return [*shown, *_hosts_against_checks(verdict.hosts), *_own_failures(verdict.hosts)]


def _pairs(verdict: Verdict) -> list[str]:
    """One line on the collectives of two hosts, where there were any."""
    if not verdict.pairs:
        return []
    well = [each for each in verdict.pairs if each.well]
    rates = sorted(each.gbps for each in well if each.gbps > 0)
    figures = f", {rates[0]:.3g} to {rates[-1]:.3g} GB/s" if rates else ""
    return [f"pairs: {len(well)} of {len(verdict.pairs)} all_reduces end well{figures}"]


def _hosts_against_checks(hosts: Sequence[Facts]) -> list[str]:
    """A row for each host that has found something in itself, a column for each such check."""
    found = {number: _worst(each) for number, each in enumerate(hosts)}
    rows = [number for number, each in found.items() if each]
    if not rows:
        return []
    # Checks that fail first, then those that most hosts name.
    every = [check for each in found.values() for check in each]
    failing = {check for each in found.values() for check, status in each.items() if status == "F"}
    checks = sorted({*every}, key=lambda each: (each not in failing, -every.count(each), each))
    name = max(len(hosts[each].name) for each in rows[:_ROWS])
    columns, width = list[str](), name
    for check in checks:
        if columns and width + len(check) + 2 > _WIDTH:
            break
        columns.append(check)
        width += len(check) + 2
    shown = [f"  {''.ljust(name)}  {'  '.join(columns)}"]
    for number in rows[:_ROWS]:
        words = (_WORDS[found[number].get(each, "")].ljust(len(each)) for each in columns)
        shown.append(f"  {hosts[number].name.ljust(name)}  {'  '.join(words)}".rstrip())
    rest = [
        f"{len(rows) - _ROWS} more hosts" if len(rows) > _ROWS else "",
        f"{len(checks) - len(columns)} more checks" if len(checks) > len(columns) else "",
    ]
    if any(rest):
        shown.append(f"  and {' and '.join(filter(None, rest))}: --json has all")
    return shown


def _worst(host: Facts) -> dict[str, str]:
    """F or W, by check."""
    made: dict[str, str] = {}
    for each in host.findings:
        if each.status == "FAIL" or each.check not in made:
            made[each.check] = each.status[0]
    return made


def _own_failures(hosts: Sequence[Facts]) -> list[str]:
    """What hosts have found in themselves, each remedy once."""
    shown, told = list[str](), set[str]()
    for host in hosts:
        for each in host.findings:
            if each.status != "FAIL":
                continue
            shown.append(f"FAIL  {host.name}  {each.check} {each.subject}: {each.read}")
            if each.remedy and each.check not in told:
                told.add(each.check)
                shown.append(f"      -> {each.remedy}")
    return shown


def document(verdict: Verdict) -> dict[str, Any]:
    """``edges`` in the document of ``ncclops preflight --json``."""
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
    text = first_reason(verdict)
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
