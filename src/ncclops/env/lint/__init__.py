"""Lint for environments: unknown names, bad values, and combinations that go wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ncclops.env.lint.checks import CHECK_IDS, check_variables
from ncclops.env.lint.model import (
    LEVELS,
    Circumstances,
    Host,
    Level,
    LintedSettings,
    LintFinding,
    Setting,
    engine,
)
from ncclops.env.lint.rules import LintRule, combinations, rules
from ncclops.env.lint.slips import SLIP_IDS

# Their names up to now, for code of users.
Finding, Rule, Settings = LintFinding, LintRule, LintedSettings

__all__ = [
    "LEVELS",
    "Circumstances",
    "Finding",
    "Host",
    "Level",
    "LintFinding",
    "LintRule",
    "LintedSettings",
    "Rule",
    "Setting",
    "Settings",
    "engine",
    "known_ids",
    "lint",
    "of_environment",
    "rules",
]

_MOST_CHARS = 2000


def of_environment(environ: Mapping[str, str]) -> LintedSettings:
    """The settings of an environment."""
    return LintedSettings(Setting(name, value) for name, value in environ.items())


def known_ids() -> list[str]:
    """All ids that a suppression can name."""
    return sorted([*CHECK_IDS, *SLIP_IDS, *(rule.id for rule in rules())])


def lint(settings: LintedSettings, where: Circumstances) -> list[LintFinding]:
    """All findings, by line and the worst first; what ``where.ignore`` names is left out.

    A suppression is a rule's id, or ``id:NAME`` for one variable only. A message has 2,000
    characters at most, however long a value is.
    """
    findings = [*settings.slips, *check_variables(settings, where), *combinations(settings, where)]
    kept = [finding for finding in findings if not _ignored(finding, where)]
    unique = list(dict.fromkeys(map(_in_bounds, kept)))
    return sorted(unique, key=lambda finding: (finding.line, LEVELS.index(finding.level)))


def _in_bounds(finding: LintFinding) -> LintFinding:
    if len(finding.message) <= _MOST_CHARS:
        return finding
    return replace(finding, message=f"{finding.message[: _MOST_CHARS - 1]}…")


def _ignored(finding: LintFinding, where: Circumstances) -> bool:
    ids = {finding.rule, *(f"{finding.rule}:{name}" for name in finding.names)}
    return not ids.isdisjoint(where.ignore)
