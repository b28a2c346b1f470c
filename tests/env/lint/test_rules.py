"""Every rule is found in its own examples, and is quiet where they say so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from ncclops.durations import parse_duration
from ncclops.env.catalogue import catalogue
from ncclops.env.lint import (
    Circumstances,
    Host,
    LintedSettings,
    LintRule,
    Setting,
    of_environment,
    rules,
)
from ncclops.env.lint.rules import check_rules

RULES = {rule.id: rule for rule in rules()}


def found_in(example: Mapping[str, Any]) -> set[str]:
    given: dict[str, Any] = {key: value for key, value in example.items() if key != "env"}
    for key in given.keys() & {"group_timeout", "hard_timeout"}:
        given[key] = parse_duration(given[key])
    if "infiniband" in given:
        given["host"] = Host(infiniband=given.pop("infiniband"))
    given["uses"] = frozenset(given.get("uses", ()))
    settings = of_environment(example["env"])
    return {finding.rule for finding in check_rules(settings, Circumstances(**given))}


@pytest.mark.parametrize("rule", rules(), ids=RULES.keys())
def test_a_rule_fires_where_it_should_and_nowhere_else(rule: LintRule) -> None:
    assert rule.fires, "a rule needs a case that fires it"
    assert rule.quiet, "and one that does not"
    for example in rule.fires:
        assert rule.id in found_in(example), example
    for example in rule.quiet:
        assert rule.id not in found_in(example), example


@pytest.mark.parametrize("rule", rules(), ids=RULES.keys())
def test_a_rule_names_known_variables_a_reason_and_a_remedy(rule: LintRule) -> None:
    assert set(rule.conditions) <= set(catalogue())
    assert rule.say.endswith(".")
    assert rule.fix
    assert rule.source


def test_rule_ids_are_unique() -> None:
    assert len(RULES) == len(rules())


def test_a_value_that_is_known_only_when_it_runs_fires_nothing() -> None:
    settings = LintedSettings([Setting("NCCL_NET", "IB"), Setting("NCCL_IB_DISABLE", None)])
    assert check_rules(settings, Circumstances()) == []


def test_two_values_in_two_branches_fire_nothing() -> None:
    branches = [Setting("NCCL_IB_DISABLE", "1", 2), Setting("NCCL_IB_DISABLE", "0", 4)]
    settings = LintedSettings([Setting("NCCL_NET", "IB", 1), *branches])
    assert check_rules(settings, Circumstances()) == []
    same = LintedSettings([Setting("NCCL_NET", "IB", 1), branches[0], branches[0]])
    (finding,) = check_rules(same, Circumstances())
    assert (finding.rule, finding.line) == ("net-ib-disabled", 2)
