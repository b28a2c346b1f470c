"""docs/examples/grafana.json: it asks for metrics and labels that a run really exports.

The expressions are parsed by Prometheus' grammar as the package promql-parser has it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import promql_parser as promql
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ncclops.goodput import KINDS
from ncclops.status.metrics import render
from ncclops.status.model import RankStatus, RunStatus, StragglerStatus
from tests.conftest import REPOSITORY

DASHBOARD = json.loads((REPOSITORY / "docs" / "examples" / "grafana.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
OF_PROMETHEUS = {"job", "instance"}  # labels that every sample gets where it is scraped
# Exported, and on no panel: the restarts with mode="process" are the same number.
NOT_SHOWN = {"ncclops_attempt"}


def exported() -> dict[str, set[str]]:
    """Each metric of a run of which all is known, and its labels."""
    rank = RankStatus(
        rank=0,
        host="n01",
        phase="training",
        step=7,
        step_s=0.4,
        step_age_s=0.1,
        heartbeat_age_s=0.1,
        memory_gib=6.0,
        gpu_memory_gib=70.0,
    )
    status = RunStatus(
        run_id="a-run",
        run_dir="/runs/a-run",
        phase="training",
        as_of=2000.0,
        started=1000.0,
        profile="local-cpu",
        world_size=1,
        ranks=(rank,),
        stragglers=(StragglerStatus(rank=0, ratio=1.2),),
        faults={"cuda-error": 1},
        goodput={"ratio": 0.9, "total_s": 10.0, "seconds": dict.fromkeys(KINDS, 1.0)},
    )
    return {
        sample.name: set(sample.labels)
        for family in text_string_to_metric_families(render(status).decode())
        for sample in family.samples
    }


def queries() -> list[str]:
    """Every expression of the dashboard, with a value in place of each variable."""
    found = [target["expr"] for panel in PANELS for target in panel["targets"]]
    found += [each["expr"] for each in DASHBOARD["annotations"]["list"]]
    return found


def selectors(node: Any) -> Iterator[promql.VectorSelector]:
    """The metrics that an expression reads."""
    if isinstance(node, promql.VectorSelector):
        yield node
    for name in ("lhs", "rhs", "expr", "vector_selector"):
        if (part := getattr(node, name, None)) is not None:
            yield from selectors(part)
    for part in getattr(node, "args", ()):
        yield from selectors(part)


def result_labels(node: Any, metrics: dict[str, set[str]]) -> set[str]:
    """The labels that the result of an expression has; raises AssertionError on an unknown one."""
    if isinstance(node, promql.AggregateExpr):
        below = result_labels(node.expr, metrics)
        if str(node.op) in ("topk", "bottomk"):
            return below
        by = set(node.modifier.labels) if node.modifier is not None else set()
        assert by <= below, f"{by - below} of {node.expr}"
        return by
    if isinstance(node, promql.BinaryExpr):
        left, right = (result_labels(each, metrics) for each in (node.lhs, node.rhs))
        if node.modifier is not None and node.modifier.matching is not None:
            on = set(node.modifier.matching.labels)
            assert on <= left & right, f"{on - (left & right)} of {node}"
        return left or right
    if isinstance(node, promql.VectorSelector):
        assert node.name is not None
        matched = {matcher.name for matcher in node.matchers.matchers}
        has = metrics[node.name] | OF_PROMETHEUS
        assert matched <= has, f"{node.name} has no {matched - has}"
        return has
    if isinstance(node, promql.MatrixSelector):
        return result_labels(node.vector_selector, metrics)
    if isinstance(node, promql.Call):
        return set().union(*(result_labels(each, metrics) for each in node.args))
    if isinstance(node, promql.ParenExpr):
        return result_labels(node.expr, metrics)
    assert isinstance(node, promql.NumberLiteral), f"add {type(node)} to this test"
    return set()


def test_it_reads_every_metric_that_a_run_exports_and_no_other() -> None:
    read = {each.name for query in queries() for each in selectors(promql.parse(query))}
    assert read == exported().keys() - NOT_SHOWN


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_each_panel_uses_labels_that_its_metrics_have(panel: dict[str, Any]) -> None:
    metrics = exported()
    for target in panel["targets"]:
        labels = result_labels(promql.parse(target["expr"]), metrics)
        assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= labels, target["expr"]


def test_a_metric_a_label_and_an_order_that_are_wrong_are_found() -> None:
    metrics = exported()
    for wrong in (
        "ncclops_rank_age",
        'ncclops_rank_step{node="n01"}',
        "max by (host) (ncclops_rank_straggler_ratio)",
        "max by (rank) (ncclops_rank_up) and on (instance) ncclops_run_info",
    ):
        with pytest.raises((AssertionError, KeyError)):
            result_labels(promql.parse(wrong), metrics)


def test_every_panel_shows_the_run_that_is_chosen() -> None:
    for query in queries():
        runs = [each for each in selectors(promql.parse(query)) if each.name == "ncclops_run_info"]
        assert [(each.name, each.value) for each in runs[0].matchers.matchers] == [
            ("run_id", "$run")
        ], query


def test_variables_are_filled_from_metrics_and_labels_that_there_are() -> None:
    metrics = exported()
    asked = {
        each["name"]: re.fullmatch(r"label_values\((\w+), (\w+)\)", each["definition"])
        for each in DASHBOARD["templating"]["list"]
        if each["type"] == "query"
    }
    assert asked.keys() == {"run", "rank"}
    for match in asked.values():
        assert match is not None
        assert match[2] in metrics[match[1]]


def test_panels_have_numbers_of_their_own_and_do_not_overlap() -> None:
    every = DASHBOARD["panels"]
    assert len({panel["id"] for panel in every}) == len(every)
    places = [(panel["title"], panel["gridPos"]) for panel in every]
    assert all(place["x"] + place["w"] <= 24 for _, place in places)
    for (one, a), (other, b) in combinations(places, 2):
        beside = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        below = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert beside or below, (one, other)


def test_the_page_names_every_metric() -> None:
    """docs/control.md has the table; a row may leave out what its names begin with."""
    text = (REPOSITORY / "docs" / "control.md").read_text().partition("## Metrics")[2]
    named = set(re.findall(r"`(ncclops_\w+)`", text))
    named |= {f"ncclops_rank{end}" for end in re.findall(r"`(_\w+)`", text)}
    assert exported().keys() <= named
