"""The findings of preflight for people: what is wrong first, each with its remedy."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ncclops.preflight.model import Finding, NodeReport, Status

_GRAVEST_FIRST = (Status.FAIL, Status.WARN, Status.CANNOT_TELL, Status.OK)


def lines(
    report: NodeReport, *, everything: bool = False, always: Collection[str] = ()
) -> list[str]:
    """The table of one node; with ``everything`` also what is well and what cannot be told.

    Of the checks ``always`` that is shown in any case.
    """
    grave = (Status.FAIL, Status.WARN)
    found = [
        each
        for status in _GRAVEST_FIRST
        for each in report.of(status)
        if everything or status in grave or each.check in always
    ]
    hidden = len(report.findings) - len(found)
    more = f"; {hidden} not shown (--all)" if hidden else ""
    return [_headline(report) + more, *_table(found)]


def _headline(report: NodeReport) -> str:
    counts = [(len(report.of(status)), str(status)) for status in _GRAVEST_FIRST]
    said = ", ".join(f"{count} {status}" for count, status in counts if count)
    took = "" if report.seconds is None else f" ({report.seconds:.1f} s)"
    return f"host {report.host}: {said or 'nothing to check'}{took}"


def _table(found: Sequence[Finding]) -> list[str]:
    cells = [(str(each.status), each.check, each.subject) for each in found]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)] if cells else []
    rows = []
    for each, texts in zip(found, cells, strict=True):
        start = "  ".join(text.ljust(width) for text, width in zip(texts, widths, strict=True))
        rows.append(f"{start}  {each.read} (wanted: {each.wanted})")
        if each.remedy:
            rows.append(f"{' ' * len(str(each.status))}  -> {each.remedy}")
    return rows
