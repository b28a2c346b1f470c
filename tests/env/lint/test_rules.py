"""Every rule is found in its own examples, and is quiet where they say so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from ncclops.durations import parse_duration
from ncclops.env.catalogue import catalogue, names_of_today
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


def test_a_variable_under_its_old_name_counts_as_the_one_of_today() -> None:
    where = Circumstances(torch="2.7.1")
    settings = of_environment({"NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"})
    (finding,) = check_rules(settings, where)
    assert finding.rule == "blocking-wait-overrides-async"
    assert finding.names == ("NCCL_BLOCKING_WAIT", "TORCH_NCCL_ASYNC_ERROR_HANDLING")


def test_an_old_name_is_not_taken_where_the_one_of_today_is_set() -> None:
    values = {"NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_BLOCKING_WAIT": "0"}
    found = {f.rule for f in check_rules(of_environment(values), Circumstances(torch="2.13.0"))}
    assert found == {"two-blocking-wait-names"}


def test_what_is_said_of_an_old_name_names_it() -> None:
    settings = of_environment({"NCCL_BLOCKING_WAIT": "1"})
    (finding,) = check_rules(settings, Circumstances(torch="2.13.0"))
    assert finding.remedy == "unset NCCL_BLOCKING_WAIT"


def test_old_names_are_those_that_take_the_same_values() -> None:
    assert names_of_today()["NCCL_BLOCKING_WAIT"] == "TORCH_NCCL_BLOCKING_WAIT"
    assert "NCCL_MIN_NCHANNELS" not in names_of_today()
