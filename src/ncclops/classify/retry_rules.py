"""The retry table as values: read from ``retry.toml``, changed by a profile, checked."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any, Literal

from ncclops.classify.model import ELIGIBLE_POLICIES
from ncclops.durations import parse_duration
from ncclops.errors import UsageError
from ncclops.nearest import nearest
from ncclops.toml_files import refuse

Action = Literal["retry", "replace-node", "stop"]
Lane = Literal["generic", "expert-parallel"]
LANES: tuple[Lane, ...] = ("generic", "expert-parallel")
STARTUP_ROW = "startup-error"
LANE_ROW = "lane"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRow:
    """How a retried worker starts."""

    init: Literal["eager", "lazy"]
    """Whether NCCL communicators are made at init_process_group or at the first collective."""
    barrier: Literal["standard", "skipped"]
    """The barrier that the worker entry runs right after init_process_group."""
    watchdog: Literal["standard"] = "standard"
    """Retries keep the standard watchdog variables; there is no other choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRule:
    """What one retry policy of a verdict comes to."""

    action: Action
    row: str = LANE_ROW
    times: int = 0
    """Retries that this policy may cause in the whole job."""
    cooldown: bool = False
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cooldown:
    """Pauses that grow: ``first``, then ``factor`` times the last, up to ``longest``."""

    first: timedelta
    factor: float
    longest: timedelta
    jitter: float
    """Share of the pause (0 to 1) within which randomness may shorten it."""

    def pause(self, earlier: int, random: Callable[[], float]) -> timedelta:
        """The pause after ``earlier`` pauses; ``random`` gives numbers from 0 to 1."""
        # Beyond 64 doublings the float overflows long after ``longest`` was reached.
        grown = self.first.total_seconds() * self.factor ** min(earlier, 64)
        whole = min(grown, self.longest.total_seconds())
        return timedelta(seconds=whole * (1.0 - self.jitter * random()))


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryRules:
    """The whole table: limits, pauses, rows and policies."""

    max_attempts: int
    no_progress_attempts: int
    cooldown: Cooldown
    rows: Mapping[str, StartRow]
    policies: Mapping[str, PolicyRule]

    def overridden(self, changes: Mapping[str, Any]) -> RetryRules:
        """The table with a profile's changes, in the shape of ``retry.toml``.

        Raises ``UsageError`` for a key, row or value the table does not have.
        """
        merged = _as_tables(self)
        for section, values in changes.items():
            if section not in merged:
                raise UsageError(f"retry.{section}: unknown{nearest(section, sorted(merged))}")
            merged[section] = _merge(merged[section], values, f"retry.{section}")
        return _rules_from_tables(merged)


@cache
def default_rules() -> RetryRules:
    """The shipped table."""
    text = (resources.files("ncclops.classify") / "retry.toml").read_text(encoding="utf-8")
    return _rules_from_tables(tomllib.loads(text))


def _rules_from_tables(tables: Mapping[str, Any]) -> RetryRules:
    cooldown, limits = tables["cooldown"], tables["limits"]
    rules = RetryRules(
        max_attempts=_count(limits["max_attempts"], "retry.limits.max_attempts", 1),
        no_progress_attempts=_count(
            limits["no_progress_attempts"], "retry.limits.no_progress_attempts", 1
        ),
        cooldown=Cooldown(
            first=_duration(cooldown["first"], "retry.cooldown.first"),
            factor=_number(cooldown["factor"], "retry.cooldown.factor", 1.0, 100.0),
            longest=_duration(cooldown["longest"], "retry.cooldown.longest"),
            jitter=_number(cooldown["jitter"], "retry.cooldown.jitter", 0.0, 1.0),
        ),
        rows=MappingProxyType({name: StartRow(**row) for name, row in tables["rows"].items()}),
        policies=MappingProxyType(
            {name: PolicyRule(**rule) for name, rule in tables["policies"].items()}
        ),
    )
    _check(rules)
    return rules


def _check(rules: RetryRules) -> None:
    for name, row in rules.rows.items():
        if row.init not in ("eager", "lazy") or row.barrier not in ("standard", "skipped"):
            raise UsageError(
                f"retry.rows.{name}: init is eager or lazy, barrier is standard or skipped"
            )
        if row.watchdog != "standard":
            raise UsageError(f"retry.rows.{name}.watchdog: retries keep the standard watchdog")
    for name, rule in rules.policies.items():
        if rule.action not in ("retry", "replace-node", "stop"):
            raise UsageError(f"retry.policies.{name}.action: retry, replace-node or stop")
        if rule.action != "stop" and name not in ELIGIBLE_POLICIES:
            raise UsageError(f"retry.policies.{name}: what needs a fix first cannot be retried")
        if rule.row != LANE_ROW and rule.row not in rules.rows:
            raise UsageError(f"retry.policies.{name}.row: there is no row {rule.row!r}")
        _count(rule.times, f"retry.policies.{name}.times", 0)


def _as_tables(rules: RetryRules) -> dict[str, Any]:
    cooldown = rules.cooldown
    return {
        "limits": {
            "max_attempts": rules.max_attempts,
            "no_progress_attempts": rules.no_progress_attempts,
        },
        "cooldown": {
            "first": cooldown.first,
            "factor": cooldown.factor,
            "longest": cooldown.longest,
            "jitter": cooldown.jitter,
        },
        "rows": {name: _fields(row) for name, row in rules.rows.items()},
        "policies": {name: _fields(rule) for name, rule in rules.policies.items()},
    }


def _fields(value: StartRow | PolicyRule) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def _merge(old: Mapping[str, Any], new: Any, where: str) -> dict[str, Any]:
    if not isinstance(new, Mapping):
        raise UsageError(f"{where} must be a table, not {new!r}")
    if unknown := sorted(set(new) - set(old)):
        refuse(f"{where}.{key}: unknown{nearest(key, sorted(old))}" for key in unknown)
    return {
        key: _merge(value, new[key], f"{where}.{key}")
        if isinstance(value, Mapping) and key in new
        else new.get(key, value)
        for key, value in old.items()
    }


def _count(value: Any, where: str, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UsageError(f"{where} = {value!r}: a whole number of at least {least}")
    return value


def _number(value: Any, where: str, least: float, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise UsageError(f"{where} = {value!r}: a number from {least:g} to {most:g}")
    return float(value)


def _duration(value: Any, where: str) -> timedelta:
    if isinstance(value, timedelta):
        return value
    try:
        return parse_duration(value)
    except (ValueError, AttributeError) as error:
        raise UsageError(f"{where} = {value!r}: a duration such as 30s") from error
