"""The safe repairs of a file: those whose finding is then gone, and that bring no other error."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Callable, Sequence

from ncclops.env.lint.model import LintFinding

Judge = Callable[[str], Sequence[LintFinding]]


def repaired(text: str, judge: Judge) -> str:
    """``text`` with its safe repairs; ``judge`` gives the findings of a text.

    A repair is safe where what is wrong stands exactly once in its line, and where the findings
    afterwards are those of before without the one that it mends.
    """
    findings = judge(text)
    candidate = text
    for finding in findings:
        candidate = _with(candidate, finding) or candidate
    if candidate == text:
        return text
    if _is_better(findings, judge(candidate)):
        return candidate
    # together they do not fit: each by itself
    for finding in findings[:_MOST_TRIED]:
        changed = _with(text, finding)
        if changed is not None:
            after = judge(changed)
            if _is_better(findings, after):
                text, findings = changed, after
    return text


# Findings that are tried one by one; a file with more of them is mended in several runs.
_MOST_TRIED = 50


def difference(before: str, after: str, name: str) -> str:
    """What was changed, as a unified diff."""
    rows = difflib.unified_diff(
        before.splitlines(keepends=True),
        after.splitlines(keepends=True),
        name,
        f"{name} (repaired)",
    )
    return "".join(row if row.endswith("\n") else f"{row}\n" for row in rows)


def _with(text: str, finding: LintFinding) -> str | None:
    """``text`` with the repair of ``finding``; None where there is none, or its place not clear."""
    if finding.repair is None or not finding.line:
        return None
    wrong, right = finding.repair
    lines = text.splitlines(keepends=True)
    if finding.line > len(lines):
        return None
    line = lines[finding.line - 1]
    before = r"(?<![\w])" if wrong[:1].isalnum() or wrong[:1] == "_" else ""
    after = r"(?![\w])" if wrong[-1:].isalnum() or wrong[-1:] == "_" else ""
    places = list(re.finditer(before + re.escape(wrong) + after, line))
    if finding.rule == "bad-value":
        # the value behind its own name, not one that looks the same elsewhere
        name = re.escape(finding.names[0])
        own = [place for place in places if re.search(rf"{name}\b", line[: place.start()])]
        places = own or (places if "value" in line else [])
    if len(places) != 1:
        return None
    (place,) = places
    lines[finding.line - 1] = line[: place.start()] + right + line[place.end() :]
    return "".join(lines)


def _is_better(before: Sequence[LintFinding], after: Sequence[LintFinding]) -> bool:
    """Fewer findings to repair, and no error or warning that was not there."""

    def serious(findings: Sequence[LintFinding]) -> Counter[tuple[str, tuple[str, ...]]]:
        return Counter((f.rule, f.names) for f in findings if f.level != "note")

    mended = sum(f.repair is not None for f in after) < sum(f.repair is not None for f in before)
    return mended and not serious(after) - serious(before)
