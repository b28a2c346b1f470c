"""What the shell has left on that reaches the workers, such as ``NCCL_DEBUG=INFO``.

Each such setting is one that a lint rule marks ``at_launch``. What the command line or the profile
says is chosen, and no remnant.
"""

from __future__ import annotations

from collections.abc import Mapping

from ncclops.env.lint import LintFinding, lint, of_environment
from ncclops.env.lint.model import Circumstances, under_profile
from ncclops.env.lint.rules import rules
from ncclops.env.origins import from_files
from ncclops.env.plan import COMMAND_LINE, Plan, PlanContext
from ncclops.profiles.model import RUN_PLACEHOLDERS, Profile


def left_on(
    plan: Plan, profile: Profile, environ: Mapping[str, str], context: PlanContext
) -> dict[str, LintFinding]:
    """``NAME=VALUE`` of what is inherited and left as it is, with what is to be said about it."""
    workers = plan.apply(environ, dict.fromkeys(RUN_PLACEHOLDERS, ""))
    files = {name: found.value for name, found in from_files(workers).items()}
    rows = plan.changes
    chosen = {row.name for row in rows if row.action != "keep" or row.source == COMMAND_LINE}
    chosen |= {
        name
        for name, entries in profile.env.items()
        if any(entry.action == "set" for entry in entries)
    }
    where = under_profile(profile, Circumstances(restart=context.restart, torch=context.torch))
    told = {rule.id for rule in rules() if rule.at_launch}
    after = files | workers
    return {
        f"{name}={after[name]}": finding
        for finding in lint(of_environment(after), where)
        if finding.rule in told
        for name in finding.names
        if name not in chosen
    }


def in_a_line(found: Mapping[str, LintFinding]) -> str | None:
    """What is said at a launch; None where nothing is left on."""
    if not found:
        return None
    return (
        f"inherited by the workers: {', '.join(found)} (`ncclops env diff` says what that does;"
        " --unset NAME removes it, --keep NAME keeps it without this line)"
    )
