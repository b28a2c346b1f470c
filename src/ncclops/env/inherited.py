"""What is told of the workers' variables at a launch: errors that lint finds, names that nothing
reads and that look like one that is read, and what the shell has left on (``NCCL_DEBUG=INFO``).

What was left on is what a lint rule marks ``at_launch``. What the command line or the profile says
is chosen, and no remnant; an error or a misspelt name is one wherever it stands, unless ``--keep``
names it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ncclops.env.catalogue import nearest_names
from ncclops.env.lint import LintFinding, lint, of_environment
from ncclops.env.lint.model import Circumstances, under_profile
from ncclops.env.lint.rules import rules
from ncclops.env.origins import from_files
from ncclops.env.plan import COMMAND_LINE, Plan, PlanContext
from ncclops.profiles.model import Profile


def left_on(
    plan: Plan, profile: Profile, environ: Mapping[str, str], context: PlanContext
) -> dict[str, LintFinding]:
    """``NAME=VALUE`` of what is inherited and left as it is, with what is to be said about it."""
    where = Circumstances(restart=context.restart, torch=context.torch)
    return _left_on(plan, profile, *_linted(plan, profile, environ, where))


def lines_at_launch(
    plan: Plan, profile: Profile, environ: Mapping[str, str], where: Circumstances
) -> list[str]:
    """What a launch under ``where`` says about the variables of its workers: a line for each error
    and each misspelt name, and one for all that was left on."""
    after, findings = _linted(plan, profile, environ, where)
    kept = {row.name for row in plan.changes if row.action == "keep" and row.source == COMMAND_LINE}
    # What is wrong with the value of a variable that nothing reads does no harm.
    passed_over = kept.union(*(found.names for found in findings if found.rule == "unread"))
    wrong = [found for found in findings if passed_over.isdisjoint(found.names)]
    # What is wrong because nothing is set is the profile's matter. Without GPUs NCCL is not used.
    told = {name for name in after if where.gpus is not False or "NCCL" not in name}
    lines = [_wrong(it) for it in wrong if it.level == "error" and not told.isdisjoint(it.names)]
    lines += [_misspelt(found) for found in wrong if _looks_misspelt(found)]
    line = in_a_line(_left_on(plan, profile, after, findings))
    return [*lines, *([line] if line else [])]


def _linted(
    plan: Plan, profile: Profile, environ: Mapping[str, str], where: Circumstances
) -> tuple[dict[str, str], list[LintFinding]]:
    workers = plan.without_run(environ)
    files = {name: found.value for name, found in from_files(workers).items()}
    after = files | workers
    return after, lint(of_environment(after), under_profile(profile, where))


def _wrong(finding: LintFinding) -> str:
    text = "; ".join(filter(None, [finding.message.rstrip("."), finding.remedy]))
    return f"{text} (`ncclops env lint`: {finding.rule})"


def _looks_misspelt(finding: LintFinding) -> bool:
    """Without a name that is like it, it may be one of a site's own, and no mistake."""
    return finding.rule == "unknown-name" and any(map(nearest_names, finding.names))


def _misspelt(finding: LintFinding) -> str:
    return f"{finding.message}; {finding.remedy} (`ncclops env lint` checks the others)"


def _left_on(
    plan: Plan, profile: Profile, after: Mapping[str, str], findings: Iterable[LintFinding]
) -> dict[str, LintFinding]:
    rows = plan.changes
    chosen = {row.name for row in rows if row.action != "keep" or row.source == COMMAND_LINE}
    chosen |= {
        name
        for name, entries in profile.env.items()
        if any(entry.action == "set" for entry in entries)
    }
    told = {rule.id for rule in rules() if rule.at_launch}
    return {
        f"{name}={after[name]}": finding
        for finding in findings
        if finding.rule in told
        for name in finding.names
        if name in after and name not in chosen
    }


def in_a_line(found: Mapping[str, LintFinding]) -> str | None:
    """What is said at a launch; None where nothing is left on."""
    if not found:
        return None
    return (
        f"inherited by the workers: {', '.join(found)} (`ncclops env diff` says what that does;"
        " --unset NAME removes it, --keep NAME keeps it without this line)"
    )
