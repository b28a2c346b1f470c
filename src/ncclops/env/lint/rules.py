"""Combinations that go wrong, as data: ``data/rules.toml``, each with its own examples.

A rule holds under circumstances (``when``) and if all its conditions on variables do. A
condition on a variable that is not set, or whose value cannot be known, does not hold, except
where it says so (``or_unset``, ``set = false``).
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from typing import Any

from ncclops.durations import parse_duration
from ncclops.env.catalogue import names_of_today
from ncclops.env.lint.model import (
    TORCH_GROUP_TIMEOUT,
    Circumstances,
    Level,
    LintedSettings,
    LintFinding,
    engine,
)
from ncclops.env.values import as_number, is_true


@dataclass(frozen=True)
class LintRule:
    """One rule. ``fires`` and ``quiet`` are examples: variables and circumstances.

    ``at_launch``: it is told at each launch where its variables are inherited. ``unless_chosen``:
    not in a file that gives a variable of it another value elsewhere.
    """

    id: str
    level: Level
    say: str
    fix: str
    source: str
    conditions: Mapping[str, Mapping[str, Any]]
    when: Mapping[str, Any] = field(default_factory=dict)
    at_launch: bool = False
    unless_chosen: bool = False
    fires: tuple[Mapping[str, Any], ...] = ()
    quiet: tuple[Mapping[str, Any], ...] = ()


@cache
def rules() -> tuple[LintRule, ...]:
    """All rules, in the order of the file."""
    text = resources.files("ncclops.env").joinpath("data/rules.toml").read_text("utf-8")
    return tuple(
        LintRule(
            id=raw["id"],
            level=raw["level"],
            say=" ".join(raw["say"].split()),
            fix=" ".join(raw["fix"].split()),
            source=raw["source"],
            conditions=raw.get("if", {}),
            when=raw.get("when", {}),
            at_launch=raw.get("at_launch", False),
            unless_chosen=raw.get("unless_chosen", False),
            fires=tuple(raw["fires"]),
            quiet=tuple(raw["quiet"]),
        )
        for raw in tomllib.loads(text)["rule"]
    )


def check_rules(settings: LintedSettings, where: Circumstances) -> list[LintFinding]:
    """What the rules find in one environment.

    A setting under an old name counts under its name of today, unless that is set as well; what is
    found is said of the name that stands there.
    """
    old = {
        today: name
        for name, today in names_of_today().items()
        if name in settings and today not in settings
    }
    taken = _under_names_of_today(settings, set(old.values())) if old else settings
    return [_finding(rule, taken, where, old) for rule in rules() if _holds(rule, taken, where)]


def _under_names_of_today(settings: LintedSettings, old: set[str]) -> LintedSettings:
    return LintedSettings(
        (
            replace(setting, name=names_of_today()[setting.name])
            if setting.name in old
            else setting
            for setting in settings.all
        ),
        open_end=settings.open_end,
    )


def combinations(settings: LintedSettings, where: Circumstances) -> list[LintFinding]:
    """What the rules find in the environments of ``settings``, each judged by itself.

    What is found because nothing is set has to be so in every one of them.
    """
    found = [check_rules(environment, where) for environment in settings.environments]
    if not found:
        return check_rules(LintedSettings(()), where)
    everywhere = set(found[0]).intersection(*found[1:])
    here = dict.fromkeys(finding for findings in found for finding in findings)
    return [
        finding
        for finding in here
        if (finding.line or finding in everywhere) and not _is_chosen(finding, settings)
    ]


def _is_chosen(finding: LintFinding, settings: LintedSettings) -> bool:
    """Whether a file gives what was found in one place, and another value in another."""
    return finding.rule in _unless_chosen() and not settings.varied.isdisjoint(finding.names)


@cache
def _unless_chosen() -> frozenset[str]:
    return frozenset(rule.id for rule in rules() if rule.unless_chosen)


def _finding(
    rule: LintRule, settings: LintedSettings, where: Circumstances, old: Mapping[str, str]
) -> LintFinding:
    names = tuple(rule.conditions)
    shown = {name: settings.value(name) or "unset" for name in names}
    message = re.sub(r"\{([A-Z0-9_]+)\}", lambda match: shown.get(match[1], match[0]), rule.say)
    line = max((settings.line(name) for name in names), default=0)
    versions = {"torch" if key == "engine" else key for key in rule.when}
    doubt = settings.open_end or not versions.isdisjoint(where.assumed)
    level: Level = "warning" if doubt and rule.level == "error" else rule.level
    written = tuple(old.get(name, name) for name in names)
    message, remedy = (_as_written(text, old) for text in (message, rule.fix))
    return LintFinding(rule.id, level, written, message, remedy, rule.source, line)


def _as_written(text: str, old: Mapping[str, str]) -> str:
    """``text`` with the old names in it that stand in the file."""
    return re.sub(r"\b[A-Z][A-Z0-9_]+\b", lambda match: old.get(match[0], match[0]), text)


def _holds(rule: LintRule, settings: LintedSettings, where: Circumstances) -> bool:
    return all(
        _circumstance(key, wanted, settings, where) for key, wanted in rule.when.items()
    ) and all(
        _condition(name, condition, settings, where) for name, condition in rule.conditions.items()
    )


def _circumstance(key: str, wanted: Any, settings: LintedSettings, where: Circumstances) -> bool:
    if key == "restart":
        return where.restart in (wanted if isinstance(wanted, list) else [wanted])
    if key == "torch":
        return where.torch_is(str(wanted))
    if key == "nccl":
        return where.nccl_is(str(wanted))
    if key == "nodes":
        return bool(where.nodes == wanted)
    if key == "engine":
        return bool(engine(settings, where) == wanted)
    if key == "uses":
        return wanted in where.uses
    if key == "uses_not":
        return wanted not in where.uses
    if key == "not_without_gpus":
        return where.gpus is not False
    if key == "infiniband":
        return where.host is not None and where.host.infiniband is wanted
    if key == "group_timeout_below":
        return (where.group_timeout or TORCH_GROUP_TIMEOUT) < (
            where.hard_timeout if wanted == "hard_timeout" else parse_duration(wanted)
        )
    raise ValueError(f"rules.toml: unknown circumstance {key!r}")


def _condition(
    name: str, condition: Mapping[str, Any], settings: LintedSettings, where: Circumstances
) -> bool:
    if settings.doubtful(name):
        return False
    if "set" in condition:
        # set and empty is not set for NCCL and torch
        return (name in settings and settings.value(name) != "") is condition["set"]
    if name not in settings:
        return bool(condition.get("or_unset", False))
    value = settings.value(name)
    if value is None:
        return False
    tests = {key: wanted for key, wanted in condition.items() if key != "or_unset"}
    return all(_test(key, wanted, value, settings, where) for key, wanted in tests.items())


def _test(
    key: str, wanted: Any, value: str, settings: LintedSettings, where: Circumstances
) -> bool:
    if key == "is":
        return value.lower() in [word.lower() for word in wanted]
    if key == "is_not":
        return value.lower() not in [word.lower() for word in wanted]
    if key == "true":
        return is_true(value) is wanted
    if key == "matches":
        return re.search(wanted, value, re.IGNORECASE) is not None
    if key == "lacks":
        return wanted not in value
    if key == "differs_from":
        other = settings.value(wanted)
        return other is not None and other != value
    number = as_number(value)
    if number is None:
        return False
    if key == "below":
        limit = where.hard_timeout.total_seconds() if wanted == "hard_timeout" else wanted
        return number < float(limit)
    if key == "above":
        return number > float(wanted)
    if key == "above_share_of":
        return number > _share(wanted, settings)
    raise ValueError(f"rules.toml: unknown test {key!r}")


def _share(wanted: Mapping[str, Any], settings: LintedSettings) -> float:
    """``times`` the value of a variable, or of its default where it is not set or unknown.

    ``inverse`` divides by it instead, for products that may not be above ``times``.
    """
    other = settings.value(wanted["variable"])
    number = as_number(other) if other is not None else None
    base = float(wanted["default"] if number is None else number)
    times = float(wanted["times"])
    return times / (base or 1.0) if wanted.get("inverse") else times * base
